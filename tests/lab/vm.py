#!/usr/bin/env python3
"""A stock Linux guest under QEMU, driven command by command.

    with Guest(disks=[Disk("/tmp/vhost.sock", queues=4)], cpus=4) as guest:
        print(guest.sh("lsblk; fio --filename=/dev/vda ..."))

The guest's root is the host's root: read-only over 9p, with a tmpfs overlay, so host tools (fio, mkfs) and the repo
are there. Commands go to guest/agent over a virtio-serial port. QMP, the console's text and QEMU's own messages are
at hand for a test that fails. Run as a program it boots a guest, runs one script, and exits with the script's code:

    tests/lab/vm.py --disk /tmp/vhost.sock,queues=4,packed=on -c 'lsblk'
"""

import argparse
import base64
import dataclasses
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import paths
import snapshot
from paths import die_with_parent
from qmp import Qmp, QmpError
from snapshot import SnapshotError

BOOT_TIMEOUT_S = 90  # 5 s on a quiet machine; a busy one emulates slowly
# Emulating several processors, QEMU 10 now and then fails an assertion of its own (RACE), or loses a timer, while
# the kernel starts. The drivers of what is tested are loaded later, and nothing has been written by then.
BOOT_ATTEMPTS = 3
MEMORY_MIB = 768
DIRECTORY = os.path.join(paths.LAB, "out", "vm")
MAX_CLOSING_LINE = 16  # bytes of the agent's closing line: newline, 0x1e, exit code, newline
# qemu_arguments for a network on which the guest reaches the host's loopback addresses at HOST_ADDRESS.
NETWORK = ["-netdev", "user,id=net", "-device", "virtio-net-pci,id=nic,netdev=net,romfile="]
HOST_ADDRESS = "10.0.2.2"
ROOT_DEVICE = "virtio-9p-pci,fsdev=host,mount_tag=host"
PORTS = 5  # of a restored guest: most of its disks, and the root
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests audit=0 apparmor=0 nowatchdog tsc=reliable"
    " no_timer_check random.trust_cpu=on"
)


class GuestError(Exception):
    """The guest did not boot, died, ran out of time, or a command failed in it. Guest.logs may say why."""


class EmulatorError(GuestError):
    """It was the emulator: the test is worth another attempt. QEMU has failed an assertion that emulated processors race
    for; or the guest's kernel complains that something could not run for 21 s and more, as when a processor loses a timer or
    an interrupt, and a command ran out of time or nothing else is wrong; or a command ran out of time, and the kernel answers
    no interrupt."""


STALL = re.compile(r"rcu: .*detected .*stall")  # Documentation/RCU/stallwarn.rst
NMI = "NMI received for unknown reason"  # arch/x86/kernel/nmi.c
RACE = "iotlb_to_section: Assertion"  # of QEMU 10 with several processors


@dataclasses.dataclass
class Disk:
    """A vhost-user-blk device of the guest: /dev/vda is the first, /dev/vdb the second, ..."""

    socket: str
    queues: int = 1
    packed: bool = False
    reconnect_ms: int = 200
    options: str = ""  # more QEMU device properties: "queue-size=1024,config-wce=off"

    def chardev(self, number):
        return ["-chardev", f"socket,id=disk{number},path={self.socket},reconnect-ms={self.reconnect_ms}"]

    def device(self, number):
        device = f"vhost-user-blk-pci,id=disk{number},chardev=disk{number},num-queues={self.queues}"
        device += ",packed=" + ("on" if self.packed else "off")
        return device + (f",{self.options}" if self.options else "")


class Job:
    """A script that runs in the guest in the background (Guest.start)."""

    def __init__(self, guest, name, script):
        self.guest, self.name, self.script = guest, name, script

    def is_running(self):
        return self.guest.sh(f"[ ! -e /run/{self.name}.code ]", check=False)[0] == 0

    def wait(self, timeout_s=300):
        """Wait for the end and return what it printed; raises GuestError when it fails or runs out of time."""
        deadline = time.monotonic() + timeout_s
        while self.is_running():
            if time.monotonic() > deadline:
                raise self.guest.out_of_time(f"{self.script}\n{self.guest.sh(f'cat /run/{self.name}.out')}")
            time.sleep(0.2)
        code, output = self.guest.sh(f"cat /run/{self.name}.out; exit $(cat /run/{self.name}.code)", check=False)
        if code != 0:
            raise GuestError(f"in the guest, exit code {code}: {self.script}\n{output}")
        return output


