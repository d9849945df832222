"""freestoned as a process: its API over its socket, and the program freestone that speaks to it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time

import paths
from paths import die_with_parent
from workload import REFUSED

START_TIMEOUT_S = 60  # without an answer
STEP_TIMEOUT_S = 1200  # of a step of its start that reports no progress: making an array on a slow disk
MIB = 1 << 20


class DaemonError(Exception):
    """The daemon did not start, died, or refused what a test needs."""


class Refused(DaemonError):
    """The daemon refused a request: status, type and detail of its problem."""

    def __init__(self, status, problem):
        super().__init__(f"{status} {problem.get('type')}: {problem.get('detail')}")
        self.status, self.type, self.detail = status, problem.get("type"), problem.get("detail")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("freestoned", timeout=120)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def free_port():
    """A TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Freestoned:
    """A daemon whose state, sockets and log lie in a directory."""

    def __init__(self, directory, *arguments):
        self.directory, self.arguments = directory, arguments
        os.makedirs(directory, exist_ok=True)
        self.socket, self.state = self.path("d.sock"), self.path("state")
        self.process, self.program = None, paths.FREESTONED
        # What starts it, what it inherits, and what else its environment has.
        self.prefix, self.inherited, self.more_environment = [], (), {}

    def path(self, name):
        return os.path.join(self.directory, name)

    def start(self, wait=True, tell=lambda start: None):
        """Start it; returns the seconds until it was ready. However long its configuration takes, it makes progress: each
        is told."""
        began = time.monotonic()
        with open(self.path("freestoned.log"), "ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, self.program, "--state-dir", self.state, "--socket", self.socket,
                 "--sandbox-path", self.directory, *self.arguments],
                stdin=subprocess.DEVNULL, stderr=log, env=self.environment() | self.more_environment,
                pass_fds=self.inherited, preexec_fn=die_with_parent)
        if wait:
            self._wait_until_ready(tell)
        return time.monotonic() - began

    def _wait_until_ready(self, tell):
        deadline, before, trouble = time.monotonic() + START_TIMEOUT_S, None, "does not answer"
        while True:
            try:
                system = self.get("/v1/system")
                if system["state"] == "ready":
                    return
                if system["start"] != before:
                    deadline, before, trouble = time.monotonic() + STEP_TIMEOUT_S, system["start"], f"no progress: {system}"
                    tell(before)
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise DaemonError(f"freestoned {trouble}\n{self.log()}")
            time.sleep(0.005 if before is None else 0.1)

    def environment(self):
        return os.environ | {"XDG_RUNTIME_DIR": self.directory, "FREESTONE_SOCKET": self.socket}

    def kill(self):
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        """End it in good order."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            if self.process.wait(timeout=60) != 0:
                raise DaemonError(f"freestoned ended with {self.process.returncode}\n{self.log()}")
            with open(self.path("freestoned.log"), encoding="utf-8", errors="replace") as log:
                for line in log:
                    if REFUSED in line:
                        raise DaemonError(f"freestoned needs a system call that its sandbox does not know: {line}")

    def close(self):
        if self.process and self.process.poll() is None:
            self.kill()

    def log(self):
        return paths.tail(self.path("freestoned.log"), 40)

    def request(self, method, path, body=None, headers=None):
        """(status, headers, parsed body) of an answer."""
        connection = _Connection(self.socket)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.headers.get_content_type()
            parsed = json.loads(text) if kind.endswith("json") else text.decode()
            return answer.status, answer.headers, parsed
        finally:
            connection.close()

    def ask(self, method, path, body=None):
        status, _, answer = self.request(method, path, body)
        if status >= 300:
            raise Refused(status, answer)
        return answer

    def get(self, path):
        return self.ask("GET", path)

    def post(self, path, body):
        return self.ask("POST", path, body)

    def patch(self, path, body):
        return self.ask("PATCH", path, body)

    def delete(self, path):
        return self.ask("DELETE", path)

    def cli(self, *arguments, check=True, env=None):
        """What the program freestone prints; with check off, (exit code, standard output, standard error)."""
        done = subprocess.run([paths.FREESTONE, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=120, env=self.environment() | (env or {}), cwd=self.directory)
        if not check:
            return done.returncode, done.stdout, done.stderr
        if done.returncode != 0:
            raise DaemonError(f"freestone {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def file(self, name, size):
        path = self.path(name)
        with open(path, "wb") as file:
            file.truncate(size)
        return path

    def wait_for(self, what, holds, timeout_s=60):
        """Wait until holds() is true; returns what it is."""
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            if time.monotonic() > deadline:
                raise DaemonError(f"{what}: not within {timeout_s} s\n{self.log()}")
            time.sleep(0.1)
        return found


class GuestDaemon:
    """freestoned in a guest, and the program freestone beside it."""

    DIRECTORY = "/run/freestone"

    def __init__(self, guest, *arguments):
        self.guest, self.job = guest, None
        self.socket = f"{self.DIRECTORY}/d.sock"
        self.command = f"{paths.FREESTONED} --state-dir {self.DIRECTORY}/state --socket {self.socket} {' '.join(arguments)}"

    def start(self):
        self.job = self.guest.start(
            "daemon", f"mkdir -p {self.DIRECTORY}; rm -f {self.socket}; echo $BASHPID >/run/daemon.pid; exec {self.command}")
        self.guest.sh(f"{paths.FREESTONE} status --socket {self.socket} --wait || {{ cat /run/daemon.out; exit 1; }}")

    def end(self, name="TERM"):
        """Send it this signal and wait until it is gone, in good order unless it is KILL. Returns its log."""
        self.guest.sh(f"kill -{name} $(cat /run/daemon.pid); while kill -0 $(cat /run/daemon.pid); do sleep 0.05; done 2>/dev/null")
        return "" if name == "KILL" else self.job.wait()

    def cli(self, words, check=True):
        """What `freestone` prints; with check off, (exit code, output)."""
        return self.guest.sh(f"FREESTONE_SOCKET={self.socket} {paths.FREESTONE} {words} 2>&1", check=check)
