"""What a lab test gets: its own server, its own guest, and the end of both.

A test is a function whose only parameter is `lab`, in a file under cases/; its name is a sentence. It fails by
raising (assert, GuestError, ServerError)."""

import contextlib
import functools
import os
import shutil
import tempfile

import paths
import workload
from runner import Skipped
from server import QemuStorageDaemon, Server
from vm import Disk, EmulatorError, Guest

IMAGE_MIB = 256
# A kernel's argument: wrong accesses to memory are reported, which are not by default.
CHECKED_MEMORY = "kfence.sample_interval=1 slub_debug=FZPU"
FEATURE_RING_PACKED = 34  # VIRTIO_F_RING_PACKED, virtio 1.2 section 6
FEATURE_WRITE_ZEROES = 14  # VIRTIO_BLK_F_WRITE_ZEROES, virtio 1.2 section 5.2.3


def needs_freestone(test):
    """Marks a test of something that qemu-storage-daemon cannot do."""

    @functools.wraps(test)
    def run_or_skip(lab):
        if lab.kind is not Server:
            raise Skipped("not with this server")
        return test(lab)

    return run_or_skip


class Lab:
    def __init__(self, name, kind="freestone"):
        self.kind = {"freestone": Server, "qsd": QemuStorageDaemon}[kind]
        self.directory = os.path.join(paths.LAB, "out", name)
        self.image = os.path.join(self.directory, "disk.img")
        self.server = self.guest = None
        self._ends = contextlib.ExitStack()
        # What else a test has started: its logs() are printed when the test fails.
        self.parts = []

    def callback(self, end, *arguments, **options):
        """Call end() when the test is over."""
        self._ends.callback(end, *arguments, **options)

    def scratch(self):
        """A new directory whose path is short enough for sockets."""
        directory = tempfile.mkdtemp(prefix="lab-")
        self.callback(shutil.rmtree, directory, ignore_errors=True)
        return directory

    def boot(self, queues=1, cpus=1, packed=False, size_mib=IMAGE_MIB, image=None, device_options="",
             export_options="", disk_options=""):
        """Serve an image (a new, empty one unless given) and boot a guest whose /dev/vda it is. Returns the guest."""
        if image is None:
            self.make_image(size_mib)
        log = os.path.join(self.directory, "server.log")
        server = self.kind(image or self.image, queues, log, device_options, export_options)
        return self.boot_on(server, cpus, packed, disk_options)

    def make_image(self, size_mib=IMAGE_MIB):
        """Make `image`, empty, which goes with the test."""
        workload.make_image(self.image, size_mib * workload.MIB)
        self._ends.callback(os.unlink, self.image)

    def serve(self, server):
        """Start the server under test, which ends with the test."""
        self.server = server
        self._ends.enter_context(server)

    def boot_on(self, server, cpus=1, packed=False, disk_options=""):
        """Start the server and boot a guest whose /dev/vda it serves. Returns the guest."""
        self.serve(server)
        disk = Disk(server.socket, server.queues, packed, options=disk_options)
        guest = self.start(Guest([disk], cpus, directory=self.directory))
        guest.attach_disks()
        return guest

    def start(self, guest):
        """Boot a guest, which ends with the test. Returns it."""
        self.guest = guest
        self._ends.enter_context(guest)
        return guest

    def kernel_modules(self, kernel):
        """The directory with the modules of kernel/ for a kernel of the lab. Skips the test where they do not know its
        series."""
        modules = paths.kernel_modules(kernel)
        if not modules:
            raise Skipped("kernel/ does not know the series of this kernel")
        return modules

    def boot_alone(self, cpus=1, **options):
        """Boot a guest that has no disk of ours: Freestone runs in it. options: Guest's. Returns the guest."""
        return self.start(Guest(cpus=cpus, directory=self.directory, **options))

    def boot_with_vhost_blk(self, kernel, **options):
        """Boot a guest with the module vhost_blk, checks of memory, and null_blk without disks. options: Guest's. Returns
        the guest."""
        modules = self.kernel_modules(kernel)
        guest = self.boot_alone(cpus=2, kernel=kernel, kernel_arguments=CHECKED_MEMORY, **options)
        guest.modprobe("vhost")
        workload.prepare_null_disks(guest)
        guest.sh(f"insmod {modules}/vhost_blk.ko")
        return guest

    def boot_with(self, *devices, cpus=1, **options):
        """Boot a guest with devices of devices.py, attached, and no server. options: Guest's. Returns the guest; it has
        `devices`."""
        self.start(Guest(cpus=cpus, directory=self.directory, devices=devices, **options))
        for device in devices:
            for image in dict.fromkeys(getattr(device, "images", [])):  # once, however often the guest booted
                self._ends.callback(os.unlink, image)
        for device in devices:
            device.attach(self.guest)
        return self.guest

    def check_end(self):
        """What every test ends with: no complaint in the guest's kernel; a server, if any, is alive and ends cleanly."""
        if self.guest is not None:
            self.end_guest()
        if self.server is not None:  # a test of something else has looked after its own
            self.stop_server()

    def stop_server(self):
        """The server under test is alive, ends cleanly, and had no complaint."""
        server, self.server = self.server, None
        self.parts.append(server)
        server.stop()
        log = paths.tail(server.log, 10000)
        assert "panicked" not in log, "the server panicked"
        assert workload.REFUSED not in log, "a server needs a system call that its sandbox does not know"

    def end_guest(self):
        """The guest's kernel has no complaint; the guest ends."""
        errors = workload.kernel_errors(self.guest)
        if errors and self.guest.has_stalled() and all("Call Trace" in line for line in errors.splitlines()):
            raise EmulatorError(f"the guest's kernel was stalled:\n{errors}")
        assert not errors, f"the guest's kernel complains:\n{errors}"
        refused = self.guest.sh(f"grep -hs '{workload.REFUSED}' /run/*.out || true")
        assert not refused, f"a server in the guest: {refused}"
        self.guest.close()
        self.parts.append(self.guest)
        self.guest = None

    def close(self):
        self._ends.close()

    def logs(self):
        parts = [part.logs() for part in (self.server, self.guest, *self.parts) if part is not None]
        return "".join(parts)


def sysfs(guest, name):
    """A file of the guest's /sys/block/vda."""
    return guest.sh(f"cat /sys/block/vda/{name}").strip()


def features(guest):
    """The bits that the guest's driver and the device agreed on."""
    return {bit for bit, set_ in enumerate(sysfs(guest, "device/features")) if set_ == "1"}
