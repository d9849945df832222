"""QEMU's tools of Debian trixie, unchanged, on our libblkio.so.1 and devices that only a guest has; and guests on a
disk that QEMU serves through our library."""

import os
import shlex

import blkio
import paths
from blkio import BlkioOverVhostUser, BlkioStorageDaemon
from devices import Namespace, Nvme, Vdpa, VfioPci
from lab import needs_freestone
from runner import nightly
from workload import fio_verify

SOURCE = "/tmp/source.img"  # in the guest's memory; as large as the devices are


def qemu_copies_compares_and_checks_patterns_on_an_nvme_namespace(lab):
    guest = _boot(lab, Nvme([Namespace(), Namespace(block_bytes=4096)]))
    for path in guest.devices[0].paths:
        _check_disk(guest, f"driver=nvme-io_uring,path={path},cache.direct=on")


def qemu_copies_compares_and_checks_patterns_on_a_vdpa_device(lab):
    guest = _boot(lab, Vdpa())
    _check_disk(guest, f"driver=virtio-blk-vhost-vdpa,path={guest.devices[0].paths[0]},cache.direct=on")


def qemu_copies_compares_and_checks_patterns_on_a_pci_function(lab):
    guest = _boot(lab, VfioPci())
    _check_disk(guest, f"driver=virtio-blk-vfio-pci,path={guest.devices[0].paths[0]},cache.direct=on")


def a_guest_works_on_a_disk_that_qemu_serves_through_io_uring(lab):
    _work_on_disk_of(lab, BlkioStorageDaemon)


def a_guest_works_on_a_disk_that_qemu_serves_through_vhost_user(lab):
    _work_on_disk_of(lab, BlkioOverVhostUser)


@nightly
@needs_freestone
def libvirt_attaches_disks_of_the_guests_kernel(lab):
    """tests/clients/cases/libvirt.py where ublk is."""
    blkio.require_trixie()
    guest = lab.boot_alone(cpus=2, memory_mib=2048)
    guest.modprobe("ublk_drv")
    variables = {"FREESTONE": paths.FREESTONE, "LIBBLKIO": blkio.LIBRARY, "LAB_DIR": paths.LAB}
    words = shlex.join(f"{name}={os.path.abspath(value)}" for name, value in variables.items())
    said = guest.sh(f"cd {shlex.quote(paths.REPO)}; env {words} tests/clients/run libvirt", timeout_s=600)
    assert "ublk-read-only" in said, said


def _work_on_disk_of(lab, server):
    lab.kind = server
    guest = lab.boot(queues=2, cpus=2)
    lab.server.check_library()
    guest.sh(fio_verify("/dev/vda", "32m", "--rw=randrw --bsrange=4k-256k --fsync=32"))
    guest.sh("mkfs.ext4 -q -E lazy_itable_init=0 /dev/vda && e2fsck -fn /dev/vda")


def _boot(lab, device):
    blkio.require_trixie()
    guest = lab.boot_with(device)
    blkio.install(guest)
    # QEMU does not ask how many zeroes a device can write at a time, and VDUSE's server stops at 16 MiB.
    guest.sh(f"truncate -s 64M {SOURCE}; for i in 0 10 25 40 52 63; do"
             f" dd if=/dev/urandom of={SOURCE} bs=64k count=16 seek=$((16 * i)) conv=notrunc status=none; done")
    return guest


def _check_disk(guest, disk):
    source = f"driver=file,filename={SOURCE}"
    blkio.run_trixie(guest, "qemu-img", "convert", "-n", "-m", "16", "-W", "--target-image-opts", "-f", "raw", SOURCE, disk)
    assert "identical" in blkio.run_trixie(guest, "qemu-img", "compare", "--image-opts", source, disk)
    commands = ["write -P 0xa1 2M 1M", "write -f -P 0xb2 3M 64k", "writev -P 0xc3 4M 4k 64k 128k", "write -z 2560k 256k",
                "discard 5M 1M", "flush", "read -P 0xa1 2M 512k", "read -P 0 2560k 256k", "read -P 0xa1 2816k 256k",
                "read -P 0xb2 3M 64k", "readv -P 0xc3 4M 128k 64k 4k"]
    output = blkio.run_trixie(guest, "qemu-io", "--image-opts", disk, *(word for line in commands for word in ("-c", line)))
    assert "failed" not in output.lower(), output
