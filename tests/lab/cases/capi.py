"""The test suite of the C API (tests/capi) on devices that only a guest has: NVMe namespaces, a PCI function, vDPA."""

import blkio
from devices import Namespace, Nvme, Vdpa, VfioPci
from runner import nightly


def the_c_suite_passes_on_an_nvme_namespace(lab):
    guest = lab.boot_with(Nvme([Namespace()]), cpus=2)
    blkio.run_suite(lab, guest, "nvme-io_uring", guest.devices[0].paths[0])


@nightly
def the_c_suite_passes_on_an_nvme_namespace_of_4096_byte_blocks(lab):
    guest = lab.boot_with(Nvme([Namespace(block_bytes=4096)]), cpus=2)
    blkio.run_suite(lab, guest, "nvme-io_uring", guest.devices[0].paths[0])


@nightly
def the_c_suite_passes_on_a_zoned_nvme_namespace(lab):
    guest = lab.boot_with(Nvme([Namespace(zoned=True)]), cpus=2)
    blkio.run_suite(lab, guest, "nvme-io_uring", guest.devices[0].paths[0])


@nightly
def the_c_suite_passes_on_a_vdpa_device(lab):
    guest = lab.boot_with(Vdpa(queues=4), cpus=2)
    blkio.run_suite(lab, guest, "virtio-blk-vhost-vdpa", guest.devices[0].paths[0])


@nightly
def the_c_suite_passes_on_a_vdpa_device_that_is_polled(lab):
    guest = lab.boot_with(Vdpa(queues=4), cpus=2)
    blkio.run_suite(lab, guest, "virtio-blk-vhost-vdpa", guest.devices[0].paths[0], "--poll")


def the_c_suite_passes_on_a_pci_function(lab):
    guest = lab.boot_with(VfioPci(queues=4), cpus=2)
    blkio.run_suite(lab, guest, "virtio-blk-vfio-pci", guest.devices[0].paths[0])


@nightly
def the_c_suite_passes_on_a_pci_function_that_is_polled(lab):
    guest = lab.boot_with(VfioPci(queues=4), cpus=2)
    blkio.run_suite(lab, guest, "virtio-blk-vfio-pci", guest.devices[0].paths[0], "--poll")
