"""SPDK compared with Freestone, both with SPDK's initiators: vhost and NVMe/TCP targets, and arrays within a process.
docs/bench/spdk.md has the recipe of a build."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import raid
from network import MEMORY, NQN, free_port, host, listens
from servers import INITIATOR_CORE, SERVER_CORE, Server, as_cases, freestone, initiator, measure, output, vhost_user

OURS, SPDK = "freestone", "SPDK"
BLOCK = 512
CASES = [("randread", "4K", 1), ("randread", "4K", 32), ("randread", "4K", 128), ("randwrite", "4K", 32), ("read", "128K", 8)]
# Our device, and the call that makes SPDK's.
DISKS = {
    "null": ("null:size=16G", "bdev_null_create", 16 << 30),
    "memory": (MEMORY, "bdev_malloc_create", 1 << 30),
}
PROGRAMS = {name: f"{folder}/{name}" for folder, name in
            (("bin", "vhost"), ("bin", "nvmf_tgt"), ("bin", "spdk_nvme_perf"), ("examples", "bdevperf"))}
SERVER_MIB, INITIATOR_MIB, HUGE_PAGE_MIB = 1536, 512, 2
HUGE_PAGES = (SERVER_MIB + INITIATOR_MIB) // HUGE_PAGE_MIB
# The levels of the arrays that `raid-engine --peer` measures, and their members.
ARRAYS = {"RAID 0, 4 members": ("raid0", 4), "RAID 1, 2 copies": ("raid1", 2), "RAID 5, 4+1": ("raid5f", 5)}
STRIP_KIB = 64
# Members of ours hold metadata, too, which takes nothing from the load.
MEMBERS = {"null members": ("bdev_null_create", 4 << 30), "memory members": ("bdev_malloc_create", 128 << 20)}

TITLES = {
    "vhost_null": "Null device over vhost-user-blk, initiator `bdevperf`",
    "vhost_memory": "Disk in memory over vhost-user-blk, initiator `bdevperf`",
    "nvme_tcp_null": "Null device over NVMe/TCP, initiator `spdk_nvme_perf`",
    "nvme_tcp_memory": "Disk in memory over NVMe/TCP, initiator `spdk_nvme_perf`",
    "null members": "Arrays on null members",
    "memory members": "Arrays on members in memory",
}
NOTE = (
    "[spdk.md](spdk.md) has the recipe of the build, which is static and uses huge pages.\n"
    "Both targets are measured with SPDK's initiator, which polls; both run on core 0 and have one queue.\n"
    "Arrays have no export: `bdevperf` is the load on SPDK's, and the program `raid-engine` on Freestone's, with the same sizes and depths on core 0.\n"
    "Freestone's RAID 1 and RAID 5 keep a write-intent bitmap; SPDK's keep nothing that shortens a resync.\n"
    "SPDK's RAID 5 takes writes of whole stripes only, so no others are compared.")


class Build:
    """A build of SPDK: the folder that its Makefile calls `build`."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        missing = [path for path in PROGRAMS.values() if not os.access(self.folder / path, os.X_OK)]
        if missing:
            raise SystemExit(f"bench: {folder}: no {', '.join(missing)}: docs/bench/spdk.md has the recipe")
        rows = dict(line.split(":", 1) for line in open("/proc/meminfo", encoding="utf-8"))
        free = int(rows["HugePages_Free"])
        if free < HUGE_PAGES or int(rows["Hugepagesize"].split()[0]) != HUGE_PAGE_MIB << 10:
            raise SystemExit(f"bench: SPDK needs {HUGE_PAGES} free huge pages of {HUGE_PAGE_MIB} MiB, {free} are free: docs/bench/spdk.md")
        said = output([self.path("vhost"), "--version"], 0)
        self.version = re.search(r"v[\d.]+\S*", said).group(0)

    def path(self, program):
        return str(self.folder / PROGRAMS[program])

    def server(self, program, name, socket, config, *options, is_ready=None):
        argv = [self.path(program), *options, "-m", hex(1 << SERVER_CORE), "-s", str(SERVER_MIB), "-g", "-r", f"{socket}.rpc",
                "-c", _write_config(f"{socket}.json", config)]
        return Server(name, argv, socket, is_ready)

    def bdevperf(self, config, case, seconds, core=INITIATOR_CORE, memory_mib=INITIATOR_MIB):
        """IOPS of bdevperf. Its memory is one file, since the initiator passes at most 8 to a vhost-user server."""
        rw, block_size, depth = case
        return _rate([self.path("bdevperf"), "-c", config, "-m", hex(1 << core), "-s", str(memory_mib), "-g", "-w", rw, "-o",
                      str(_bytes(block_size)), "-q", str(depth), "-t", str(_whole(seconds))], seconds)

    def nvme_perf(self, port, rw, block_size, depth, seconds):
        """IOPS of spdk_nvme_perf with one queue."""
        where = f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{port} subnqn:{NQN} hostnqn:{NQN}-host"
        return _rate([self.path("spdk_nvme_perf"), "-r", where, "-c", hex(1 << INITIATOR_CORE), "-s", str(INITIATOR_MIB), "-P", "1",
                      "-w", rw, "-o", str(_bytes(block_size)), "-q", str(depth), "-t", str(_whole(seconds))], seconds)


