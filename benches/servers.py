"""What runs in a measurement: servers on core 0, initiators on core 1, rounds."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import paths

SERVER_CORE, INITIATOR_CORE = 0, 1
RAMP_S = 0.3


class Server:
    """A server on core 0, ended by its own pid. It is ready when its socket is there, or when `is_ready` says so."""

    def __init__(self, name, argv, socket, is_ready=None):
        self.name, self.socket = name, socket
        is_ready = is_ready or (lambda: os.path.exists(socket))
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            ["taskset", "-c", str(SERVER_CORE), *argv], stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                self.log.seek(0)
                raise SystemExit(f"bench: {name} did not start:\n{self.log.read().decode(errors='replace')}")
            time.sleep(0.02)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def freestone(name, device, export, socket, is_ready=None):
    return Server(name, [paths.FREESTONE, "serve", "--device", device, "--cores", str(SERVER_CORE), "--export", export],
                  socket, is_ready)


def vhost_user(device):
    """A function that starts our server of a device."""
    return lambda name, socket: freestone(name, device, f"vhost-user-blk:socket={socket},queues=1", socket)


def initiator(device, rw, block_size, depth, seconds, *options, cores=INITIATOR_CORE, queues=1):
    """IOPS of `freestone bench`, on core 1 unless told otherwise."""
    argv = [paths.FREESTONE, "bench", "--json", "--device", device, "--rw", rw, "--bs", block_size, "--qd", str(depth),
            "--time", str(seconds), "--ramp", str(RAMP_S), "--cores", str(cores), "--queues", str(queues), "--force", *options]
    return float(json.loads(output(argv, seconds).strip().splitlines()[-1])["iops"])


def fio(rw, block_size, depth, seconds, *options):
    """IOPS of fio on core 1."""
    argv = [paths.FIO, "--name=peer", f"--rw={rw}", f"--bs={block_size}", f"--iodepth={depth}", f"--runtime={seconds}",
            "--time_based", f"--ramp_time={RAMP_S}", "--output-format=json", "--norandommap", "--randrepeat=0",
            f"--cpus_allowed={INITIATOR_CORE}", *options]
    job = fio_job(output(argv, seconds))
    return float(job["read"]["iops"] + job["write"]["iops"])


def fio_job(output):
    """The one job of fio's JSON output (warnings may stand before it)."""
    return json.loads(output[output.index("{"):])["jobs"][0]


def output(argv, seconds):
    """Standard output of a program that runs for about so many seconds and must succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60)
    if done.returncode != 0:
        raise SystemExit(f"bench: {' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def measure(servers, cases, rounds, run, peers=()):
    """{case: {server: [IOPS of each round]}}. `servers`: name -> function(name, socket) that starts one;
    `run(socket, *case)`: its IOPS. Each round measures every server once, so that a drift of the machine hits them
    alike. `peers`: (name, function of a case) of what has no server."""
    results = {case: {} for case in cases}
    with tempfile.TemporaryDirectory() as directory:
        for round_number in range(rounds):
            for name, start in servers.items():
                socket = os.path.join(directory, f"{round_number}-{len(os.listdir(directory))}.sock")
                with start(name, socket):
                    for case in cases:
                        results[case].setdefault(name, []).append(run(socket, *case))
            for name, run_peer in peers:
                for case in cases:
                    results[case].setdefault(name, []).append(run_peer(*case))
            print(f"  round {round_number + 1} of {rounds} done", file=sys.stderr)
    return results


def fill(path, mib):
    """Writes a file of random bytes."""
    with open(path, "wb") as file:
        for _ in range(mib):
            file.write(os.urandom(1 << 20))


def as_cases(results):
    """What `measure` found, as it is kept: a list that JSON can hold."""
    return [{"rw": rw, "bs": bs, "qd": qd, "iops": by_server} for (rw, bs, qd), by_server in results.items()]
