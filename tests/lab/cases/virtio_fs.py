"""`freestone fs serve` with trixie's virtiofsd, and with freestone-fs on several queues: a guest works on a directory of
the host; virtiofsd is killed."""

import hashlib
import json
import os
import random
import re
import select
import signal
import statistics
import subprocess

import blkio
import paths
from lab import needs_freestone
from runner import nightly
from server import Server
from workload import FIO_JSON, MIB, fio_result, fio_verify

CPUS = 2
QUEUES = 4
END_TIMEOUT_S = 120
FSX_STEPS = 2000
ROUNDS = 10
# Profiles whose files have no pages in the guest's memory that programs could share.
WITHOUT_SHARED_MAPS = ("throughput", "dense")


@needs_freestone
def a_guest_works_on_a_directory_and_a_killed_virtiofsd_is_reported(lab):
    kept, killed = _serve(lab, "throughput", "kept"), _serve(lab, "throughput", "killed")
    queues = _serve(lab, "throughput", "queues", queues=CPUS)
    guest = _boot(lab, kept, killed, queues)
    _work(guest, kept)
    _read_from_each_processor(guest, queues)
    _write(os.path.join(kept.directory_served, "late"), b"by the host\n")
    assert guest.sh(f"cat {kept.mount}/late") == "by the host\n", "the guest keeps names or data"
    os.kill(killed.virtiofsd(), signal.SIGKILL)
    code, said = killed.end()
    assert code == 1 and "the guest has lost its mount: restart the guest" in said, (code, said)
    assert not os.path.exists(killed.socket)
    guest.sh(f"sha256sum --quiet -c {kept.sums}")  # the other one is not affected
    _end(lab, kept)
    counts = _requests(queues)
    assert len(counts) == CPUS and all(counts), counts


@needs_freestone
def virtiofsd_and_its_sandbox_end_with_a_killed_supervisor(lab):
    server = _serve(lab, "latency", "alone")
    processes = [os.pidfd_open(pid) for pid in (server.virtiofsd(0), server.virtiofsd())]
    server.kill()
    for process in processes:
        assert select.select([process], [], [], END_TIMEOUT_S)[0], "virtiofsd outlives its supervisor"
        os.close(process)


@nightly
@needs_freestone
def a_guest_exercises_a_directory_under_throughput(lab):
    _exercise(lab, "throughput")


@nightly
@needs_freestone
def a_guest_exercises_a_directory_under_latency(lab):
    _exercise(lab, "latency")


@nightly
@needs_freestone
def a_guest_exercises_a_directory_under_cache(lab):
    _exercise(lab, "cache")


@nightly
@needs_freestone
def a_guest_exercises_a_directory_under_dense(lab):
    _exercise(lab, "dense")


@nightly
@needs_freestone
def a_guest_exercises_a_directory_over_four_queues(lab):
    return _exercise_all_queues(lab, "latency")


@nightly
@needs_freestone
def a_guest_exercises_a_directory_over_four_queues_without_caches(lab):
    return _exercise_all_queues(lab, "throughput")


@nightly
@needs_freestone
def a_guest_with_one_queue_exercises_a_directory_of_a_server_with_four(lab):
    """As a guest before Linux 6.11."""
    counts = _exercise(lab, "latency", QUEUES, used=1)
    assert len(counts) == QUEUES and counts[0] and not any(counts[1:]), counts


@nightly
@needs_freestone
def profiles_are_compared_with_the_defaults_of_virtiofsd(lab):
    """Rates of reads as a multiple of those under latency, whose flags are virtiofsd's defaults, from interleaved rounds."""
    servers = [_serve(lab, profile, profile) for profile in ("latency", "throughput", "cache", "dense")]
    guest = _boot(lab, *servers)
    lines = []
    for name, options in (("1M reads", "--rw=read --bs=1m --direct=1"), ("4K random reads", "--rw=randread --bs=4k")):
        ratios = {server.profile: [] for server in servers[1:]}
        for number in range(ROUNDS):
            order = servers[number % len(servers):] + servers[:number % len(servers)]
            rates = {server.profile: _rate(guest, server, options) for server in order}
            for profile, found in ratios.items():
                found.append(rates[profile] / rates["latency"])
        for profile, found in ratios.items():
            lines.append(f"{name}, {profile}: {statistics.median(found):.2f} times latency ({min(found):.2f} to {max(found):.2f},"
                         f" {ROUNDS} rounds, emulated: not a statement about speed)")
    for server in servers[1:]:
        guest.sh(f"sha256sum --quiet -c {server.sums}")
    lab.end_guest()
    for server in servers:
        code, said = server.end()
        assert code == 0, (code, said)
    return "\n".join(lines)


