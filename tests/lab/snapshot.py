"""Guests that start from a snapshot: the kernel boots once for each machine, and every test restores its memory.

`Snapshot(machine, identity).state()` boots the machine (QEMU's arguments) if no state is kept for this identity, waits
until guest/init has loaded the modules and stands before the mount of the host's root, and writes memory and devices to
a file. QEMU restores it with `-incoming defer` and `restore(qmp, state)`; the root and the disks are plugged in then."""

import fcntl
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile
import time

import paths
from paths import die_with_parent
from qmp import Qmp

DIRECTORY = os.path.join(paths.LAB, "snapshots")
# Written by guest/init before it waits for the host's root; the argument of the kernel that asks for it.
READY = KERNEL_ARGUMENT = "lab.snapshot"
BOOT_TIMEOUT_S = 120
BANDWIDTH = 1 << 40  # bytes a second: no limit


class SnapshotError(Exception):
    """A machine could not be saved or restored."""


def root_ports(count):
    """Sockets for devices that are plugged in after the restore, in the order in which the guest finds them."""
    return [argument for number in range(count) for argument in
            ("-device", f"pcie-root-port,id=port{number},chassis={number + 1},slot={number + 1},addr={number + 8:#x}")]


def _wait(condition, doing):
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SnapshotError(f"{doing}: not done after {BOOT_TIMEOUT_S} s")
        time.sleep(0.02)


def _has_migrated(qmp):
    status = qmp("query-migrate")
    if status.get("status") == "failed":
        raise SnapshotError(f"snapshot: {status.get('error-desc', 'the migration failed')}")
    return status.get("status") == "completed"


def _prepare(qmp):
    qmp("migrate-set-capabilities", capabilities=[{"capability": "mapped-ram", "state": True}])
    qmp("migrate-set-parameters", **{"max-bandwidth": BANDWIDTH})


def restore(qmp, state):
    """Load a state into a QEMU that was started with `-incoming defer`; the guest is paused afterwards."""
    _prepare(qmp)
    qmp("migrate-incoming", uri=f"file:{state}")
    _wait(lambda: qmp("query-status")["status"] != "inmigrate" and _has_migrated(qmp), f"restore of {state}")


class Snapshot:
    def __init__(self, machine, name, kernel):
        """machine(directory): QEMU's command line, with sockets and logs in the directory. name: what tells machines of
        one kernel apart. kernel: the directory of its vmlinux and initramfs."""
        self.machine, self.name = machine, f"{os.path.basename(kernel)}-{name}"
        files = [f"{kernel}/vmlinux", f"{kernel}/initramfs.cpio", os.path.realpath(paths.QEMU)]
        stamps = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
        self.identity = hashlib.sha256(repr((machine("/"), stamps)).encode()).hexdigest()[:16]

    def state(self):
        """The path of the state, which is made when none is kept."""
        path = os.path.join(DIRECTORY, f"{self.name}-{self.identity}.state")
        if os.path.exists(path):
            return path
        os.makedirs(DIRECTORY, exist_ok=True)
        with open(os.path.join(DIRECTORY, f"{self.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the second test waits, and finds the state
            if not os.path.exists(path):
                for old in glob.glob(os.path.join(DIRECTORY, f"{self.name}-*.state")):
                    os.unlink(old)
                self._save(path)
        return path

    def _save(self, path):
        directory = tempfile.mkdtemp(prefix="lab-")
        log = os.path.join(directory, "qemu.log")
        with open(log, "wb") as output:
            qemu = subprocess.Popen(self.machine(directory), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                    preexec_fn=die_with_parent)
        try:
            def is_ready():
                if qemu.poll() is not None:
                    raise SnapshotError(f"QEMU ended with code {qemu.returncode}: {paths.tail(log)}")
                return READY in paths.tail(os.path.join(directory, "console.log"))

            _wait(is_ready, f"boot of {self.name}")
            qmp = Qmp(os.path.join(directory, "qmp.sock")).run
            qmp("stop")
            _prepare(qmp)
            qmp("migrate", uri=f"file:{path}.new")
            _wait(lambda: _has_migrated(qmp), f"save of {self.name}")
            os.rename(f"{path}.new", path)
        finally:
            qemu.kill()
            qemu.wait()
            shutil.rmtree(directory, ignore_errors=True)
