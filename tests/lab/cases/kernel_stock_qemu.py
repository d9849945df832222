"""A stock QEMU on an export with `data-plane=kernel`: the kernel's vhost_blk serves QEMU's rings.

QEMU and the server run in the lab's guest, where the module is loaded. guest/stock-qemu-check drives QEMU by qtest;
guest/nested-guest-check boots a stock guest in it."""

import os

import paths
from lab import needs_freestone
from runner import nightly
from workload import KILLS

CHECK = os.path.join(paths.HERE, "guest", "stock-qemu-check")
NESTED_CHECK = os.path.join(paths.HERE, "guest", "nested-guest-check")
LONGEST_S = 900 + 10 * KILLS
NESTED_LONGEST_S = 3500
NESTED_MEMORY_MIB = 1536


@needs_freestone
def a_stock_qemu_is_served_by_the_first_kernel(lab):
    return _serves_a_stock_qemu(lab, paths.KERNEL)


@nightly
@needs_freestone
def a_stock_qemu_is_served_by_the_newest_kernel(lab):
    return _serves_a_stock_qemu(lab, paths.NEW_KERNEL)


def _serves_a_stock_qemu(lab, kernel):
    guest = lab.boot_with_vhost_blk(kernel)
    cases = os.environ.get("LAB_STOCK_QEMU_CASES", "")
    said = guest.sh(f"LAB_DIR={paths.LAB} LAB_KILLS={KILLS} {CHECK} {paths.FREESTONE} {paths.FREESTONED} {cases}", LONGEST_S)
    guest.sh("rmmod vhost_blk")
    return said.strip()


@nightly
@needs_freestone
def a_stock_guest_of_a_stock_qemu_verifies_its_data_across_kills(lab):
    guest = lab.boot_with_vhost_blk(paths.KERNEL, memory_mib=NESTED_MEMORY_MIB)
    said = guest.sh(f"LAB_DIR={paths.LAB} {NESTED_CHECK} {paths.FREESTONE} {paths.FREESTONED}", NESTED_LONGEST_S)
    guest.sh("rmmod vhost_blk")
    return said.strip()
