"""What checks of `data-plane=kernel` share: programs of ours, the state of the plane, and a load.

A check is a program that is called with FREESTONE FREESTONED [CASE…]. It needs the modules vhost_blk and null_blk
(nr_devices=0)."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

from vhost_ring import IN, OK, OUT, UNSET, Request
from vhost_user_front import eventually

FREESTONE, FREESTONED, *WORDS = sys.argv[1:]
LONGEST_S = 120


def noise(size, seed=1):
    return random.Random(seed).randbytes(size)


class Program:
    """A program of ours that runs until it is killed or stopped. Its output is in /run/NAME.out."""

    count = 0

    def __init__(self, *command):
        Program.count += 1
        self.log, self.command = f"/run/data-plane-{Program.count}.out", [str(word) for word in command]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def files(self, path):
        """How often the program has a file open."""
        directory, opened = f"/proc/{self.process.pid}/fd", 0
        for number in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened += os.readlink(f"{directory}/{number}") == path
        return opened

    def output(self):
        with open(self.log) as log:
            return log.read()

    def has_said(self, word):
        return any(line.startswith(word) for line in self.output().splitlines())

    def wait_for(self, word):
        """Wait for a line that begins so."""
        deadline = time.monotonic() + LONGEST_S
        while not self.has_said(word):
            assert self.process.poll() is None, f"{self.command} ended:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {word!r}:\n{self.output()}"
            time.sleep(0.01)
        return self

    def kill(self):
        self.process.kill()

    def reap(self):
        return self.process.wait(LONGEST_S)

    def stop(self):
        """SIGTERM; the program must end by itself, without an error."""
        self.process.send_signal(signal.SIGTERM)
        code = self.reap()
        assert code == 0 and "panicked" not in self.output(), f"code {code}:\n{self.output()}"

    def counts(self, name):
        """A counter of the only export."""
        before = self.output().count("stats of export")
        self.process.send_signal(signal.SIGUSR1)
        eventually("the counters", lambda: "  connected" in self.output().split("stats of export")[-1]
                   and self.output().count("stats of export") > before)
        lines = self.output().split("stats of export")[-1].splitlines()
        return int(next(line.split()[1] for line in lines if line.split()[:1] == [name]))


def socket_path():
    return f"/run/data-plane-{os.getpid()}.sock"


def serve(disk, plane="kernel", device="", export="", queues=1, layers=()):
    """Start a server of a disk, which may not be ready yet."""
    layered = [word for layer in layers for word in ("--layer", layer)]
    return Program(FREESTONE, "serve", "--device", f"io_uring:path={disk},direct=on{device}", *layered, "--export",
                   f"vhost-user-blk:socket={socket_path()},queues={queues},data-plane={plane},serial=lab{export}")


def freestone(control, *words):
    """What `freestone` says about the daemon with that socket."""
    said = subprocess.run([FREESTONE, *words, "--socket", control], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=LONGEST_S)
    assert said.returncode == 0, f"{words}: {said.stdout}"
    return said.stdout


def is_in_kernel():
    """Whether any process has an instance of /dev/vhost-blk."""
    with open("/sys/module/vhost_blk/refcnt") as file:
        return int(file.read()) != 0


def claim(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL))
        return "free"
    except OSError as error:
        return os.strerror(error.errno) if error.errno != 16 else "EBUSY"


def stop(server, front):
    """End a front end, then its server, which ends by itself."""
    front.close()
    server.stop()
    assert not is_in_kernel(), "an instance is left behind"


class Load:
    """Requests that are all in flight, all the time. Each completion is checked to be the only one of its request."""

    def __init__(self, memory, ring, count=32):
        self.memory, self.ring, self.requests = memory, ring, {}
        for i in range(count):
            written = noise(4096, i) if i % 2 else b""
            request = Request(ring, OUT if written else IN, 16 * i, written, size=0 if written else 4096, skew=i % 3)
            self.requests[request.head] = request
        self.chains = dict(ring.chains)
        self.offered, self.completed = dict.fromkeys(self.requests, 0), dict.fromkeys(self.requests, 0)

    def take(self):
        for head, _ in self.ring.take():
            self.completed[head] += 1
            assert self.completed[head] == self.offered[head], f"head {head} was completed twice"
            assert self.requests[head].result() == OK, f"request {head} failed: {self.requests[head].result()}"

    def offer(self):
        idle = [head for head in self.requests if self.completed[head] == self.offered[head]]
        for head in idle:
            self.memory.write(self.requests[head].status, bytes([UNSET]))
            self.offered[head] += 1
            self.ring.chains[head] = self.chains[head]
        self.ring.offer(*idle)
        self.ring.notify()

    def feed(self, more):
        """Keep all requests in flight until so many more are complete."""
        until, deadline = sum(self.completed.values()) + more, time.monotonic() + LONGEST_S
        while sum(self.completed.values()) < until:
            assert time.monotonic() < deadline, f"the ring is not served: {self.ring.used_index()} of {self.ring.next}"
            self.take()
            self.offer()
            self.ring.has_risen(self.ring.call, 0.01)

    def finish(self):
        """Wait for those in flight."""
        deadline = time.monotonic() + LONGEST_S
        while self.completed != self.offered:
            assert time.monotonic() < deadline, f"requests are lost: {self.ring.used_index()} of {self.ring.next}"
            self.take()
            self.ring.has_risen(self.ring.call, 0.01)


def export_of_daemon(disk, directory, queues=1):
    """Start `freestoned`, which exports a disk as "vm". Returns it and the path of its control socket."""
    control = f"{directory}/d.sock"
    daemon = Program(FREESTONED, "--state-dir", f"{directory}/state", "--socket", control,
                     "--sandbox-path", os.path.dirname(socket_path()))
    freestone(control, "status", "--wait")
    freestone(control, "device", "create", "disk", f"io_uring:path={disk},direct=on")
    freestone(control, "export", "create", "vm", "--kind", "vhost-user-blk", "--device", "disk",
              "-o", f"socket={socket_path()}", "-o", f"queues={queues}", "-o", "data-plane=auto")
    return daemon, control


def switch_under_load(control, disk, *loads):
    """Switch the export of a daemon twelve times while each load has requests in flight."""
    for number in range(12):
        plane = ("kernel", "user", "auto", "user")[number % 4]
        for load in loads:
            load.feed(40)
        said = freestone(control, "export", "data-plane", "vm", plane)
        assert f"data-plane={plane}" in said, said
        assert is_in_kernel() == (plane != "user")
        assert claim(disk) == "EBUSY"
    for load in loads:
        load.feed(40)


def run_cases(cases):
    """A case is a function whose name is a sentence. Prints the seconds of each."""
    for case in cases:
        if not WORDS or case.__name__ in WORDS:
            started = time.monotonic()
            case()
            print(f"{case.__name__} ({time.monotonic() - started:.1f} s)", flush=True)
