"""A thousand hostile clients beside one that is verified: it is served as before, and the daemon's memory and descriptors are bounded."""

import collections
import json
import os
import re
import subprocess
import sys

import paths
from freestoned import MIB, free_port
from paths import die_with_parent

NQN = "nqn.2014-08.org.example:soak"
VMMS = 8
LEAST_ROUNDS, MOST_ROUNDS, SECONDS = 3, 20, 2
# The slowest of ten requests beside the hostile clients, in the best round, to that without them.
# These clients need a share of a core themselves, and delay a few requests in a hundred: the daemon has no part in that.
# Other work on the machine only adds to a round; clients that disturb the daemon add to every round.
MOST_SLOWDOWN = 2
MEMORY_MIB, MEMORY_SLACK_MIB = 256, 128
MOST_DESCRIPTORS = 1000


def a_thousand_hostile_clients_do_not_disturb_a_verified_one(subject):
    ports = {what: free_port() for what in ("nbd", "nvme", "api")}
    tokens = os.path.join(subject.scratch, "tokens")
    with open(os.open(tokens, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("admin soak soak-0123456789abcdef0123456789\n")
    daemon = subject.daemon("--cores", "0", "--memory", f"{MEMORY_MIB}M", "--listen", f"127.0.0.1:{ports['api']}", "--tokens", tokens)
    daemon.post("/v1/devices", {"name": "memory", "spec": f"mem:size={512 * MIB}"})
    _volume(daemon, "good", {"vhost-user-blk": {}, "nbd": {"listen": f"127.0.0.1:{ports['nbd']}"},
                             "nvme-tcp": {"listen": f"127.0.0.1:{ports['nvme']}", "nqn": NQN}})
    for number in range(VMMS):
        _volume(daemon, f"bad{number}", {"vhost-user-blk": {}})
    servers = {what: ["127.0.0.1", port] for what, port in ports.items()}
    servers["vhost"] = [daemon.path(f"bad{number}-vhost-user-blk.sock") for number in range(VMMS)]
    idle_mib, _ = _usage(daemon)
    quiet, hostile, seen, did = [], [], [], collections.Counter()
    for number in range(1, MOST_ROUNDS + 1):
        quiet.append(_verified_p90_us(daemon))
        with _Swarm(servers) as swarm:
            hostile.append(_verified_p90_us(daemon))
            _nbd_client_is_served(ports["nbd"])
            daemon.get("/v1/system")
            seen.append(_usage(daemon))
        did.update(swarm.did)
        is_undisturbed = min(hostile) <= MOST_SLOWDOWN * min(quiet)
        # On a busy machine a round may end before the slowest of the attacks has begun.
        has_attacked = did["memories truncated"] > 0 and did["handshakes"] > 0
        if is_undisturbed and has_attacked and number >= LEAST_ROUNDS:
            break
    memory_mib, descriptors = (max(values) for values in zip(*seen))
    assert is_undisturbed, f"quiet {quiet}, beside hostile clients {hostile}"
    assert memory_mib < idle_mib + MEMORY_MIB + MEMORY_SLACK_MIB, f"{idle_mib} MiB, then {memory_mib} MiB"
    assert descriptors < MOST_DESCRIPTORS, descriptors
    assert has_attacked, did
    return "\n".join([
        f"p90 of a verified client: {min(quiet):.0f} µs alone, {min(hostile):.0f} µs beside"
        f" {swarm.did['opened']} hostile ones, best of {len(quiet)} rounds",
        f"memory: {idle_mib} MiB before, at most {memory_mib} MiB beside them; at most {descriptors} descriptors",
        f"in all rounds: {dict(did)}"])


def _volume(daemon, name, exports):
    daemon.post("/v1/volumes", {"name": name, "backing": "memory", "size_bytes": 40 * MIB})
    for kind, options in exports.items():
        daemon.post("/v1/exports", {"name": f"{name}-{kind}", "kind": kind, "volumes": [name], "options": options})


def _bench(device, *options):
    done = subprocess.run([paths.FREESTONE, "bench", "--device", device, "--rw", "randrw", "--bs", "4K", "--verify", "--json", *options],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{device}: {done.stdout}{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def _verified_p90_us(daemon):
    # Paced, so that latencies are the daemon's and not those of a full queue.
    results = _bench(f"virtio-blk-vhost-user:path={daemon.path('good-vhost-user-blk.sock')}", "--qd", "1", "--think", "0.0005",
                     "--event", "--cores", "1", "--time", str(SECONDS), "--ramp", "0.2")
    ops = next(result["ops"] for result in results if "ops" in result)
    return max(op["latency_ns"]["p90"] for op in ops.values()) / 1000


def _nbd_client_is_served(port):
    """A client that comes while the hostile ones are there."""
    _bench(f"nbd:host=127.0.0.1,port={port}", "--qd", "4", "--time", "0.2", "--ramp", "0")


def _usage(daemon):
    """(resident MiB, open descriptors) of the daemon."""
    pid = daemon.process.pid
    with open(f"/proc/{pid}/status") as status:
        resident_kib = int(re.search(r"VmRSS:\s+(\d+)", status.read()).group(1))
    return resident_kib // 1024, len(os.listdir(f"/proc/{pid}/fd"))


class _Swarm:
    """The hostile clients, while this lasts; what they did in `did`."""

    def __init__(self, servers):
        program = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "swarm.py")
        self.process = subprocess.Popen([sys.executable, program, json.dumps(servers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, preexec_fn=die_with_parent)

    def __enter__(self):
        assert self.process.stdout.readline() == "ready\n", self.process.wait()
        return self

    def __exit__(self, *exc):
        said, _ = self.process.communicate(timeout=600)
        self.did = json.loads(said)
