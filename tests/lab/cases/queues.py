"""Virtqueues: one and several, split and packed."""

from lab import FEATURE_RING_PACKED, features, needs_freestone, sysfs
from runner import nightly
from workload import FIO_JSON, fio_result, fio_verify


def one_queue_serves_a_guest(lab):
    guest = lab.boot(queues=1)
    assert guest.sh("ls /sys/block/vda/mq").split() == ["0"]
    _write_and_verify(guest, jobs=1)


def four_queues_serve_a_guest_with_four_processors(lab):
    guest = lab.boot(queues=4, cpus=4)
    assert guest.sh("ls /sys/block/vda/mq").split() == ["0", "1", "2", "3"]
    _write_and_verify(guest, jobs=4)
    counts = _interrupts_by_queue(guest)
    assert len(counts) == 4 and all(counts), f"interrupts by queue: {counts}: some queue was never used"


def split_rings_are_used_unless_packed_ones_are_asked_for(lab):
    guest = lab.boot(packed=False)
    assert FEATURE_RING_PACKED not in features(guest)
    _write_and_verify(guest, jobs=1)


@needs_freestone
def packed_rings_are_negotiated_and_carry_data(lab):
    guest = lab.boot(packed=True)
    assert FEATURE_RING_PACKED in features(guest), f"bit 34 is not among {sorted(features(guest))}"
    _write_and_verify(guest, jobs=1)


@needs_freestone
@nightly
def four_packed_queues_serve_a_guest_with_four_processors(lab):
    guest = lab.boot(queues=4, cpus=4, packed=True)
    assert FEATURE_RING_PACKED in features(guest), f"bit 34 is not among {sorted(features(guest))}"
    _write_and_verify(guest, jobs=4)
    counts = _interrupts_by_queue(guest)
    assert len(counts) == 4 and all(counts), f"interrupts by queue: {counts}: some queue was never used"


def queues_of_1024_entries_carry_large_requests(lab):
    guest = lab.boot(disk_options="queue-size=1024", export_options=",queue-size=1024")
    assert int(sysfs(guest, "queue/nr_requests")) >= 256, sysfs(guest, "queue/nr_requests")
    guest.sh(fio_verify("/dev/vda", "32m", "--bsrange=512-1m --bs_unaligned=0 --blockalign=512"))


def _write_and_verify(guest, jobs):
    """Every job has its own part of the disk and its own processor, so its own queue."""
    spread = f"--numjobs={jobs} --offset_increment=16m --cpus_allowed=0-{jobs - 1} --cpus_allowed_policy=split"
    job = fio_result(guest.sh(fio_verify("/dev/vda", "8m", f"{spread} --group_reporting {FIO_JSON}")))
    assert job["error"] == 0 and job["write"]["io_bytes"] == jobs * (8 << 20), f"fio: {job['error']}, {job['write']}"


def _interrupts_by_queue(guest):
    """How often each request queue interrupted the guest, all processors together."""
    device = guest.sh("basename $(readlink /sys/block/vda/device)").strip()
    lines = guest.sh(f"grep {device}-req /proc/interrupts").splitlines()
    return [sum(int(word) for word in line.split()[1:] if word.isdigit()) for line in lines]
