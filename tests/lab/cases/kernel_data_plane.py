"""`--export vhost-user-blk:…,data-plane=kernel`: the kernel's vhost_blk serves the rings of vhost-user clients.

guest/data-plane-check has the cases: it is the front end. Both kernels of the lab run them."""

import os

import paths
from lab import needs_freestone
from runner import nightly
from workload import KILLS

CHECK = os.path.join(paths.HERE, "guest", "data-plane-check")
LONGEST_S = 900


@needs_freestone
def vhost_user_clients_are_served_by_the_first_kernel(lab):
    return _serves_vhost_user_clients(lab, paths.KERNEL)


@nightly
@needs_freestone
def vhost_user_clients_are_served_by_the_newest_kernel(lab):
    return _serves_vhost_user_clients(lab, paths.NEW_KERNEL)


def _serves_vhost_user_clients(lab, kernel):
    guest = lab.boot_with_vhost_blk(kernel)
    cases = os.environ.get("LAB_DATA_PLANE_CASES", "")
    said = guest.sh(f"LAB_KILLS={KILLS} {CHECK} {paths.FREESTONE} {paths.FREESTONED} {cases}", LONGEST_S)
    guest.sh("rmmod vhost_blk")
    _is_refused_without_the_module(guest)
    return said.strip()


def _is_refused_without_the_module(guest):
    serve = (f"{paths.FREESTONE} serve --device io_uring:path=/dev/none,direct=on --export "
             "vhost-user-blk:socket=/run/none.sock,data-plane=kernel")
    guest.sh("mkdir /sys/kernel/config/nullb/none; echo 1 >/sys/kernel/config/nullb/none/power; until [ -b /dev/none ]; do sleep 0.1; done")
    code, said = guest.sh(f"timeout 60 {serve} 2>&1", check=False)
    assert code != 0 and "cannot open /dev/vhost-blk (the module vhost_blk is not loaded)" in said, said
    guest.sh("rmdir /sys/kernel/config/nullb/none")
