"""An operator's day with freestoned, from the first array to the last deletion, every step verified from a guest.

What the lab runs as a test (cases/operators_day.py) and `make run` shows."""

import json
import os
import shutil
import subprocess
import time

import paths
from freestoned import MIB
from raid_server import raid_check
from paths import die_with_parent
from vm import Disk, Guest
from workload import (FIO_JSON, check_tree, copy_tree, fio_result, fio_verify, kernel_errors, longest_pause_ms, make_tree)

MEMBER_MIB = 512
VOLUME_MIB, GROWN_MIB = 256, 384
LOAD = "32M"
LIMIT_IOPS = 300
# A rebuild that can be watched: without it, it has ended before a client looks.
REBUILD_BYTES_PER_S = 1 * MIB  # of each member


class Day:
    """The steps, in their order. `daemon` runs; tell(line) is called after each step, and look(what) where there is something
    to see on the page."""

    def __init__(self, daemon, directory, tell, look=lambda what: None):
        self.daemon, self.directory, self.tell, self.look = daemon, directory, tell, look
        os.makedirs(directory, exist_ok=True)
        self.tree = os.path.join(directory, "tree")
        self.images = [daemon.file(f"disk{number}", MEMBER_MIB * MIB) for number in range(5)]
        self.members, self.fast = list(self.images), []
        self.guest = self.drive = None

    def run(self):
        self.create()
        self.boot()
        self.grow()
        self.limit()
        self.pull_kill_rebuild()
        self.upgrade()
        self.check("data", self.images)
        self.move()
        self.check("fast", self.fast)
        self.delete()

    def plug(self, image):
        """A drive that can be pulled: a server of its own, as the controller of a drive is. Returns how it is opened."""
        socket = self.daemon.path("drive.sock")
        with open(os.path.join(self.directory, "drive.log"), "wb") as log:
            self.drive = subprocess.Popen(
                [paths.FREESTONE, "serve", "--device", f"io_uring:path={image}", "--export", f"nbd:socket={socket}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)
        self.daemon.wait_for("the drive", lambda: os.path.exists(socket))
        return f"nbd:path={socket}"

    def create(self):
        self.members[1] = self.plug(self.members[1])
        cli, members = self.daemon.cli, self.members
        cli("array", "create", "data", "--level", "5", *members[:4], "--spare", members[4])
        cli("volume", "create", "v1", "--array", "data", "--size", f"{VOLUME_MIB}M")
        cli("export", "create", "vm1", "--kind", "vhost-user-blk", "--volume", "v1", "-o", "queues=2")
        attach = cli("export", "show", "vm1", "--attach", "qemu")
        assert self.daemon.path("vm1.sock") in attach, attach
        self.tell(f"an array over four disks with a spare, a volume of {VOLUME_MIB} MiB, and an export for a guest")

    def boot(self):
        files, size = make_tree(self.tree)
        self.guest = Guest([Disk(self.daemon.path("vm1.sock"), 2)], cpus=2, directory=self.directory)
        self.guest.__enter__()
        self.guest.attach_disks()
        self.guest.modprobe("ext4")
        self.guest.sh("mkfs.ext4 -q -F /dev/vda && mkdir -p /mnt/disk && mount /dev/vda /mnt/disk")
        self.guest.sh(copy_tree(self.tree, "/mnt/disk/tree"))
        self.check_files()
        clients = self.daemon.get("/v1/exports/vm1")["traffic"]["clients"]
        assert clients == 1, clients
        kernel = self.guest.sh("uname -r").strip()
        self.tell(f"a guest (Linux {kernel}) made a file system and copied {files} files, {size / MIB:.0f} MiB: every checksum is right")

    def check_files(self):
        self.guest.sh(check_tree(self.tree, "/mnt/disk/tree"))

    def grow(self):
        self.daemon.cli("volume", "grow", "v1", "--size", f"{GROWN_MIB}M")
        size = lambda: int(self.guest.sh("cat /sys/block/vda/size")) * 512
        self.daemon.wait_for("the guest's new size", lambda: size() == GROWN_MIB * MIB)
        self.guest.sh("resize2fs /dev/vda")
        blocks = int(self.guest.sh("stat -f -c '%b' /mnt/disk")) * int(self.guest.sh("stat -f -c '%S' /mnt/disk"))
        assert blocks > (GROWN_MIB - 40) * MIB, blocks
        self.check_files()
        self.tell(f"the volume grew to {GROWN_MIB} MiB in use; the guest saw it and made its file system larger")

    def limit(self):
        # A third of what this machine reads without a limit; other work on it only makes a round slower.
        limit = int(min(LIMIT_IOPS, max(self.read_iops() for _ in range(2)) / 3))
        self.daemon.cli("volume", "set", "v1", "--iops", str(limit))
        rounds = []
        while len(rounds) < 4 and (not rounds or max(rounds) <= limit / 2):
            rounds.append(self.read_iops())
        self.daemon.cli("volume", "set", "v1")
        free = max(self.read_iops() for _ in range(2))
        for _ in range(4):  # other work on the machine may have taken one round, not all
            free = free if free > max(rounds) * 1.5 else self.read_iops()
        assert limit / 2 < max(rounds) < limit * 1.1, (limit, rounds)
        assert free > max(rounds) * 1.5, (free, rounds)
        self.look("limited")
        self.tell(f"a limit of {limit} requests a second, set and lifted in use: the guest reads at {max(rounds):.0f} and {free:.0f} a second")

    def read_iops(self):
        said = self.guest.sh(
            "fio --name=read --filename=/dev/vda --size=16M --rw=randread --bs=4k --iodepth=16 --direct=1"
            " --ioengine=libaio --time_based --runtime=4 --ramp_time=1 --output-format=json")
        return json.loads(said[said.index("{"):])["jobs"][0]["read"]["iops"]

    def pull_kill_rebuild(self):
        load = self.load()
        self.drive.kill()
        job = self.daemon.wait_for("the rebuild", self.slow_job, timeout_s=120)
        assert job["kind"] == "rebuild" and job["slot"] == 1, job
        state = self.daemon.get("/v1/arrays/data")["state"]
        assert state == "degraded", state
        listed = self.daemon.cli("job", "list")
        assert "data.rebuild.1" in listed and "running" in listed, listed
        self.look("rebuilding")
        self.tell("a disk was pulled under load: the array is degraded, and the spare is being filled")
        self.daemon.kill()
        time.sleep(0.3)
        start_s = self.daemon.start()
        self.daemon.wait_for("the array in sync", lambda: self.daemon.get("/v1/arrays/data")["state"] == "optimal", timeout_s=300)
        job = fio_result(load.wait())
        self.check_files()
        self.look("rebuilt")
        self.tell(
            f"kill -9 of the daemon in the middle of the rebuild; it answered again {start_s:.2f} s after its start and the rebuild"
            f" went to its end. fio wrote and read back {job['write']['io_bytes'] / MIB:.0f} MiB meanwhile with every checksum right;"
            f" its longest pause was {longest_pause_ms(job):.0f} ms")

    def slow_job(self):
        """The rebuild, once it runs, slow enough to be watched."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            for job in self.daemon.get("/v1/jobs"):
                return self.daemon.patch(f"/v1/jobs/{job['id']}", {"max_bytes_per_s": REBUILD_BYTES_PER_S})
            time.sleep(0.002)
        return None

    def load(self):
        self.guest.sh(f"rm -f /mnt/disk/load; fallocate -l {LOAD} /mnt/disk/load && sync")
        return self.guest.start("load", fio_verify("/mnt/disk/load", LOAD, FIO_JSON))

    def upgrade(self):
        load = self.load()
        time.sleep(1)
        before = [self.daemon.get(f"/v1/{what}") for what in ("volumes", "devices", "groups")]
        self.daemon.stop()
        # Another program, at another place, with the state that this one wrote.
        self.daemon.program = os.path.join(self.directory, "freestoned-new")
        shutil.copy2(paths.FREESTONED, self.daemon.program)
        self.daemon.start()
        after = [self.daemon.get(f"/v1/{what}") for what in ("volumes", "devices", "groups")]
        assert before == after, (before, after)
        job = fio_result(load.wait())
        self.check_files()
        self.look("upgraded")
        self.tell(f"upgraded under load: the guest saw a pause of at most {longest_pause_ms(job):.0f} ms, and every checksum is right")

    def move(self):
        load = self.load()
        self.fast = [self.daemon.file(f"fast{number}", MEMBER_MIB * MIB) for number in range(2)]
        self.daemon.cli("array", "create", "fast", "--level", "1", *self.fast)
        began = time.monotonic()
        self.daemon.cli("volume", "move", "v1", "--to", "fast", "--wait")
        took_s = time.monotonic() - began
        assert self.daemon.get("/v1/volumes/v1")["backing"] == "fast"
        # Whatever still went to the old place would be an error from now on.
        self.daemon.cli("array", "delete", "data", "--yes")
        job = fio_result(load.wait())
        self.check_files()
        self.look("moved")
        self.tell(f"the volume moved to another array in {took_s:.1f} s under load, and its old array is deleted; the guest's longest"
                  f" pause was {longest_pause_ms(job):.0f} ms, and every checksum is right")

    def check(self, array, images):
        """Ends the daemon, has raid-check look at the disks of an array and at its pool, and starts the daemon again."""
        self.daemon.stop()
        said = raid_check(images)
        assert f"array {array}: " in said and "a pool of volumes" in said, said
        self.daemon.start()
        self.check_files()
        self.tell(f"the daemon ended, and an independent program found the disks, the parity and the pool of {array} right;"
                  " the daemon started again, and every checksum is right")

    def delete(self):
        daemon, guest = self.daemon, self.guest
        guest.sh("umount /mnt/disk && e2fsck -f -n /dev/vda")
        errors = kernel_errors(guest)
        assert not errors, f"the guest's kernel complains:\n{errors}"
        code, _, said = daemon.cli("volume", "delete", "v1", "--yes", check=False)
        assert code == 1 and "export vm1 serves it" in said, said
        code, _, said = daemon.cli("export", "delete", "vm1", check=False)
        assert code == 2 and "1 connected clients lose it" in said, said
        guest.close()
        daemon.wait_for("the guest's end", lambda: daemon.get("/v1/exports/vm1")["traffic"]["clients"] == 0)
        daemon.cli("export", "delete", "vm1")
        daemon.cli("volume", "delete", "v1", "--yes")
        daemon.cli("array", "delete", "fast", "--yes")
        left = [daemon.get(f"/v1/{what}") for what in ("exports", "volumes", "arrays")]
        assert left == [[], [], []], left
        code, said, _ = daemon.cli("array", "examine", self.members[0], check=False)
        assert code != 0 or "data" not in said, said
        self.look("empty")
        self.tell("the file system is clean and the guest's kernel saw no I/O error; export, volume and array are deleted,"
                  " none of them before the other let it go")

    def close(self):
        if self.guest is not None:
            self.guest.__exit__(None, None, None)
        if self.drive is not None:
            self.drive.kill()
            self.drive.wait()
        if self.daemon.program != paths.FREESTONED:
            os.unlink(self.daemon.program)

    def logs(self):
        return self.daemon.log() + (self.guest.logs() if self.guest else "")
