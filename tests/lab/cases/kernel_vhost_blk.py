"""The module vhost_blk (kernel/) serves rings that a program makes by hand: no virtual machine takes part.

guest/vhost-blk-check has the cases, guest/vhost-blk-fuzz the random input. Both kernels of the lab run them, with checks of memory that are off by default."""

import os
import re

import paths
import workload
from lab import needs_freestone
from runner import nightly

CHECK = os.path.join(paths.HERE, "guest", "vhost-blk-check")
WITH_ERRORS = "an_error_of_one_bio_is_the_requests_error the_first_error_of_a_request_is_its_error a_failed_write_is_marked"
FUZZ = os.path.join(paths.HERE, "guest", "vhost-blk-fuzz")
LONGEST_S = 600
# How long random input is tried in `make test`, and in `make nightly`.
FUZZ_S, LONG_FUZZ_S = 5, 300


@needs_freestone
def vhost_blk_serves_hand_made_rings_on_the_first_kernel(lab):
    return _serves_hand_made_rings(lab, paths.KERNEL)


@needs_freestone
@nightly
def vhost_blk_serves_hand_made_rings_on_the_newest_kernel(lab):
    return _serves_hand_made_rings(lab, paths.NEW_KERNEL)


@nightly
@needs_freestone
def vhost_blk_survives_random_input_on_the_first_kernel(lab):
    return _survives_random_input(lab, paths.KERNEL, FUZZ_S)


@needs_freestone
def vhost_blk_survives_random_input_on_the_newest_kernel(lab):
    return _survives_random_input(lab, paths.NEW_KERNEL, FUZZ_S)


@nightly
@needs_freestone
def vhost_blk_survives_minutes_of_random_input_on_the_first_kernel(lab):
    return _survives_random_input(lab, paths.KERNEL, LONG_FUZZ_S)


@nightly
@needs_freestone
def vhost_blk_survives_minutes_of_random_input_on_the_newest_kernel(lab):
    return _survives_random_input(lab, paths.NEW_KERNEL, LONG_FUZZ_S)


def _survives_random_input(lab, kernel, seconds):
    guest = lab.boot_with_vhost_blk(kernel)
    said = guest.sh(f"{FUZZ} {seconds}", 2 * seconds + LONGEST_S)
    guest.sh("rmmod vhost_blk; [ ! -e /dev/vhost-blk ]")
    return said.strip()


def _serves_hand_made_rings(lab, kernel):
    guest = lab.boot_with_vhost_blk(kernel)
    # The only cases with errors of a disk, which the kernel reports.
    errors = guest.sh(f"{CHECK} {WITH_ERRORS}")
    complaints = workload.kernel_errors(guest).splitlines()
    # Disks of null_blk, and one of scsi_debug with blocks that cannot be read.
    expected = re.compile(r"I/O error, dev (checked|dm-)\d+,|critical medium error, dev sd[a-z]+,|scsi_debug: ?(trim|version)|scsi_debug:sdebug_driver_probe: ")
    assert all(expected.search(line) for line in complaints), complaints
    guest.sh("dmesg --clear")
    said = errors + guest.sh(f"LAB_KILLS={workload.KILLS} {CHECK} --except {WITH_ERRORS}", LONGEST_S)
    guest.sh("rmmod vhost_blk; [ ! -e /dev/vhost-blk ]")
    return said.strip()
