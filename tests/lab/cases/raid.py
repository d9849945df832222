"""A guest on a RAID 6 array of files: members fail, the server is killed, nothing is lost."""

import time

from lab import needs_freestone
from raid_server import RaidServer
from workload import fio_verify

MEMBERS = 6
MEMBER_MIB = 96
LOAD_MIB = 16
LOAD_IOPS = 400


@needs_freestone
def a_guest_on_raid_6_outlives_two_members_and_a_killed_server(lab):
    """Data and file system; the runner stops the server, which then checks the members on the host."""
    server = RaidServer(lab.directory, "6", MEMBERS, MEMBER_MIB)
    guest, load = _start(lab, server)
    for slot in (2, 5):
        time.sleep(1)
        server.array("fail", server.array_name, str(slot))
    assert server.show()["state"] == "degraded"
    server.kill()
    time.sleep(0.2)
    server.start()
    assert [member["slot"] for member in server.show()["members"] if member["state"] == "missing"] == [2, 5]
    _finish(guest, load)


def _start(lab, server):
    """Serve the array, boot a guest with a file system on it, and start writing and verifying a file."""
    guest = lab.boot_on(server, cpus=2)
    guest.modprobe("ext4")
    guest.sh("mkfs.ext4 -q -F /dev/vda && mkdir -p /mnt/disk && mount /dev/vda /mnt/disk")
    return guest, guest.start("load", fio_verify("/mnt/disk/load", f"{LOAD_MIB}m", f"--rate_iops={LOAD_IOPS}"))


def _finish(guest, load):
    """The load has seen nothing; the file system is whole; what was written is read back from the disk."""
    load.wait()
    guest.sh("umount /mnt/disk && e2fsck -f -n /dev/vda && mount /dev/vda /mnt/disk")
    guest.sh(fio_verify("/mnt/disk/load", f"{LOAD_MIB}m", "--verify_only"))
    guest.sh("umount /mnt/disk")
