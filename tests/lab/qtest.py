"""A stock QEMU whose virtio-blk device a test drives by hand, without a guest.

QEMU's processor halts at its first instruction. The test speaks QEMU's qtest protocol: it finds the device on the PCI bus,
negotiates through its registers, and has the rings in the machine's memory, which is a memfd that all map. So QEMU's own
vhost-user front end runs, at native speed and with rings that no driver would make.

    with Machine(directory, socket, queues=2) as machine:
        disk = VirtioBlk(machine)
        status, used, data = disk.run(0, vhost_ring.IN, sector=8, size=4096)

Virtio 1.2, sections 4.1.4 (PCI registers) and 5.2 (block device); QEMU's docs/devel/testing/qtest."""

import mmap
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

import paths
from qmp import Qmp
from paths import die_with_parent

sys.path.insert(0, os.path.join(paths.HERE, "guest"))
import vhost_ring  # noqa: E402  the same rings as those of /dev/vhost-blk

LONGEST_S = 60
MEMORY_MIB = 64
HALT = b"\xf4"
SLOT = 4  # of the device on the PCI bus
BAR = 0xE000_0000  # in the hole of a machine with little memory
VENDOR_CAPABILITY = 0x09
COMMON, NOTIFY, CONFIG = 1, 2, 4  # cfg_type of virtio's PCI capabilities
ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK = 1, 2, 4, 8  # device status
F_FLUSH, F_CONFIG_WCE, F_MQ, F_DISCARD, F_WRITE_ZEROES, F_INDIRECT, F_EVENT_IDX, F_VERSION_1, F_RING_PACKED = (
    1 << bit for bit in (9, 11, 12, 13, 14, 28, 29, 32, 34))