class FsServer(Server):
    """`freestone fs serve` on a directory with files. The device has as many of the server's request queues as `used`."""

    name = "freestone fs serve"

    def __init__(self, lab, profile, tag, queues=1, used=None):
        super().__init__(image=None, log=os.path.join(lab.directory, f"{tag}.log"))
        self.profile, self.tag, self.mount = profile, tag, f"/mnt/{tag}"
        self.queues, self.used = queues, used or queues
        self.directory_served = os.path.join(self.directory, "tree")
        self.sums = os.path.join(self.directory, "sums")
        _make_tree(self.directory_served, self.mount, self.sums)

    def command(self):
        command = [paths.FREESTONE, "fs", "serve", self.directory_served, "--socket", self.socket, "--profile", self.profile]
        if self.queues > 1:  # the freestone-fs next to freestone, whose log has the requests of each queue
            return command + ["--queues", str(self.queues), "--log", "debug"]
        return command + ["--vcpus", str(CPUS), "--virtiofsd", os.path.join(blkio.TRIXIE_BIN, "virtiofsd")]

    def device(self):
        """QEMU's options for the device, without those for the guest's memory, which the lab has."""
        lines = subprocess.run([paths.FREESTONE, "fs", "attach", "qemu", "--json", "--socket", self.socket, "--tag", self.tag,
                                "--queues", str(self.used)], check=True, stdout=subprocess.PIPE).stdout
        words = json.loads(lines)["argv"]["qemu"][0]
        return words[words.index("-chardev"):]

    def virtiofsd(self, generation=1):
        """The process that serves: a child, in namespaces of its own, of the one that was started, which is generation 0."""
        pid = self.process.pid
        for _ in range(generation + 1):
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
                pid = int(children.read().split()[0])
        return pid

    def end(self):
        """Waits for the end; returns exit code and log."""
        code = self.process.wait(END_TIMEOUT_S)
        return code, paths.tail(self.log, 100)


def _serve(lab, profile, tag, queues=1, used=None):
    blkio.require_trixie()
    server = FsServer(lab, profile, tag, queues, used)
    lab.callback(server.__exit__)
    lab.parts.append(server)
    return server.__enter__()


def _boot(lab, *servers):
    """Boot a guest that has mounted what the servers serve."""
    devices = [word for server in servers for word in server.device()]
    cpus = max([CPUS] + [server.queues for server in servers])
    guest = lab.boot_alone(cpus=cpus, qemu_arguments=devices)
    guest.sh("modprobe virtiofs || true")
    for server in servers:
        guest.sh(f"mkdir -p {server.mount} && mount -t virtiofs {server.tag} {server.mount}")
    return guest


def _end(lab, server):
    """The guest ends, and its server with it."""
    lab.end_guest()
    code, said = server.end()
    assert code == 0 and "the guest has disconnected" in said, (code, said)
    assert not os.path.exists(server.socket)


def _read_from_each_processor(guest, server):
    """Linux chooses the queue of a request by the processor that sends it."""
    for cpu in range(server.queues):
        guest.sh(f"echo 3 >/proc/sys/vm/drop_caches; taskset -c {cpu} sha256sum --quiet -c {server.sums}")


def _requests(server):
    """Those of each request queue, as freestone-fs counts them at its end."""
    return [int(count) for count in re.findall(r"request queues ([\d ]+)", paths.tail(server.log, 100))[-1].split()]


def _exercise_all_queues(lab, profile):
    counts = _exercise(lab, profile, QUEUES)
    assert len(counts) == QUEUES and all(counts), counts
    return f"requests of the queues: {counts}"


