"""Power cuts of the whole stack: a writer on a volume, limited, of a pool on an array of disks with volatile caches.

Everything runs in a guest, over the guest's own block layer: the writer uses /dev/ublkb0, and the members are drives whose
writes and flushes are logged on the host. The log is replayed up to points at which more became durable; LAB_CUTS says how
many, and half as many again while the pool's table is written (`make nightly`: all)."""

import os

import paths
from freestoned import GuestDaemon
from lab import needs_freestone
from logged_disks import LoggedDisks
from cut_replay import ARRAY, OTHER, SURVIVALS, VOLUME, Replay, points, replay, spread
from runner import nightly
from workload import MIB

MEMBER_MIB = 32
VOLUME_MIB, GROWN_MIB, OTHER_MIB = 6, 8, 4
WORKERS, WRITES = 3, 150
IOPS = 5000
CHANGES = 3  # of the pool
CUTS = os.environ.get("LAB_CUTS", "8")
LIE_EVERY, LIARS_CUTS = 29, 3


@needs_freestone
def raid_6_holds_what_it_acknowledged_wherever_power_is_cut(lab):
    """A member fails meanwhile, and another disk is rebuilt. After every fourth cut one more member is gone."""
    return _holds(lab, "6", 5, "ppl", seed=1, replaced=1)


@needs_freestone
@nightly
def raid_5_in_bitmap_mode_holds_what_it_acknowledged_wherever_power_is_cut(lab):
    return _holds(lab, "5", 4, "bitmap", seed=2)


def _holds(lab, level, members, consistency, seed, replaced=None):
    disks, state = _record(lab, level, members, consistency, seed, replaced)
    replayer = Replay(lab.scratch(), state, [_device(number) for number in range(disks.count)])
    log = disks.events, disks.count, disks.size
    found, at_table = points(*log)
    assert len(found) > WORKERS * WRITES // 2, f"only {len(found)} points at which more became durable"
    assert len(at_table) >= CHANGES, f"only {len(at_table)} points at which the pool's table is written"
    at = found if CUTS == "all" else sorted({*spread(found, int(CUTS)), *spread(at_table, int(CUTS) // 2)})
    kept = [number for number in range(members) if number != replaced]

    def cut(number):
        is_missing = replaced is not None and number % 4 == 3
        return SURVIVALS[(number + number // 4) % 4], kept[number // 4 % len(kept)] if is_missing else None

    wrong = replay(*log, replayer, at, cut)
    assert not wrong, f"{len(wrong)} of {len(at)} cuts, among them\n" + "\n".join(wrong[:3])
    # Disks that lose what they have made durable: the judge of the cuts must notice.
    noticed = replay(*log, replayer, found[-LIARS_CUTS:], lambda number: ("none", None), LIE_EVERY)
    assert len(noticed) == LIARS_CUTS, f"{LIARS_CUTS - len(noticed)} of {LIARS_CUTS} cuts of disks that lie went unnoticed"
    for sign in (f"sectors of volume {VOLUME} are wrong", "freestone array check", "raid-check"):
        assert sign in noticed[0], f"disks that lie: nothing of {sign!r} in\n{noticed[0]}"
    return f"{len(found)} points, {len(at_table)} of them at the pool's table, {len(at)} cuts; {LIARS_CUTS} cuts of disks that lie were noticed"


def _device(number):
    return f"/dev/vd{chr(ord('a') + number)}"


def _record(lab, level, members, consistency, seed, replaced):
    """Writes to a volume, while a member, if any, is replaced. Returns the logged disks and the daemon's state."""
    disks = LoggedDisks(lab.scratch(), members + (replaced is not None), MEMBER_MIB * MIB)
    lab.callback(disks.close)
    guest = lab.boot_alone(cpus=2, qemu_arguments=disks.qemu_arguments())
    guest.modprobe("virtio_blk", "ublk_drv")
    names = " ".join(_device(number) for number in range(members))
    notes = _device(disks.count)
    guest.sh(f"for disk in {names} {notes}; do for i in $(seq 200); do [ -b $disk ] && break; sleep 0.05; done; [ -b $disk ]; done")
    daemon = GuestDaemon(guest, "--cores 0,1")
    daemon.start()
    daemon.cli(f"array create {ARRAY} --level {level} --consistency {consistency} --strip 16K {names}")
    daemon.cli(f"volume create {VOLUME} --backing {ARRAY} --size {VOLUME_MIB}M --iops {IOPS}")
    state = guest.sh(f"cat {daemon.DIRECTORY}/state/state.json")
    daemon.cli(f"export create vm1 --kind ublk --volume {VOLUME} -o queues=2")
    disks.note(kind="volume", name=VOLUME, size=VOLUME_MIB * MIB)
    disks.note(kind="volume done", name=VOLUME)
    disks.note(kind="ready")
    writer = guest.start(
        "writer", f"{paths.HERE}/guest/noting-writer /dev/ublkb0 {notes} {WORKERS} {WRITES} {seed}")
    if replaced is not None:
        daemon.cli(f"array fail {ARRAY} {replaced}")
        daemon.cli(f"array add {ARRAY} {_device(members)}")
    _change(disks, daemon, f"volume create {OTHER} --backing {ARRAY} --size {OTHER_MIB}M", OTHER, OTHER_MIB * MIB)
    _change(disks, daemon, f"volume grow {VOLUME} --size {GROWN_MIB}M", VOLUME, GROWN_MIB * MIB)
    _change(disks, daemon, f"volume delete {OTHER} --yes", OTHER, None)
    writer.wait()
    daemon.end()
    assert not disks.errors, disks.errors
    return disks, state


def _change(disks, daemon, command, name, size):
    """Changes the pool, and notes it: `size` is the volume's afterwards."""
    disks.note(kind="volume", name=name, size=size)
    daemon.cli(command)
    disks.note(kind="volume done", name=name)
