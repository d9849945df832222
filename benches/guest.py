"""In a guest, whose kernel is initiator and peer: our NVMe/TCP target beside the kernel's own, and our ublk server beside
rublk and the kernel's loop driver, our arrays beside the kernel's md; each on RAM disks of the kernel (brd) of its own,
past the page cache.

The guest has one processor, emulated, whose clock counts instructions (QEMU's icount). So what is measured is how many
instructions a request takes from fio to the RAM disk and back: of the program, of the initiator and of the server. That
is repeatable on a busy machine, too; it says nothing about caches, nor about what runs side by side on several cores."""

import contextlib
import os
import subprocess
import sys
import tempfile

import paths
from nvmet import KernelTarget
from servers import as_cases, fio_job
from ublk_server import UblkServer
from vm import Guest

# what, and how many requests
CASES = {("randread", "4K", 1): 2000, ("randread", "4K", 32): 4000, ("randwrite", "4K", 32): 4000, ("read", "128K", 8): 2000,
         ("write", "128K", 8): 2000}
# md's reads are short; 256K are a whole stripe
ARRAY_CASES = {("randread", "4K", 1): 8000, ("randread", "4K", 32): 8000, ("randwrite", "4K", 32): 8000, ("read", "128K", 8): 2000,
               ("write", "128K", 8): 2000, ("write", "256K", 8): 1000}
ONE_PROCESSOR = {"cpus": 1, "memory_mib": 1536, "accel": "tcg,thread=single", "qemu_arguments": ["-icount", "shift=0,sleep=off"]}
NQN = "nqn.2014-08.org.example:ours"
RUBLK = "0.2.15"
RAM_DISKS, RAM_DISK_MIB = 10, 64
USED_MIB = 56  # of each disk: an array needs room of its members, too
UBLK_QUEUE = 128
MD_BITMAP = "--bitmap=internal --bitmap-chunk=64K"  # regions as small as ours are on members of this size
RAM_DISK = "io_uring:path=/dev/ram2,direct=on"
NO_POLLING = "--poll-us never"  # there is one processor


def measure(repo, rounds):
    """{table: cases}; instructions a request."""
    rublk = _rublk(repo)
    tables = {
        "nvme_tcp": {"freestone": _our_target, "kernel's nvmet": _kernel_target},
        "ublk_null": {"freestone": lambda guest: _ublk(guest, "null:size=16G"),
                      "rublk null": lambda guest: _rublk_disk(guest, rublk, "null")},
        "ublk_disk": {"freestone": lambda guest: _ublk(guest, RAM_DISK),
                      "rublk loop": lambda guest: _rublk_disk(guest, rublk, "loop -f /dev/ram3"),
                      "kernel's loop": _loop},
    }
    without_copies = {
        "ublk_zero_copy": {"freestone": lambda guest: _ublk(guest, RAM_DISK),
                           "freestone with copies": lambda guest: _ublk(guest, RAM_DISK, ",zero-copy=off"),
                           "rublk loop -z": lambda guest: _rublk_disk(guest, rublk, "loop -f /dev/ram3 -z"),
                           "kernel's loop": _loop},
    }
    return (_tables(paths.KERNEL, tables, rounds) | _tables(paths.KERNEL, _arrays(), rounds, ARRAY_CASES)
            | _tables(paths.NEW_KERNEL, without_copies, rounds))


def _tables(kernel, tables, rounds, cases=CASES):
    with (tempfile.TemporaryDirectory() as directory,
          Guest(directory=directory, kernel=kernel, **ONE_PROCESSOR) as guest):
        guest.modprobe("ublk_drv", "nvme-tcp", "loop", "raid456", "raid1")
        guest.sh(f"ip link set lo up; modprobe brd rd_nr={RAM_DISKS} rd_size={RAM_DISK_MIB << 10}")
        for i in range(RAM_DISKS):  # pages that were never written cost nothing to read
            guest.sh(f"dd if=/dev/zero of=/dev/ram{i} bs=1M count={RAM_DISK_MIB} oflag=direct 2>/dev/null")
        found = {}
        for table, disks in tables.items():
            print(f"  {table}", file=sys.stderr)
            found[table] = as_cases(_in_turn(guest, disks, rounds, cases))
        return found


def _in_turn(guest, disks, rounds, cases):
    """{case: {name: [instructions a request, of each round]}}. Every disk is there alone: the others' servers take no part
    of the processor."""
    results = {case: {name: [] for name in disks} for case in cases}
    for _ in range(rounds):
        for name, make in disks.items():
            with contextlib.contextmanager(make)(guest) as node:
                for case, by_disk in results.items():
                    by_disk[name].append(_instructions(guest, node, *case, cases[case]))
    return results