class Guest:
    """One running guest. Use it in a `with`; it is ended by its own pid at the end, however the block ends."""

    def __init__(self, disks=(), cpus=1, memory_mib=MEMORY_MIB, directory=DIRECTORY, accel=None, devices=(),
                 qemu_arguments=(), kernel_arguments="", kernel=paths.KERNEL, can_restore=True):
        """devices: those of devices.py, which the caller attaches. directory: where console.log, qemu.log and the
        devices' images are kept. qemu_arguments, kernel_arguments: what is special. kernel: a directory of paths.py.
        can_restore: whether it may start from a snapshot, which a single boot would only have to make."""
        paths.require_setup()
        self.disks, self.cpus, self.memory_mib, self.devices = list(disks), cpus, memory_mib, list(devices)
        self.accel = accel or paths.accelerator()
        self.sockets = tempfile.mkdtemp(prefix="lab-")  # short: a Unix socket's path has at most 107 bytes
        self.directory = directory
        self.qemu_arguments, self.kernel, self.can_restore = list(qemu_arguments), kernel, can_restore
        self.kernel_arguments = " ".join(filter(None, [kernel_arguments, *(device.kernel_arguments for device in devices)]))
        self.device_arguments = [argument for device in devices for argument in device.arguments(directory)]
        self.process = self.agent = self._qmp = None
        self.boot_s = None
        self.interrupt_timeout_s = 30

    def __enter__(self):
        started = time.monotonic()
        for disk in self.disks:
            if not os.path.exists(disk.socket):  # QEMU would wait for it without a word
                raise GuestError(f"no vhost-user-blk server listens at {disk.socket}")
        for attempt in range(1, BOOT_ATTEMPTS + 1):
            try:
                state = self._snapshot()
                self._spawn(self._command(restores=state is not None))
                self.agent = self._connect("agent.sock")
                if state is not None:
                    self._restore(state)
                self._read_until(rb"\x1eready\n$", time.monotonic() + BOOT_TIMEOUT_S, "booting")
                if state is not None:
                    self.sh(f"date -s @{time.time():.3f}")  # the clock stood still in the snapshot
                break
            except (GuestError, SnapshotError, QmpError):
                self.close()
                if attempt == BOOT_ATTEMPTS:
                    raise
                self.sockets = tempfile.mkdtemp(prefix="lab-")
            except BaseException:
                self.close()
                raise
        self.boot_s = time.monotonic() - started
        return self

    def __exit__(self, *exc):
        self.close()

    def sh(self, script, timeout_s=300, check=True, stream=None):
        """Run a bash script in the guest and return what it printed. Raises GuestError when it fails, unless check is
        off: then returns (exit code, output). stream: a binary file that gets the output as it comes."""
        encoded = base64.b64encode(script.encode())
        self._send(encoded + b"\n")
        match, output = self._read_until(rb"\n\x1e(\d+)\n$", time.monotonic() + timeout_s, script, stream)
        code, text = int(match.group(1)), output.decode(errors="replace")
        if not check:
            return code, text
        if code != 0:
            raise GuestError(f"in the guest, exit code {code}: {script}\n{text}")
        return text

    def start(self, name, script):
        """Run a bash script in the guest in the background."""
        # A job of this name may have ended before. What the shell says of one that is killed is not the answer to
        # whatever is asked at that moment.
        self.sh(f"rm -f /run/{name}.code; (set +e; ( {script}\n ) >/run/{name}.out 2>&1; echo $? >/run/{name}.code.new;"
                f" mv /run/{name}.code.new /run/{name}.code) >/dev/null 2>&1 &")
        return Job(self, name, script)

    def modprobe(self, *modules):
        self.sh("modprobe -a " + " ".join(modules))

    def attach_disks(self):
        """Load the virtio-blk driver and wait for the disks' nodes (there is no udev in the guest)."""
        self.modprobe("virtio_blk")
        nodes = " ".join("/dev/vd" + "abcdefghijklmnop"[i] for i in range(len(self.disks)))
        self.sh(f"for d in {nodes}; do for i in $(seq 200); do [ -b $d ] && break; sleep 0.05; done; [ -b $d ]; done")

    def qmp(self, command, **arguments):
        """Run a QMP command of this guest's QEMU and return its result."""
        if self._qmp is None:
            self._qmp = Qmp(os.path.join(self.sockets, "qmp.sock"))
        return self._qmp.run(command, **arguments)

    def exit(self, code=0):
        """End the guest from inside and return the code it handed to isa-debug-exit."""
        self._send(f"exit {code}\n".encode())
        status = self.process.wait(timeout=BOOT_TIMEOUT_S)
        return status >> 1 if status & 1 else None

    def logs(self, lines=30):
        """The tail of the guest's console and of QEMU's messages, for a person who reads about a failure."""
        tails = [(name, paths.tail(os.path.join(self.directory, name), lines)) for name in ("console.log", "qemu.log")]
        return "".join(f"--- {name}\n{text}\n" for name, text in tails if text)

    def has_stalled(self):
        return STALL.search(self._said("console.log")) is not None

    def out_of_time(self, doing):
        """What is to be raised when the guest does not answer in time."""
        is_emulator = self.has_stalled() or not self._answers_an_interrupt()
        return (EmulatorError if is_emulator else GuestError)(f"out of time: {doing}")

    def _answers_an_interrupt(self):
        """Whether the guest's kernel runs: it reports a non-maskable interrupt on its console."""
        before = self._said("console.log").count(NMI)
        try:
            self.qmp("inject-nmi")
        except (OSError, QmpError):
            return True  # not known: it counts as a failure of the test
        deadline = time.monotonic() + self.interrupt_timeout_s
        while self._said("console.log").count(NMI) <= before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _spawn(self, command):
        os.makedirs(self.directory, exist_ok=True)
        self._qmp = None
        with open(os.path.join(self.directory, "qemu.log"), "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)

    def _snapshot(self):
        """The state that the guest starts from, or None for a guest that has to boot: with devices that the kernel must
        meet while it boots, and where the boot is fast."""
        if self.device_arguments or self.qemu_arguments or self.kernel_arguments or not self.can_restore:
            return None
        if self.accel != "tcg" or len(self.disks) >= PORTS:
            return None
        name = f"{self.cpus}-{self.memory_mib}M"
        return snapshot.Snapshot(lambda directory: self._saved_machine(directory, directory), name, self.kernel).state()

    def _restore(self, state):
        """Load the state, plug in the host's root and the disks, and let the guest run."""
        self._connect("qmp.sock").close()  # wait for it
        snapshot.restore(self.qmp, state)
        for port, device in enumerate([*(disk.device(number) for number, disk in enumerate(self.disks)), ROOT_DEVICE]):
            said = self.qmp("human-monitor-command", **{"command-line": f"device_add {device},bus=port{port}"})
            if said:
                raise GuestError(f"device_add {device}: {said}")
        self.qmp("cont")

    def _saved_machine(self, sockets, logs):
        """The machine of a snapshot, which its restore has to repeat."""
        return self._machine(snapshot.KERNEL_ARGUMENT, sockets, logs) + snapshot.root_ports(PORTS)

    def _machine(self, kernel_arguments, sockets, logs):
        """The arguments that booted and restored guests share."""
        return [
            paths.QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-accel", f"tcg,thread={self._threads()}" if self.accel == "tcg" else self.accel,
            "-cpu", "host" if self.accel == "kvm" else "max",
            "-machine", "q35", "-smp", str(self.cpus), "-m", f"{self.memory_mib}M",
            # a vhost-user server maps the guest's memory, so it must be shared
            "-object", f"memory-backend-memfd,id=memory,size={self.memory_mib}M,share=on", "-numa", "node,memdev=memory",
            # an IOMMU must stand before every device behind it
            *self.device_arguments,
            *self._boot_arguments(kernel_arguments),
            "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
            "-chardev", f"file,id=console,path={logs}/console.log", "-serial", "chardev:console",
            "-chardev", f"socket,id=agent,path={sockets}/agent.sock,server=on,wait=off",
            "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,nr=1",
            "-qmp", f"unix:{sockets}/qmp.sock,server=on,wait=off",
            "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04",
            "-device", "vmgenid,guid=auto",  # a restored guest draws new random numbers
        ]

    def _boot_arguments(self, kernel_arguments):
        """Where the kernel comes from: QEMU loads it."""
        kernel_arguments = f"{KERNEL_ARGUMENTS} {kernel_arguments}"
        kernel_arguments += f" lab.agent={paths.HERE}/guest/agent lab.modules={self.kernel}/lib/modules"
        return ["-kernel", f"{self.kernel}/vmlinux", "-initrd", f"{self.kernel}/initramfs.cpio", "-append", kernel_arguments]

    def _root_arguments(self):
        """The device with the host's root."""
        return ["-device", ROOT_DEVICE]

    def _threads(self):
        is_one = any(getattr(device, "is_emulated_by_one_thread", False) for device in self.devices)
        return "single" if is_one else "multi"

    def _command(self, restores):
        if restores:
            command = [*self._saved_machine(self.sockets, self.directory), "-incoming", "defer"]
        else:
            command = [*self._machine(self.kernel_arguments, self.sockets, self.directory), *self._root_arguments()]
        for number, disk in enumerate(self.disks):
            command += disk.chardev(number)
            if not restores:
                command += ["-device", disk.device(number)]
        return command + self.qemu_arguments

    def _connect(self, name):
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(os.path.join(self.sockets, name))
                return connection
            except OSError:
                connection.close()
                self._fail_if_dead("starting")
                if time.monotonic() > deadline:
                    raise GuestError(f"QEMU did not open its socket {name} in {BOOT_TIMEOUT_S} s")
                time.sleep(0.02)

    def _send(self, data):
        try:
            self.agent.sendall(data)
        except OSError as error:
            raise GuestError(f"the guest is gone ({error})") from error

    def _read_until(self, pattern, deadline, doing, stream=None):
        """Read the agent's output up to pattern, which ends it; return the match and what stood before it."""
        output, streamed = bytearray(), 0
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self.agent], [], [], left_s)[0]:
                raise self.out_of_time(f"{doing}\n{paths.last_lines(output)}")
            data = self.agent.recv(65536)
            if not data:
                time.sleep(0.1)
                self._fail_if_dead(doing)
                raise GuestError(f"the guest closed its connection: {doing}")
            output += data
            match = re.search(pattern, output[-MAX_CLOSING_LINE:])
            end = len(output) - (len(match.group(0)) if match else MAX_CLOSING_LINE)
            if stream is not None and end > streamed:
                stream.write(output[streamed:end])
                stream.flush()
                streamed = end
            if match:
                return match, bytes(output[:end])

    def _fail_if_dead(self, doing):
        code = self.process.poll()
        if code is not None:
            is_race = RACE in self._said("qemu.log")
            raise (EmulatorError if is_race else GuestError)(f"QEMU ended with code {code}: {doing}")

    def _said(self, log):
        return paths.tail(os.path.join(self.directory, log), 10000)


