"""The module virtio_blk_uring (kernel/) makes nodes /dev/vdXc0 for io_uring commands, in a guest on QEMU's own disks.

guest/virtio-blk-uring-check has the cases. Both kernels of the lab run them, with checks of memory that are off by
default."""

import dataclasses
import json
import os
import re

import paths
from lab import CHECKED_MEMORY, needs_freestone
from runner import nightly
from workload import MIB, make_image

CHECK = os.path.join(paths.HERE, "guest", "virtio-blk-uring-check")
DISK_MIB = 32
LONGEST_S = 600


@dataclasses.dataclass
class Disk:
    """A virtio-blk disk of QEMU on an image. node: the options of the block nodes over it; options: of the device."""

    serial: str
    node: str = ""
    options: str = ""

    def arguments(self, directory):
        image = make_image(os.path.join(directory, f"{self.serial}.img"), DISK_MIB * MIB)
        name = self.serial
        read_only = ",read-only=on" if self.serial == "read-only" else ""
        command = ["-blockdev", f"driver=file,filename={image},node-name={name}-file,discard=unmap,aio=threads{read_only}"]
        if self.node:
            command += ["-blockdev", f"{self.node.format(file=f'{name}-file')},node-name={name}"]
        drive = name if self.node else f"{name}-file"
        return command + ["-device", f"virtio-blk-pci,drive={drive},serial={name},num-queues=3{self.options}"]


# Errors for the sector 2048, and for each flush.
FAULTY = ("driver=blkdebug,image={file},discard=unmap"
          ",inject-error.0.event=none,inject-error.0.iotype=read,inject-error.0.sector=2048,inject-error.0.errno=5"
          ",inject-error.1.event=none,inject-error.1.iotype=write,inject-error.1.sector=2048,inject-error.1.errno=5"
          ",inject-error.2.event=none,inject-error.2.iotype=flush,inject-error.2.errno=5"
          ",inject-error.3.event=none,inject-error.3.iotype=discard,inject-error.3.sector=2048,inject-error.3.errno=5"
          ",inject-error.4.event=none,inject-error.4.iotype=write-zeroes,inject-error.4.sector=2048,inject-error.4.errno=5")
DISKS = [
    Disk("main"),
    Disk("faulty", FAULTY),
    Disk("read-only"),
    Disk("large-blocks", options=",logical_block_size=4096,physical_block_size=4096"),
    # One queue, which leaves none to poll.
    Disk("plain", options=",write-cache=off,config-wce=off,discard=off,write-zeroes=off,num-queues=1"),
    Disk("slow", "driver=throttle,throttle-group=slow,file={file},discard=unmap"),
    Disk("limited", options=",max-discard-sectors=64,max-write-zeroes-sectors=64"),
]
SLOW = ["-object", "throttle-group,id=slow,x-iops-total=20"]
# The device's side of each request, in a log: a read's or write's first sector, and the status of all.
SEEN = ("virtio_blk_handle_read", "virtio_blk_handle_write", "virtio_blk_req_complete")
WITH_SEEN = ("only_checked_commands_reach_the_device", "a_device_without_cache_or_discard_is_not_asked")


@needs_freestone
@nightly
def virtio_blk_uring_serves_commands_on_the_first_kernel(lab):
    return _serves_commands(lab, paths.KERNEL)


@needs_freestone
def virtio_blk_uring_serves_commands_on_the_newest_kernel(lab):
    return _serves_commands(lab, paths.NEW_KERNEL)


def _serves_commands(lab, kernel):
    modules = lab.kernel_modules(kernel)
    log = os.path.join(lab.directory, "device.log")
    arguments = SLOW + _traced(log) + [argument for disk in DISKS for argument in disk.arguments(lab.directory)]
    for disk in DISKS:
        lab.callback(os.unlink, os.path.join(lab.directory, f"{disk.serial}.img"))
    guest = lab.boot_alone(cpus=2, kernel=kernel, kernel_arguments=CHECKED_MEMORY, qemu_arguments=arguments)
    guest.sh(f"modprobe virtio_blk poll_queues=1; insmod {modules}/virtio_blk_uring.ko disks='*'")
    said = guest.sh(f"{CHECK} --except {' '.join(WITH_SEEN)}", LONGEST_S)
    said += _only_checked_commands_reach_the_device(guest, log)
    guest.sh("rmmod virtio_blk_uring; [ ! -e /dev/vdac0 ]")
    return said.strip()


def _traced(log):
    arguments = ["-D", log]
    for event in SEEN:
        arguments += ["-trace", event]
    return arguments


def _only_checked_commands_reach_the_device(guest, log):
    """The device has seen no request that was not sent, and none of a type that it does not know."""
    said = ""
    for case in WITH_SEEN:
        start = os.path.getsize(log)
        said += guest.sh(f"{CHECK} {case}", LONGEST_S)
        with open(log) as file:
            file.seek(start)
            seen = file.read()
        statuses = re.findall(r"virtio_blk_req_complete .*status (\d+)", seen)
        if case == WITH_SEEN[1]:
            assert len(statuses) < 50, f"the device was asked:\n{seen}"
            continue
        assert len(statuses) > 50 and set(statuses) == {"0"}, f"the device has refused requests:\n{seen[-3000:]}"
        sent = json.loads(guest.sh("cat /run/sent"))
        for way, type_ in (("read", "0"), ("write", "1")):
            sectors = {int(sector) for sector in re.findall(rf"virtio_blk_handle_{way} .*sector (\d+)", seen)}
            assert sectors and sectors <= set(sent[type_]), (way, sectors - set(sent[type_]))
    return said
