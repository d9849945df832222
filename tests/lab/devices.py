"""Devices of a guest that are no vhost-user disks: what QEMU must be told, and what is done in the guest so that a
user-space driver can open them.

    guest = lab.boot_with(Nvme([Namespace(), Namespace(zoned=True)], poll_queues=1))
    plain, zoned = guest.devices[0].paths      # /dev/ng0n1, /dev/ng0n2

Each class has `arguments(directory)` for QEMU, `kernel_arguments`, `attach(guest)`, which does the work in the guest,
and `paths`, what a driver opens afterwards. Images are new and empty, and lie in the test's directory or, for vDPA, in
the guest's memory."""

import dataclasses
import os
import time

import paths
from workload import MIB, make_image

APPEARS_WITHIN_S = 60


class NoDevice(Exception):
    """A node that the guest should have did not appear."""


@dataclasses.dataclass
class Namespace:
    """A namespace of an NVMe controller; zoned: of the Zoned Namespace command set (NVMe ZNS 1.1)."""

    size_mib: int = 64
    block_bytes: int = 512
    zoned: bool = False
    zone_mib: int = 4
    zone_capacity_mib: int = 4
    max_open_zones: int = 4
    max_active_zones: int = 6
    options: str = ""  # more properties of QEMU's nvme-ns: "zoned.descr_ext_size=64,ms=8"

    def properties(self):
        text = f"logical_block_size={self.block_bytes},physical_block_size={self.block_bytes}"
        if self.zoned:
            text += (f",zoned=on,zoned.zone_size={self.zone_mib * MIB},zoned.zone_capacity={self.zone_capacity_mib * MIB}"
                     f",zoned.max_open={self.max_open_zones},zoned.max_active={self.max_active_zones}")
        return text + (f",{self.options}" if self.options else "")


class Nvme:
    """One NVMe controller. `paths` are the namespaces' character devices for pass-through, /dev/ng0n1, /dev/ng0n2, ...;
    the kernel's block devices /dev/nvme0n1, ... are there as well."""

    kernel_arguments = ""

    def __init__(self, namespaces=None, poll_queues=0, options=""):
        """poll_queues: how many queues the kernel's driver sets aside for IORING_SETUP_IOPOLL.
        options: more properties of QEMU's nvme: "mdts=3,max_ioqpairs=4"."""
        self.namespaces = namespaces or [Namespace()]
        self.poll_queues, self.options = poll_queues, options
        self.images = []
        self.paths = [f"/dev/ng0n{i}" for i in range(1, len(self.namespaces) + 1)]

    def arguments(self, directory):
        command = ["-device", "nvme,id=nvme0,serial=lab-nvme" + (f",{self.options}" if self.options else "")]
        for i, namespace in enumerate(self.namespaces, start=1):
            image = make_image(os.path.join(directory, f"nvme{i}.img"), namespace.size_mib * MIB)
            self.images.append(image)
            command += [
                *_blockdev(f"nvme-image{i}", image),
                "-device", f"nvme-ns,bus=nvme0,nsid={i},drive=nvme-image{i},{namespace.properties()}",
            ]
        return command

    def attach(self, guest):
        guest.sh(f"modprobe nvme poll_queues={self.poll_queues}")
        for path in self.paths:
            _wait_for_node(guest, path, "-c")
        # The kernel looks at namespaces beside each other: the first that it finds is ng0n1, whatever its identifier.
        names = guest.sh("cd /sys/class/block; for n in nvme0n*; do echo $(cat $n/nsid) /dev/ng0n${n#nvme0n}; done")
        by_identifier = dict(line.split() for line in names.splitlines())
        self.paths = [by_identifier[str(i)] for i in range(1, len(self.namespaces) + 1)]


class VirtioBlkUring:
    """Disks of the guest's own virtio-blk driver, with the nodes that kernel/virtio_blk_uring makes. `paths` has the
    nodes, /dev/vdac0, /dev/vdbc0, ...; the block devices /dev/vda, /dev/vdb, ... are there as well."""

    kernel_arguments = ""

    def __init__(self, modules, disks=("",), size_mib=64, queues=1, poll_queues=0, read_only=()):
        """modules: the directory of virtio_blk_uring.ko; None: it is not loaded. disks: for each, more properties of
        QEMU's virtio-blk-pci: "logical_block_size=4096". poll_queues: how many of a disk's queues the driver sets aside
        for IORING_SETUP_IOPOLL. read_only: the numbers of the disks that refuse writes."""
        self.modules, self.disks, self.size_mib, self.read_only = modules, disks, size_mib, read_only
        self.queues, self.poll_queues = queues + poll_queues, poll_queues
        self.images = []
        self.blocks = [f"/dev/vd{chr(ord('a') + i)}" for i in range(len(disks))]
        self.paths = [f"{block}c0" for block in self.blocks]

    def arguments(self, directory):
        command = []
        for i, options in enumerate(self.disks):
            image = make_image(os.path.join(directory, f"uring{i}.img"), self.size_mib * MIB)
            self.images.append(image)
            command += [
                *_blockdev(f"uring{i}", image, i in self.read_only),
                "-device", f"virtio-blk-pci,drive=uring{i},serial=lab-uring{i},num-queues={self.queues}"
                + (f",{options}" if options else ""),
            ]
        return command

    def attach(self, guest):
        guest.sh(f"modprobe virtio_blk poll_queues={self.poll_queues}")
        for path in self.blocks:
            _wait_for_node(guest, path, "-b")
        if self.modules:
            guest.sh(f"insmod {self.modules}/virtio_blk_uring.ko disks='*'")
            for path in self.paths:
                _wait_for_node(guest, path, "-c")

    def resize(self, guest, number, size_mib):
        guest.qmp("block_resize", **{"node-name": f"uring{number}", "size": size_mib * MIB})