def measure_spdk(repo, folder, rounds, seconds):
    """{table: cases}, and the version of SPDK."""
    build = Build(folder)
    found = {"version": build.version}
    for disk in DISKS:
        found[f"vhost_{disk}"] = as_cases(_vhost(build, disk, rounds, seconds))
    for disk in DISKS:
        found[f"nvme_tcp_{disk}"] = as_cases(_nvme_tcp(build, disk, rounds, seconds))
    return found | _arrays(build, repo, rounds, seconds)


def _vhost(build, disk, rounds, seconds):
    device, *theirs = DISKS[disk]

    def spdk(name, socket):
        folder, controller = os.path.split(socket)
        config = {"bdev": [_bdev("disk", *theirs)],
                  "vhost_blk": [("vhost_create_blk_controller", {"ctrlr": controller, "dev_name": "disk"})]}
        return build.server("vhost", name, socket, config, "-S", folder)

    def run(socket, *case):
        attach = {"name": "disk", "trtype": "user", "traddr": socket, "dev_type": "blk", "vq_count": 1}
        # An examination for partitions would hold the only queue for a while.
        calls = [("bdev_set_options", {"bdev_auto_examine": False}), ("bdev_virtio_attach_controller", attach)]
        config = _write_config(f"{socket}.initiator.json", {"bdev": calls})
        return build.bdevperf(config, case, seconds)

    ours = _filled(vhost_user(device), lambda socket: f"virtio-blk-vhost-user:path={socket}") if disk == "memory" else vhost_user(device)
    return measure({OURS: ours, SPDK: spdk}, CASES, rounds, run)


def _nvme_tcp(build, disk, rounds, seconds):
    device, *theirs = DISKS[disk]
    ports = {}

    def ours(name, socket):
        port = ports[socket] = free_port()
        return freestone(name, device, f"nvme-tcp:listen=127.0.0.1:{port},nqn={NQN}", socket, is_ready=lambda: listens(port))

    def spdk(name, socket):
        port = ports[socket] = free_port()
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
        config = {"bdev": [_bdev("disk", *theirs)],
                  "nvmf": [("nvmf_create_transport", {"trtype": "TCP"}),
                           ("nvmf_create_subsystem", {"nqn": NQN, "allow_any_host": True}),
                           ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "disk"}}),
                           ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address})]}
        return build.server("nvmf_tgt", name, socket, config, is_ready=lambda: listens(port))

    filled = _filled(ours, lambda socket: host(ports[socket])) if disk == "memory" else ours
    return measure({OURS: filled, SPDK: spdk}, CASES, rounds, lambda socket, *case: build.nvme_perf(ports[socket], *case, seconds))


def _arrays(build, repo, rounds, seconds):
    """{table: cases} of arrays in one process."""
    argv = [str(repo / "target" / "release" / "raid-engine"), "--peer", "--seconds", str(seconds)]
    names = [case["name"] for case in raid.run([*argv, "--rounds", "0"])]
    found = {table: {} for table in MEMBERS}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):
            for name in names:
                ours = raid.run([*argv, "--rounds", "1", "--only", name])[0]
                level, count = ARRAYS[ours["array"]]
                members = [f"m{i}" for i in range(count)]
                array = {"name": "array", "raid_level": level, "base_bdevs": members} | (
                    {} if level == "raid1" else {"strip_size_kb": STRIP_KIB})
                bdevs = [*(_bdev(member, *MEMBERS[ours["table"]]) for member in members), ("bdev_raid_create", array)]
                config = _write_config(os.path.join(directory, "array.json"), {"bdev": bdevs})
                case = (f"rand{ours['op']}", f"{ours['len'] >> 10}K", ours["depth"])
                theirs = build.bdevperf(config, case, seconds, SERVER_CORE, SERVER_MIB)
                rw, block_size, depth = case
                by_server = found[ours["table"]].setdefault((f"{ours['array']}: {rw}", block_size, depth), {OURS: [], SPDK: []})
                by_server[OURS] += ours["rounds"]
                by_server[SPDK].append(theirs)
            print(f"  round {number + 1} of {rounds} done", file=sys.stderr)
    return {table: as_cases(results) for table, results in found.items()}


def report(results, run, table):
    """`table`: the function that makes one of cases."""
    parts = ["## SPDK", f"{run}\nThe version of SPDK is {results['version']}.", NOTE]
    for name, title in TITLES.items():
        parts += [f"### {title}", table(results[name])]
    return parts


def _filled(start, device):
    """Starts our server and writes its whole disk: memory that was never written costs nothing to read. SPDK writes its disk
    when it makes it."""
    def start_and_fill(name, socket):
        server = start(name, socket)
        initiator(device(socket), "write", "1M", 4, 1)
        return server
    return start_and_fill


def _bdev(name, method, size):
    return method, {"name": name, "num_blocks": size // BLOCK, "block_size": BLOCK}


def _write_config(path, subsystems):
    """Writes the calls that an SPDK program makes at its start: {subsystem: [(call, parameters)]}. Returns the path."""
    calls = [{"subsystem": name, "config": [{"method": method, "params": params} for method, params in config]}
             for name, config in subsystems.items()]
    pathlib.Path(path).write_text(json.dumps({"subsystems": calls}), encoding="utf-8")
    return path


def _bytes(block_size):
    return int(block_size.removesuffix("K")) << 10


def _whole(seconds):
    """SPDK's programs take whole seconds only."""
    return max(1, round(seconds))


def _rate(argv, seconds):
    """IOPS in the line of the total that SPDK's programs print last."""
    return float(re.findall(r"^\W*Total\s*:\s+([\d.]+)", output(argv, _whole(seconds)), re.MULTILINE)[-1])
