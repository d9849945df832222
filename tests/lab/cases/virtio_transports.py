"""Freestone in the guest, on virtio-blk devices that others made: on the vDPA bus, and PCI functions behind an IOMMU."""

import os
import re

import paths
from lab import needs_freestone
from runner import nightly
from workload import MIB, make_image

DISK_MIB = 64
VDPA = "/dev/vhost-vdpa-0"
PCI_SLOT = "0000:00:10.0"
PCI = f"/sys/bus/pci/devices/{PCI_SLOT}"


@needs_freestone
def a_vdpa_device_passes_the_suite_of_every_device(lab):
    guest = _boot_with_vdpa(lab)
    _check(guest, f"vhost-vdpa {VDPA}")


@needs_freestone
def a_vdpa_device_keeps_what_was_written(lab):
    guest = _boot_with_vdpa(lab)
    _bench(guest, f"virtio-blk-vhost-vdpa:path={VDPA}")
    _bench(guest, f"virtio-blk-vhost-vdpa:path={VDPA},queue-size=16")
    info = guest.sh(f"{paths.FREESTONE} info --device virtio-blk-vhost-vdpa:path={VDPA}")
    assert str(DISK_MIB * MIB) in info, info


@needs_freestone
def a_vduse_server_that_dies_ends_every_request(lab):
    guest = _boot_with_vdpa(lab)
    # How long the kernel waits for an answer; 30 s by default.
    guest.sh("echo 2 >/sys/class/vduse/disk/msg_timeout")
    reader = guest.start("reader", f"{paths.DRIVER_CHECK} virtio-blk vhost-vdpa {VDPA} gone timeout-ms=2000")
    _wait_for(guest, "grep -q reading /run/reader.out")
    guest.sh("kill -9 $(cat /run/qsd.pid)")
    output = reader.wait(timeout_s=60)
    assert output.rstrip().endswith("gone"), output


@needs_freestone
def paths_without_a_vdpa_block_device_are_refused(lab):
    guest = lab.boot_alone()
    for path, message in (("/dev/null", "cannot connect"), ("/dev/vhost-vdpa-7", "No such file")):
        code, output = guest.sh(f"{paths.FREESTONE} info --device virtio-blk-vhost-vdpa:path={path}", check=False)
        assert code == 1 and message in output and path in output, (code, output)


@needs_freestone
def a_pci_function_passes_the_suite_of_every_device(lab):
    guest = _boot_with_pci(lab)
    _bind_to_vfio(guest)
    _check(guest, f"vfio-pci {PCI}")
    _check(guest, f"vfio-pci {PCI} queue-size=16")


@needs_freestone
@nightly
def a_pci_function_with_packed_rings_passes_the_suite_of_every_device(lab):
    guest = _boot_with_pci(lab, "packed=on")
    _bind_to_vfio(guest)
    _check(guest, f"vfio-pci {PCI} packed=on")


@needs_freestone
@nightly
def a_pci_function_keeps_what_was_written(lab):
    guest = _boot_with_pci(lab)
    _bind_to_vfio(guest)
    _bench(guest, f"virtio-blk-vfio-pci:path={PCI}")
    info = guest.sh(f"{paths.FREESTONE} info --device virtio-blk-vfio-pci:path={PCI}")
    assert str(DISK_MIB * MIB) in info, info
    # The stock driver takes it over, and reads what was written.
    guest.sh(f"echo {PCI_SLOT} >{PCI}/driver/unbind; echo >{PCI}/driver_override; modprobe virtio_blk;"
             f" echo {PCI_SLOT} >/sys/bus/pci/drivers_probe")
    _wait_for(guest, "[ -b /dev/vda ]")
    code, _ = guest.sh("cmp -n 1048576 /dev/vda /dev/zero", check=False)
    assert code == 1, "the disk is empty"


@needs_freestone
def a_pci_function_that_is_wanted_back_ends_every_request(lab):
    guest = _boot_with_pci(lab)
    _bind_to_vfio(guest)
    reader = guest.start("reader", f"{paths.DRIVER_CHECK} virtio-blk vfio-pci {PCI} gone")
    _wait_for(guest, "grep -q reading /run/reader.out")
    unbind = guest.start("unbind", f"echo {PCI_SLOT} >{PCI}/driver/unbind")
    output = reader.wait(timeout_s=60)
    assert output.rstrip().endswith("gone"), output
    unbind.wait(timeout_s=60)