class VfioPci:
    """A virtio-blk PCI function behind an emulated IOMMU, bound to vfio-pci. `paths` has its directory in sysfs."""

    # A slot of its own, so that its address is known and it is alone in its IOMMU group.
    address = "0000:00:10.0"
    kernel_arguments = "intel_iommu=on"
    # Mappings change all the time behind the IOMMU: where each processor has a thread, QEMU 10 fails its assertion
    # (vm.RACE) in one run of ten on a busy machine.
    is_emulated_by_one_thread = True

    def __init__(self, size_mib=64, queues=1, options=""):
        """options: more properties of QEMU's virtio-blk-pci: "packed=on,queue-size=64,logical_block_size=4096"."""
        self.size_mib, self.queues, self.options = size_mib, queues, options
        self.images = []
        self.paths = [f"/sys/bus/pci/devices/{self.address}"]

    def arguments(self, directory):
        image = make_image(os.path.join(directory, "vfio.img"), self.size_mib * MIB)
        self.images.append(image)
        return [
            # Before the devices that it translates for. Emulation has no interrupt remapping (VFIO is told so below).
            "-device", "intel-iommu,intremap=off",
            *_blockdev("vfio-image", image),
            "-device", f"virtio-blk-pci,drive=vfio-image,addr=0x10,disable-legacy=on,iommu_platform=on"
            f",num-queues={self.queues}" + (f",{self.options}" if self.options else ""),
        ]

    def attach(self, guest):
        path = self.paths[0]
        guest.sh(f"""
            modprobe vfio_iommu_type1 allow_unsafe_interrupts=1
            modprobe vfio-pci
            echo vfio-pci >{path}/driver_override
            [ ! -e {path}/driver ] || echo {self.address} >{path}/driver/unbind
            echo {self.address} >/sys/bus/pci/drivers_probe
            [ "$(basename "$(readlink {path}/driver)")" = vfio-pci ]""")
        group = guest.sh(f"basename $(readlink {path}/iommu_group)").strip()
        _wait_for_node(guest, f"/dev/vfio/{group}", "-c")


class Vdpa:
    """A virtio-blk vDPA device that a server in the guest provides through VDUSE, bound to vhost_vdpa. `paths` has
    /dev/vhost-vdpa-0; the image is `image`, in the guest's memory.

    The server is qemu-storage-daemon: `stop` and `start` end and begin it, for tests of a peer that goes away."""

    kernel_arguments = ""
    image = "/dev/shm/vdpa.img"

    def __init__(self, size_mib=64, queues=1, queue_size=256, writable=True):
        self.size_mib, self.queues, self.queue_size, self.writable = size_mib, queues, queue_size, writable
        self.paths = ["/dev/vhost-vdpa-0"]

    def arguments(self, directory):
        return []

    def attach(self, guest):
        guest.sh(f"modprobe -a vduse vhost_vdpa; truncate -s {self.size_mib}M {self.image}")
        self.start(guest)
        guest.sh("""
            vdpa dev add name blk0 mgmtdev vduse
            device=/sys/bus/vdpa/devices/blk0
            if [ -e $device/driver ]; then
                [ "$(basename "$(readlink $device/driver)")" != vhost_vdpa ] || exit 0
                echo blk0 >$device/driver/unbind
            fi
            echo vhost_vdpa >$device/driver_override
            [ -e $device/driver ] || echo blk0 >/sys/bus/vdpa/drivers/vhost_vdpa/bind""")
        _wait_for_node(guest, self.paths[0], "-c")

    def start(self, guest):
        writable = "on" if self.writable else "off"
        guest.sh(f"""
            export TMPDIR=/dev/shm  # for the server's log of inflight requests
            {paths.QEMU_STORAGE_DAEMON} \
                --blockdev driver=file,node-name=file,filename={self.image},discard=unmap \
                --blockdev driver=raw,node-name=disk,file=file,discard=unmap \
                --export type=vduse-blk,id=export,name=blk0,node-name=disk,writable={writable},num-queues={self.queues},queue-size={self.queue_size} \
                </dev/null >/run/vduse.log 2>&1 &
            echo $! >/run/vduse.pid""")
        # The management device is there as soon as the module is; the server's own node tells that it is ready.
        _wait_for_node(guest, "/dev/vduse/blk0", "-c", log="/run/vduse.log")

    def stop(self, guest):
        """Kill the server, by its own pid."""
        guest.sh("kill -9 $(cat /run/vduse.pid); while kill -0 $(cat /run/vduse.pid) 2>/dev/null; do sleep 0.05; done")


def _blockdev(name, image, is_read_only=False):
    options = "discard=unmap" + (",read-only=on" if is_read_only else "")
    return [
        "-blockdev", f"driver=file,node-name={name}-file,filename={image},{options}",
        "-blockdev", f"driver=raw,node-name={name},file={name}-file,{options}",
    ]


def _wait_for_node(guest, path, test, log=None):
    """There is no udev in the guest, and a driver's probe goes on after modprobe has returned."""
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while guest.sh(f"[ {test} {path} ]", check=False)[0] != 0:
        if time.monotonic() > deadline:
            _, said = guest.sh(f"[ -z '{log or ''}' ] || cat '{log or ''}'; ls -l /dev; dmesg | tail -20", check=False)
            raise NoDevice(f"the guest has no {path} after {APPEARS_WITHIN_S} s\n{said}")
        time.sleep(0.1)
