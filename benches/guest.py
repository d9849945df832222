"""In a guest, whose kernel is initiator and peer: our NVMe/TCP target beside the kernel's own on the same kind of file, and
our ublk server beside rublk and the kernel's loop driver.

The guest's processors may be emulated: then times mean little, but both sides of a ratio are emulated alike, so it
says about which runs fewer instructions. Copies of whole pages cost an emulated processor less than they cost a real
one, relative to the rest."""

import contextlib
import os
import subprocess
import sys
import tempfile

import paths
from nvmet import KernelTarget
from server import INITIATOR_CORE, SERVER_CORE, as_cases, fio_arguments, fio_iops
from ublk_server import UblkServer
from vm import Guest

CASES = [("randread", "4K", 1), ("randread", "4K", 32), ("randwrite", "4K", 32), ("read", "128K", 8), ("write", "128K", 8)]
NQN = "nqn.2014-08.org.example:ours"
RUBLK = "0.2.15"
FILE_MIB = 64
UBLK_QUEUE = 128


def measure(repo, rounds, seconds):
    """{table: cases}."""
    rublk = _rublk(repo)
    with tempfile.TemporaryDirectory() as directory, Guest(cpus=2, directory=directory) as guest:
        guest.modprobe("ublk_drv", "nvme-tcp", "loop")
        guest.sh("ip link set lo up")
        found = {}
        for table, disks in (
            ("nvme_tcp", {"freestone": _our_target, "kernel's nvmet": _kernel_target}),
            ("ublk_null", {"freestone": lambda guest: _ublk(guest, "null:size=16G"),
                           "rublk null": lambda guest: _rublk_disk(guest, rublk, "null")}),
            ("ublk_file", {"freestone": lambda guest: _ublk(guest, f"io_uring:path={_file(guest, 'ours')}"),
                           "rublk loop": lambda guest: _rublk_disk(guest, rublk, f"loop -f {_file(guest, 'rublk')}"),
                           "kernel's loop": _loop}),
        ):
            print(f"  {table}", file=sys.stderr)
            found[table] = as_cases(_in_turn(guest, disks, rounds, seconds))
        return found | {"accelerator": guest.accel}


def _in_turn(guest, disks, rounds, seconds):
    """{case: {name: [IOPS of each round]}}: every disk is there for the whole time, each case measures them in turn."""
    with contextlib.ExitStack() as ends:
        nodes = {name: ends.enter_context(contextlib.contextmanager(make)(guest)) for name, make in disks.items()}
        results = {case: {name: [] for name in nodes} for case in CASES}
        for _ in range(rounds):
            for case, by_disk in results.items():
                for name, node in nodes.items():
                    words = " ".join(fio_arguments(*case, seconds))
                    command = f"taskset -c {INITIATOR_CORE} fio {words} --filename={node} --ioengine=libaio --direct=1"
                    by_disk[name].append(fio_iops(guest.sh(command)))
        return results


def _file(guest, name):
    """A file in the guest's memory, with data."""
    path = f"/dev/shm/{name}"
    guest.sh(f"head -c {FILE_MIB}M /dev/zero >{path}")
    return path


def _our_target(guest):
    server = UblkServer(guest, f"--device io_uring:path={_file(guest, 'target')} --cores {SERVER_CORE}"
                               f" --export nvme-tcp:listen=127.0.0.1:4420,nqn={NQN}", name="target")
    server.start()
    yield from _connected(guest, "127.0.0.1:4420", NQN)
    server.stop()


def _kernel_target(guest):
    target = KernelTarget(guest, FILE_MIB, port=4421)
    guest.sh(f"head -c {FILE_MIB}M /dev/zero >{target.file}")
    yield from _connected(guest, target.address, target.nqn)


def _connected(guest, address, nqn):
    host, port = address.split(":")
    guest.sh(f"nvme connect -t tcp -a {host} -s {port} -n {nqn}")
    find = f"grep -lx {nqn} /sys/class/nvme-subsystem/*/subsysnqn"
    node = guest.sh(f"for i in $(seq 100); do d=$(dirname $({find})); for n in $d/nvme*n1; do"
                    " [ ! -b /dev/${n##*/} ] || { echo /dev/${n##*/}; exit 0; }; done; sleep 0.1; done; exit 1").strip()
    yield node
    guest.sh(f"nvme disconnect -n {nqn}")


def _ublk(guest, device):
    name = device.split(":")[0]
    number = {"null": 0, "io_uring": 1}[name]
    server = UblkServer(guest, f"--device {device} --export ublk:id={number},queue-size={UBLK_QUEUE}"
                               f" --cores {SERVER_CORE}", name=name)
    server.start()
    yield f"/dev/ublkb{number}"
    server.stop()


def _rublk_disk(guest, rublk, target):
    number = {"null": 10, "loop": 11}[target.split()[0]]
    guest.sh(f"taskset -c {SERVER_CORE} {rublk} add {target} --number {number} --queue 1 --depth {UBLK_QUEUE} --quiet")
    guest.sh(f"for i in $(seq 100); do [ -b /dev/ublkb{number} ] && exit 0; sleep 0.1; done; exit 1")
    yield f"/dev/ublkb{number}"
    guest.sh(f"{rublk} del --number {number}")


def _loop(guest):
    node = guest.sh(f"losetup --show --find {_file(guest, 'loop')}").strip()
    yield node
    guest.sh(f"losetup --detach {node}")


def _rublk(repo):
    """The program rublk, installed when it is not there: it needs libclang to build."""
    root = repo / "target" / "bench" / f"rublk-{RUBLK}"
    program = root / "bin" / "rublk"
    if not program.exists():
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "libclang1"], check=True,
                       env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, stdout=sys.stderr)
        subprocess.run(["cargo", "install", "rublk", "--version", RUBLK, "--locked", "--root", str(root)], check=True)
    return program