def parse_disk(text):
    path, *settings = text.split(",")
    disk = Disk(path)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "queues":
            disk.queues = int(value)
        elif key == "packed":
            disk.packed = value == "on"
        else:
            disk.options = ",".join(filter(None, [disk.options, setting]))
    return disk


def exit_on_sigterm():
    """Turn SIGTERM into an exit, so that every `with` on the way ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def main():
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description="Boot a guest, run a script in it, exit with the script's code.")
    parser.add_argument("script", nargs="?", help="a bash script of the host to run in the guest")
    parser.add_argument("-c", "--command", help="the script itself")
    parser.add_argument("--disk", action="append", default=[], type=parse_disk, metavar="SOCKET[,queues=N][,packed=on][,PROPERTY=VALUE]",
                        help="a vhost-user-blk server's socket, as /dev/vda, /dev/vdb, ...")
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--new-kernel", action="store_true", help="boot the newest kernel that the lab has")
    parser.add_argument("--memory-mib", type=int, default=MEMORY_MIB)
    parser.add_argument("--accel", choices=["tcg", "kvm"], help="default: what tests/lab/setup found to work")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="for the script, without the boot")
    parser.add_argument("--console", action="store_true", help="print the guest's console at the end")
    options = parser.parse_args()
    if (options.script is None) == (options.command is None):
        parser.error("give a script or -c COMMAND")
    script = options.command or f"bash {os.path.abspath(options.script)}"
    kernel = paths.NEW_KERNEL if options.new_kernel else paths.KERNEL
    guest = Guest(options.disk, options.cpus, options.memory_mib, accel=options.accel, kernel=kernel)
    try:
        with guest:
            if options.disk:
                guest.attach_disks()
            code, _ = guest.sh(script, options.timeout, check=False, stream=sys.stdout.buffer)
            print(f"\nbooted in {guest.boot_s:.1f} s, exit code {code}", file=sys.stderr)
            if options.console:
                print(guest.logs(lines=1000), file=sys.stderr)
            sys.exit(guest.exit(code))
    except GuestError as error:
        sys.exit(f"vm.py: {error}\n{guest.logs()}")


if __name__ == "__main__":
    main()