def _instructions(guest, node, rw, block_size, depth, requests):
    size = requests * int(block_size.removesuffix("K"))
    job = fio_job(guest.sh(f"fio --name=peer --filename={node} --ioengine=libaio --direct=1 --rw={rw} --bs={block_size}"
                           f" --iodepth={depth} --size={USED_MIB}M --io_size={size}K --norandommap --randrepeat=0"
                           " --output-format=json", timeout_s=600))
    found = job["read"] if job["read"]["total_ios"] else job["write"]
    return found["runtime"] * 1e6 / found["total_ios"]


def _our_target(guest):
    server = UblkServer(guest, f"--device io_uring:path=/dev/ram0,direct=on {NO_POLLING}"
                               f" --export nvme-tcp:listen=127.0.0.1:4420,nqn={NQN}", name="target")
    server.start()
    yield from _connected(guest, "127.0.0.1:4420", NQN)
    server.stop()


def _kernel_target(guest):
    target = KernelTarget(guest, block_device="/dev/ram1", port=4421)
    yield from _connected(guest, target.address, target.nqn)
    target.remove()


def _connected(guest, address, nqn):
    host, port = address.split(":")
    guest.sh(f"nvme connect -t tcp -a {host} -s {port} -n {nqn}")
    find = f"grep -lx {nqn} /sys/class/nvme-subsystem/*/subsysnqn"
    node = guest.sh(f"for i in $(seq 100); do d=$(dirname $({find})); for n in $d/nvme*n1; do"
                    " [ ! -b /dev/${n##*/} ] || { echo /dev/${n##*/}; exit 0; }; done; sleep 0.1; done; exit 1").strip()
    yield node
    guest.sh(f"nvme disconnect -n {nqn}")


def _ublk(guest, device, keys=""):
    name = device.split(":")[0]
    number = {"null": 0, "io_uring": 1, "raid": 2}[name]
    server = UblkServer(guest, f"--device {device} --export ublk:id={number},queue-size={UBLK_QUEUE}{keys}"
                               f" {NO_POLLING}", name=name)
    server.start()
    yield f"/dev/ublkb{number}"
    server.stop()


def _rublk_disk(guest, rublk, target):
    number = {"null": 10, "loop": 11}[target.split()[0]]
    guest.sh(f"{rublk} add {target} --number {number} --queue 1 --depth {UBLK_QUEUE} --quiet")
    guest.sh(f"for i in $(seq 100); do [ -b /dev/ublkb{number} ] && exit 0; sleep 0.1; done; exit 1")
    yield f"/dev/ublkb{number}"
    guest.sh(f"{rublk} del --number {number}")


def _loop(guest):
    node = guest.sh(f"losetup --show --find --direct-io=on /dev/ram4").strip()
    yield node
    guest.sh(f"losetup --detach {node}")


def _arrays():
    return {
        "raid5_ppl": _ours_and_md(5, 5, "--strip 64K --consistency ppl", "--chunk=64 --consistency-policy=ppl"),
        "raid5_bitmap": _ours_and_md(5, 5, "--strip 64K --consistency bitmap", f"--chunk=64 {MD_BITMAP}"),
        "raid1_bitmap": _ours_and_md(1, 2, "--strip 64K --consistency bitmap", MD_BITMAP),
    }


def _ours_and_md(level, members, our_options, md_options):
    """Arrays of a level, each on RAM disks of its own."""
    return {"freestone": lambda guest: _our_array(guest, level, _ram_disks(0, members), our_options),
            "md": lambda guest: _md(guest, level, _ram_disks(members, members), md_options)}


def _ram_disks(first, count):
    return [f"/dev/ram{first + i}" for i in range(count)]


def _our_array(guest, level, members, options):
    guest.sh(f"{paths.FREESTONE} array create bench --level {level} {options} --force {' '.join(members)}")
    with contextlib.contextmanager(_ublk)(guest, f"raid:members={'+'.join(members)}") as node:
        guest.sh(f"until said=$({paths.FREESTONE} array show bench) && ! grep -q resync <<<\"$said\"; do sleep 1; done")
        yield node


def _md(guest, level, members, options):
    guest.sh(f"{paths.MDADM} --create /dev/md0 --run --level={level} {options} --raid-devices={len(members)}"
             f" {' '.join(members)} 2>&1")
    guest.sh("cd /sys/block/md0/md; until [ $(cat degraded) = 0 ] && [ $(cat resync_start) = none ]; do sleep 1; done")
    yield "/dev/md0"
    guest.sh(f"{paths.MDADM} --stop /dev/md0 2>&1")


def _rublk(repo):
    """The program rublk, installed when it is not there: it needs libclang to build."""
    root = repo / "target" / "bench" / f"rublk-{RUBLK}"
    program = root / "bin" / "rublk"
    if not program.exists():
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "libclang1"], check=True,
                       env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, stdout=sys.stderr)
        subprocess.run(["cargo", "install", "rublk", "--version", RUBLK, "--locked", "--root", str(root)], check=True)
    return program