class Memory:
    """A part of the machine's memory, by physical address; what vhost_ring.Memory is to a ring."""

    def __init__(self, size, base=0):
        self.size, self.base = size, base
        self.fd = os.memfd_create("machine")
        os.truncate(self.fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.map = mmap.mmap(self.fd, size)
        self.machine = None  # through which to write, so that a migration sees it
        # The first MiB belongs to the firmware.
        self.free = base + (1 << 20)

    def allocate(self, size, align=16):
        address = -(-self.free // align) * align
        self.free = address + size
        assert self.free <= self.base + self.size, "the machine's memory is full"
        return address

    def write(self, address, data):
        if self.machine:
            return self.machine.say(f"write {address:#x} {len(data):#x} 0x{data.hex()}")
        self.map[address - self.base:address - self.base + len(data)] = data

    def read(self, address, size):
        return self.map[address - self.base:address - self.base + size]


class Machine:
    """One QEMU. Use it in a `with`."""

    def __init__(self, directory, vhost_user, queues=1, incoming=None, options=""):
        """directory: for its log. vhost_user: the socket of the server. incoming: a URI, to take a migration from.
        options: more of the device, as ",key=value"."""
        self.directory, self.vhost_user, self.queues, self.incoming, self.options = directory, vhost_user, queues, incoming, options
        self.files = tempfile.mkdtemp(prefix="lab-")
        self.memory = Memory(MEMORY_MIB << 20)
        self.log = os.path.join(directory, "qemu-incoming.log" if incoming else "qemu.log")
        self.process = self.qmp = None

    def command(self):
        firmware = os.path.join(self.files, "firmware")
        with open(firmware, "wb") as file:
            file.write(HALT * (64 << 10))
        return [
            paths.QEMU, "-accel", "tcg", "-nodefaults", "-no-user-config", "-display", "none", "-bios", firmware,
            "-machine", "pc,memory-backend=ram", "-m", f"{MEMORY_MIB}M,slots=2,maxmem=1G",
            "-object", f"memory-backend-file,id=ram,size={MEMORY_MIB}M,mem-path={self.memory.path},share=on",
            "-qtest", f"unix:{self.files}/qtest,server=on,wait=off", "-qtest-log", "none",
            "-qmp", f"unix:{self.files}/qmp,server=on,wait=off",
            "-chardev", f"socket,id=disk,path={self.vhost_user},reconnect-ms=20",
            "-device", f"vhost-user-blk-pci,id=disk,chardev=disk,num-queues={self.queues},addr={SLOT},disable-legacy=on{self.options}",
            *(["-incoming", self.incoming] if self.incoming else []),
        ]

    def __enter__(self):
        os.makedirs(self.directory, exist_ok=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)
        try:
            self.socket = self.connect("qtest")
            self.lines = self.socket.makefile("r")
            self.connect("qmp").close()
            self.qmp = Qmp(os.path.join(self.files, "qmp"))
        except BaseException:
            self.close()
            raise
        return self

    def connect(self, name):
        deadline = time.monotonic() + LONGEST_S
        while True:
            try:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(os.path.join(self.files, name))
                return connection
            except OSError as error:
                connection.close()
                assert self.process.poll() is None, f"QEMU ended with code {self.process.poll()}\n{self.logs()}"
                assert time.monotonic() < deadline, f"QEMU does not answer at {name}: {error}\n{self.logs()}"
                time.sleep(0.01)

    def __exit__(self, *exception):
        self.close()

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.files, ignore_errors=True)

    def logs(self):
        return f"--- {os.path.basename(self.log)}\n{paths.tail(self.log)}\n"

    def say(self, command):
        """Run a command of the qtest protocol and return its answer, or None. Interrupts on the way are dropped."""
        self.socket.sendall(command.encode() + b"\n")
        while True:
            words = self.lines.readline().split()
            assert words, f"QEMU closed the connection at: {command}\n{self.logs()}"
            if words[0] == "IRQ":
                continue
            assert words[0] == "OK", f"{command}: {' '.join(words)}"
            return int(words[1], 0) if len(words) > 1 else None

    def pci_read(self, offset):
        self.say(f"outl 0xcf8 {1 << 31 | SLOT << 11 | offset & 0xFC:#x}")
        return self.say("inl 0xcfc") >> 8 * (offset & 3)

    def pci_write(self, offset, value):
        self.say(f"outl 0xcf8 {1 << 31 | SLOT << 11 | offset:#x}")
        self.say(f"outl 0xcfc {value:#x}")

    def plug_memory(self, size):
        """Plug a memory module in, and return it."""
        module = Memory(size)
        self.qmp.run("object-add", **{"qom-type": "memory-backend-file", "id": "module", "size": size, "mem-path": module.path, "share": True})
        self.qmp.run("device_add", driver="pc-dimm", id="dimm", memdev="module")
        plugged, = self.qmp.run("query-memory-devices")
        module.base = plugged["data"]["addr"]
        return module


class Ring(vhost_ring.Ring):
    """A ring whose kick is a register of the device."""

    def __init__(self, device, index, address, size):
        super().__init__(device.machine.memory, size)
        self.device, self.index, self.address = device, index, address

    def notify(self):
        self.device.machine.say(f"writew {self.address:#x} {self.index}")

    def wait(self, count=1):
        return super().wait(count, by_interrupt=False)


class VirtioBlk:
    """The device, from reset to DRIVER_OK."""

    def __init__(self, machine, queue_size=128, refused=F_RING_PACKED | F_EVENT_IDX, starts=True):
        """refused: features that the driver does not accept. starts: False for a device whose state will be migrated."""
        self.machine, self.rings, self.features = machine, [], 0
        self.find_registers()
        if starts:
            self.start(queue_size, refused)

    def find_registers(self):
        machine = self.machine
        capability, found = machine.pci_read(0x34) & 0xFF, {}
        while capability:
            kind, following, _, type_ = struct.unpack("<4B", struct.pack("<I", machine.pci_read(capability)))
            if kind == VENDOR_CAPABILITY and type_ in (COMMON, NOTIFY, CONFIG):
                bar, offset = machine.pci_read(capability + 4) & 0xFF, machine.pci_read(capability + 8)
                found[type_] = BAR + offset
                self.bar = bar
                if type_ == NOTIFY:
                    self.notify_multiplier = machine.pci_read(capability + 16)
            capability = following
        assert len(found) == 3, f"no virtio device in PCI slot {SLOT}: {found}"
        self.common, self.notify, self.config = found[COMMON], found[NOTIFY], found[CONFIG]

    def map_registers(self):
        self.machine.pci_write(0x10 + 4 * self.bar, BAR)
        self.machine.pci_write(0x14 + 4 * self.bar, 0)
        self.machine.pci_write(0x04, 0x6)  # memory space, bus master

    def start(self, queue_size, refused):
        machine, common = self.machine, self.common
        self.map_registers()
        self.set(common + 0x14, 0, "b")
        self.set(common + 0x14, ACKNOWLEDGE | DRIVER, "b")
        for half in (0, 1):
            self.set(common, half, "l")
            self.features |= machine.say(f"readl {common + 4:#x}") << 32 * half
        self.features &= ~refused
        for half in (0, 1):
            self.set(common + 8, half, "l")
            self.set(common + 12, self.features >> 32 * half & 0xFFFF_FFFF, "l")
        self.set(common + 0x14, ACKNOWLEDGE | DRIVER | FEATURES_OK, "b")
        assert machine.say(f"readb {common + 0x14:#x}") & FEATURES_OK, f"features {self.features:#x} are refused"
        for index in range(machine.queues):
            self.set(common + 0x16, index, "w")
            self.set(common + 0x18, queue_size, "w")
            offset = machine.say(f"readw {common + 0x1e:#x}")
            ring = Ring(self, index, self.notify + offset * self.notify_multiplier, queue_size)
            for register, address in ((0x20, ring.desc), (0x28, ring.avail), (0x30, ring.used)):
                self.set(common + register, address, "q")
            self.set(common + 0x1c, 1, "w")
            self.rings.append(ring)
        self.set(common + 0x14, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK, "b")

    def set(self, register, value, width):
        if width == "q":
            self.set(register, value & 0xFFFF_FFFF, "l")
            return self.set(register + 4, value >> 32, "l")
        self.machine.say(f"write{width} {register:#x} {value:#x}")

    def capacity(self):
        """In sectors."""
        low, high = (self.machine.say(f"readl {self.config + offset:#x}") for offset in (0, 4))
        return low | high << 32

    def run(self, queue, *arguments, **options):
        """As vhost_ring.run, on a queue."""
        return vhost_ring.run(self.rings[queue], *arguments, **options)

    def read_into(self, queue, address, sector, size):
        """Read to an address of the machine, where other memory than the ring's may be. The read must succeed."""
        ring, memory = self.rings[queue], self.machine.memory
        header, status = memory.allocate(16), memory.allocate(1)
        memory.write(header, vhost_ring.header(vhost_ring.IN, sector))
        memory.write(status, bytes([vhost_ring.UNSET]))
        head = ring.chain([(header, 16, False), (address, size, True), (status, 1, True)])
        ring.offer(head)
        ring.notify()
        assert ring.wait() == [(head, size + 1)]
        assert memory.read(status, 1) == bytes([vhost_ring.OK])

    def offer(self, queue, count, type_, sector=0, size=512, fill=None):
        """Make requests of one size available, each on the sectors after the one before. Returns them."""
        ring = self.rings[queue]
        requests = []
        for i in range(count):
            data = {"data": bytes([fill(i)]) * size} if type_ == vhost_ring.OUT else {"size": size}
            requests.append(vhost_ring.Request(ring, type_, sector + i * size // 512, align=512, **data))
        ring.offer(*(request.head for request in requests))
        ring.notify()
        return requests

    def take(self, queue, requests):
        """Wait until each of the requests is complete, and check that each was used once, without an error."""
        used = [head for head, _ in self.rings[queue].wait(len(requests))]
        assert sorted(used) == sorted(request.head for request in requests), f"used: {used}"
        assert not self.rings[queue].take(), "more requests are complete than were made"
        for request in requests:
            assert request.result() == vhost_ring.OK, f"head {request.head}: status {request.result()}"
