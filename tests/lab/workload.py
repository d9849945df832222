"""What the lab's tests and the demo do to a disk: images, a tree of real files with checksums, fio with verify."""

import hashlib
import json
import os
import shutil
import time

import paths

MIB = 1 << 20
# Real files, small and large: this repo's sources and the stock kernel's file-system modules.
TREE_SOURCES = [
    *(os.path.join(paths.REPO, name) for name in ("crates", "docs", "tests")),
    os.path.join(paths.KERNEL, "lib", "modules"),
]
TREE_LIMIT_BYTES = 24 * MIB  # an emulated guest copies about 10 MiB/s
# What a server says when its sandbox does not know a system call (crates/sandbox/src/refusal.rs).
REFUSED = "sandbox refused"
# How often a server is killed under load; `make nightly` kills 50 times.
KILLS = int(os.environ.get("LAB_KILLS", "3"))
SKIPPED = {".git", "target", "__pycache__", "drivers", "sound"}


def make_image(path, size_bytes):
    """A sparse image file of this size, without old contents."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size_bytes)
    return path


def make_tree(directory):
    """Copy real files to a new directory, so that they hold still. Writes directory.sha256, a list for sha256sum -c
    made on the host, and returns (files, bytes)."""
    shutil.rmtree(directory, ignore_errors=True)
    sums, total = [], 0
    for path in (path for source in TREE_SOURCES for path in files_under(source)):
        with open(path, "rb") as file:
            data = file.read()
        if total + len(data) > TREE_LIMIT_BYTES:
            continue
        total += len(data)
        name = os.path.relpath(path, paths.REPO if path.startswith(paths.REPO) else "/")
        target = os.path.join(directory, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(data)
        sums.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    with open(directory + ".sha256", "w") as file:
        file.writelines(sums)
    return len(sums), total


def files_under(directory):
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(set(directories) - SKIPPED)
        for name in sorted(names):
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


def copy_tree(tree, target):
    """A guest script: copy the tree to target and see that it reached the disk."""
    return f"cp -r {tree} {target} && sync"


def check_tree(tree, target):
    """A guest script: read every file back from the disk, not from the guest's memory, and compare checksums."""
    return f"sync; echo 3 >/proc/sys/vm/drop_caches; cd {target} && sha256sum --quiet -c {tree}.sha256"


FIO_JSON = "--output-format=json"  # what fio_result reads


def fio_verify(filename, size, options=""):
    """A guest script: random writes with a checksum in every block, then every block read back and checked."""
    return (f"fio --name=verify --filename={filename} --size={size} --rw=randwrite --bs=4k --iodepth=16 --direct=1"
            f" --ioengine=libaio --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randrepeat=1"
            f" {options}")


ENOUGH, SEED = "/run/enough", "/run/seed"


def fio_verify_until_enough(filename, size, options=""):
    """A guest script: fio_verify again and again, until the file ENOUGH is there. The random numbers of each pass are
    others, so that a block of the pass before is not taken for one of this; SEED has those of the last."""
    one = fio_verify(filename, size, f"{options} --randseed=$seed")
    return f"rm -f {ENOUGH}; for seed in $(seq 9999); do echo $seed >{SEED}; {one} || exit 1; [ ! -e {ENOUGH} ] || exit 0; done; exit 1"


def fio_verify_again(filename, size, options=""):
    """A guest script: what the last pass of fio_verify_until_enough has written is read and checked once more."""
    return fio_verify(filename, size, f"{options} --randseed=$(cat {SEED}) --verify_only")


def fio_result(output):
    """The one job of fio's JSON output (FIO_JSON; warnings may stand before it)."""
    return json.loads(output[output.index("{"):])["jobs"][0]


def longest_pause_ms(job):
    return max(job[direction]["clat_ns"]["max"] for direction in ("read", "write")) / 1e6


def kernel_errors(guest):
    """The guest kernel's complaints about its disks, one a line; none on a good run."""
    return guest.sh("dmesg | grep -iE 'I/O error|blk_update_request|buffer I/O|is not a head|out of range|ext4-fs error|xfs.*(error|corrupt)"
                    "|hung|blocked for more|BUG:|WARNING:|Call Trace' || true").strip()


def prepare_null_disks(guest):
    """Make the guest ready for guest/vhost_disks.py: null_blk without disks, and configfs."""
    guest.modprobe("configfs")
    guest.sh("mount -t configfs configfs /sys/kernel/config; modprobe null_blk nr_devices=0")


def requests_in_flight(guest, disk="vda"):
    """How many reads and writes of the disk the guest waits for."""
    return sum(int(word) for word in guest.sh(f"cat /sys/block/{disk}/inflight").split())


def requests_completed(guest, disk="vda"):
    """How many reads and writes of the disk have ended (Documentation/block/stat.rst)."""
    words = guest.sh(f"cat /sys/block/{disk}/stat").split()
    return int(words[0]) + int(words[4])


def kill_under_load(server, job, kills, every_s, down_s, disk="vda", count=requests_in_flight):
    """kill -9 the server and start it again `kills` times while the job, fio_verify_until_enough on the disk, runs in the
    guest; then the job is over. Each kill comes when the one before is overcome. Returns what each caught, as
    `count(guest, disk)` has it while the server is gone: requests that wait, and must be completed by the next server.
    More kills, three times as many at most, follow until more than half of `kills` have caught something.
    Raises when the job fails."""
    caught = []
    while len(caught) < kills or (sum(map(bool, caught)) <= kills / 2 and len(caught) < 3 * kills):
        before = requests_completed(job.guest, disk)
        time.sleep(every_s)
        # A busy machine may take longer than that to get fio going. On a quiet one nothing may be in flight whenever
        # a guest with one processor looks; what it submits while the server is gone is, and is counted below.
        while job.is_running() and requests_completed(job.guest, disk) == before:
            time.sleep(0.05)
        assert job.is_running(), f"the load ended after {len(caught)} kills of {kills} at least: {job.wait()}"
        server.kill()
        time.sleep(down_s)
        caught.append(count(job.guest, disk))
        server.start()
    end_of_load(job)
    return caught


def end_of_load(job):
    """Lets fio_verify_until_enough end after the pass that it is at, and waits for that."""
    job.guest.sh(f"touch {ENOUGH}")
    job.wait(timeout_s=800)