def _exercise(lab, profile, queues=1, used=None):
    fsx = subprocess.run([os.path.join(paths.HERE, "fsx")], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    server = _serve(lab, profile, "tree", queues, used)
    guest = _boot(lab, server)
    if queues > 1:
        _read_from_each_processor(guest, server)
        one = f"taskset -c $cpu {fio_verify(f'{server.mount}/verify.$cpu', '1m')}"
        guest.sh(f"""
            pids=; for cpu in $(seq 0 {queues - 1}); do {one} & pids="$pids $!"; done
            for pid in $pids; do wait $pid || exit 1; done; rm {server.mount}/verify.*""", timeout_s=600)
    _work(guest, server)
    maps = 0 if profile in WITHOUT_SHARED_MAPS else 5
    weights = [f"{name} = {weight}" for name, weight in (
        ("mapread", maps), ("mapwrite", maps), ("truncate", 3), ("fsync", 1), ("fdatasync", 1), ("close_open", 2),
        ("invalidate", maps), ("posix_fallocate", 1), ("punch_hole", 2), ("sendfile", 1), ("copy_file_range", 1))]
    config = "\n".join([f"flen = {MIB}", "[weights]", *weights])
    guest.sh(f"cat >/run/fsx.toml <<'END'\n{config}\nEND\n"
             f"{fsx} -f /run/fsx.toml -P /run -S 1 -N {FSX_STEPS} {server.mount}/exercised", timeout_s=600)
    in_guest = guest.sh(f"sync; sha256sum <{server.mount}/exercised").split()[0]
    assert _sum(os.path.join(server.directory_served, "exercised")) == in_guest
    _end(lab, server)
    return _requests(server) if queues > 1 else []


def _rate(guest, server, options):
    """Bytes a second."""
    return fio_result(guest.sh(f"fio --name=reads --filename={server.mount}/big --readonly --time_based --runtime=1 {options}"
                               f" {FIO_JSON}"))["read"]["bw_bytes"]


def _work(guest, server):
    """What guest and host write, the other reads."""
    mount = server.mount
    guest.sh(f"sha256sum --quiet -c {server.sums}")
    sums = guest.sh(f"""
        cp -r {mount}/small {mount}/copies
        dd if=/dev/urandom of={mount}/written bs=1M count=4 oflag=direct status=none
        dd if=/dev/urandom of={mount}/appended bs=7k count=33 conv=fsync status=none
        head -c 4k /dev/urandom >>{mount}/appended
        mkdir {mount}/folder; mv {mount}/appended {mount}/folder/moved; ln -s moved {mount}/folder/link
        chmod 640 {mount}/folder/moved; chown 12:34 {mount}/folder/moved; rm -r {mount}/small
        sync; cd {mount}; find . -type f -exec sha256sum {{}} +""")
    tree = server.directory_served
    for line in sums.splitlines():
        expected, name = line.split("  ./")
        assert _sum(os.path.join(tree, name)) == expected, name
    files = sum(len(names) for _, _, names in os.walk(tree))
    assert files == len(sums.splitlines()) + 1, "the host has other files than the guest"  # the link
    moved = os.stat(os.path.join(tree, "folder", "moved"))
    assert (moved.st_mode & 0o777, moved.st_uid, moved.st_gid) == (0o640, 12, 34), moved
    assert os.readlink(os.path.join(tree, "folder", "link")) == "moved"
    shared = guest.sh(f"""python3 -c 'import mmap; file = open("{mount}/big", "r+b"); mmap.mmap(file.fileno(), 4096)'""",
                      check=False)
    if server.profile in WITHOUT_SHARED_MAPS:
        assert shared[0] != 0 and "No such device" in shared[1], shared
    else:
        assert shared[0] == 0, shared
    # The list for the rest of the test; the guest may have kept the content of the first.
    server.sums += "-after"
    with open(server.sums, "w", encoding="utf-8") as file:
        file.writelines(f"{line.split('  ')[0]}  {mount}/{line.split('  ./')[1]}\n" for line in sums.splitlines())


def _make_tree(tree, mount, sums):
    """A large file and many small ones, and a list for sha256sum -c with their places in the guest."""
    generator = random.Random(1)
    files = {"big": 6 * MIB + 123} | {f"small/{number:03}": generator.randrange(20_000) for number in range(60)}
    with open(sums, "w", encoding="utf-8") as lines:
        for name, size in files.items():
            data = generator.randbytes(size)
            _write(os.path.join(tree, name), data)
            lines.write(f"{hashlib.sha256(data).hexdigest()}  {mount}/{name}\n")


def _write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def _sum(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
