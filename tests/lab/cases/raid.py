"""A guest on a RAID 6 array of files: members fail, are replaced and go missing, the server is killed; nothing is lost."""

import time

from lab import needs_freestone
from raid_server import RaidServer
from workload import fio_verify

MEMBERS = 6
MEMBER_MIB = 512  # files with holes; beside a load, a rebuild of them takes some seconds
LOAD_MIB = 12
LOAD_IOPS = 300
PATIENCE_S = 120


@needs_freestone
def a_guest_on_raid_6_outlives_two_members_and_servers_killed_in_mid_write_and_mid_rebuild(lab):
    """Data and file system; the runner stops the server, which then checks the members on the host."""
    server = RaidServer(lab.directory, "6", MEMBERS, MEMBER_MIB)
    guest = _boot(lab, server)
    load = _start_load(guest, "first")
    for slot in (2, 5):
        time.sleep(1)
        server.array("fail", server.array_name, str(slot))
    assert server.show()["state"] == "degraded"
    _kill_and_restart(server)
    assert _slots(server, "missing") == [2, 5]
    _rebuild_through_a_kill(server)
    load.wait()
    load = _start_load(guest, "second")
    time.sleep(1)
    # Dirty and degraded: what md refuses to start, or starts by force with wrong blocks.
    server.kill()
    server.lose_member(0)
    server.start()
    assert _slots(server, "missing") == [0]
    load.wait()
    _check_files(guest)


def _kill_and_restart(server):
    server.kill()
    time.sleep(0.2)
    server.start()


def _slots(server, state):
    return [member["slot"] for member in server.show()["members"] if member["state"] == state]


def _rebuild_through_a_kill(server):
    """Two new members; the server is killed while the first is filled, and goes on by itself when it is back."""
    server.array("add", server.array_name, server.new_member())
    _wait_for(lambda: any(job["done_bytes"] > 0 for job in server.show()["jobs"]), "a rebuild that has begun")
    _kill_and_restart(server)
    rebuilding = _slots(server, "rebuilding")
    assert len(rebuilding) == 1, f"killed too late: {server.show()}"
    server.array("add", server.array_name, server.new_member())
    _wait_for(lambda: server.show()["state"] == "optimal", "a whole array")


def _wait_for(is_so, what):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {PATIENCE_S} s"
        time.sleep(0.02)


def _boot(lab, server):
    """Serve the array and boot a guest that has a file system on it."""
    guest = lab.boot_on(server, cpus=2)
    guest.modprobe("ext4")
    guest.sh("mkfs.ext4 -q -F /dev/vda && mkdir -p /mnt/disk && mount /dev/vda /mnt/disk")
    return guest


def _load(name, options):
    return fio_verify(f"/mnt/disk/{name}", f"{LOAD_MIB}m", options)


def _start_load(guest, name):
    """Write a file and verify it."""
    return guest.start(name, _load(name, f"--rate_iops={LOAD_IOPS}"))


def _check_files(guest):
    """The file system is whole; what was written is read back from the disk."""
    guest.sh("umount /mnt/disk && e2fsck -f -n /dev/vda && mount /dev/vda /mnt/disk")
    for name in ("first", "second"):
        guest.sh(_load(name, "--verify_only"))
    guest.sh("umount /mnt/disk")