@needs_freestone
def a_resized_pci_function_is_seen_at_its_new_size(lab):
    guest = _boot_with_pci(lab)
    _bind_to_vfio(guest)
    socket = "/run/resize.sock"
    serve = guest.start("serve", f"exec {paths.FREESTONE} serve --device virtio-blk-vfio-pci:path={PCI},id=disk"
                                 f" --export vhost-user-blk:socket={socket}")
    _wait_for(guest, f"[ -S {socket} ]")
    guest.qmp("block_resize", **{"node-name": "pcidisk", "size": 2 * DISK_MIB * MIB})
    _wait_for(guest, f"{paths.FREESTONE} info --device virtio-blk-vhost-user:path={socket}"
                     f" | grep -q {2 * DISK_MIB * MIB}")
    guest.sh("kill $(pgrep -f 'freestone serve')")
    serve.wait(timeout_s=60)


@needs_freestone
def a_pci_function_that_cannot_be_used_is_refused_with_the_reason(lab):
    guest = _boot_with_pci(lab, "iommu_platform=off")
    info = f"{paths.FREESTONE} info --device virtio-blk-vfio-pci:path={PCI}"
    code, output = guest.sh(info, check=False)
    assert code == 1 and "not to vfio-pci" in output, (code, output)
    _bind_to_vfio(guest)
    code, output = guest.sh(info, check=False)
    assert code == 1 and "ACCESS_PLATFORM" in output, (code, output)
    code, output = guest.sh(info.replace(PCI_SLOT, "0000:00:1e.7"), check=False)
    assert code == 1 and "no PCI function" in output, (code, output)


def _boot_with_vdpa(lab):
    """A guest in which qemu-storage-daemon serves a disk over VDUSE, and vhost-vdpa has it."""
    guest = lab.boot_alone(cpus=2)
    guest.modprobe("vduse", "vhost_vdpa")
    guest.sh(f"truncate -s {DISK_MIB}M /dev/shm/disk")
    guest.start("qsd", f"""TMPDIR=/dev/shm exec {paths.QEMU_STORAGE_DAEMON} --pidfile /run/qsd.pid \
        --blockdev driver=file,node-name=file,filename=/dev/shm/disk,discard=unmap \
        --blockdev driver=raw,node-name=disk,file=file \
        --export type=vduse-blk,id=export,node-name=disk,name=disk,num-queues=2,queue-size=256,writable=on""")
    _wait_for(guest, "[ -s /run/qsd.pid ]")
    guest.sh("vdpa dev add name disk mgmtdev vduse")
    bus = "/sys/bus/vdpa"
    guest.sh(f"""[ ! -e {bus}/devices/disk/driver ] || echo disk >{bus}/devices/disk/driver/unbind
        echo vhost_vdpa >{bus}/devices/disk/driver_override; echo disk >{bus}/drivers/vhost_vdpa/bind || true""")
    _wait_for(guest, f"[ -c {VDPA} ]")
    return guest


def _boot_with_pci(lab, options=""):
    """A guest with a virtio-blk PCI function behind an IOMMU."""
    image = make_image(os.path.join(lab.directory, "disk.img"), DISK_MIB * MIB)
    platform = "" if "iommu_platform" in options else ",iommu_platform=on"
    device = f"virtio-blk-pci,drive=pcidisk,addr=0x10,disable-legacy=on,num-queues=2,discard=on{platform}"
    return lab.boot_alone(
        cpus=2, kernel_arguments="intel_iommu=on",
        qemu_arguments=["-device", "intel-iommu,intremap=off",
                        "-blockdev", f"driver=file,node-name=pcidisk,filename={image},discard=unmap",
                        "-device", ",".join(filter(None, [device, options]))])


def _bind_to_vfio(guest):
    guest.sh("modprobe vfio_iommu_type1 allow_unsafe_interrupts=1; modprobe vfio-pci")
    guest.sh(f"""echo vfio-pci >{PCI}/driver_override
        [ ! -e {PCI}/driver ] || echo {PCI_SLOT} >{PCI}/driver/unbind
        echo {PCI_SLOT} >/sys/bus/pci/drivers_probe""")
    _wait_for(guest, f"[ -c /dev/vfio/$(basename $(readlink {PCI}/iommu_group)) ]")


def _check(guest, arguments):
    output = guest.sh(f"{paths.DRIVER_CHECK} virtio-blk {arguments}", timeout_s=600)
    assert "ok: conformance" in output, output
    assert re.search(r"max_queues: 2\b", output), output


def _bench(guest, device):
    """Random writes and reads, verified, through the engine that sleeps; two queues."""
    output = guest.sh(f"{paths.FREESTONE} bench --device {device} --rw randall --verify --event --queues 2 --qd 8"
                      " --size 32M --time 5 --force --json", timeout_s=300)
    assert '"mismatches":0' in output.replace(" ", ""), output


def _wait_for(guest, condition):
    guest.sh(f"for i in $(seq 600); do {condition} && exit 0; sleep 0.1; done; exit 1")
