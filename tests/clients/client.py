"""What a test of a libblkio program gets: trixie's programs on the library under test, servers, images.

A test is a function whose only parameter is `client`, in a file under cases/; its name is a sentence. Each program runs
with the dynamic linker's own log on: run() and Daemon check there, or in /proc, that it ran on the library under test
and on no other libblkio."""

import contextlib
import glob
import hashlib
import os
import random
import re
import socket
import subprocess
import tempfile
import time

import paths
from server import QemuStorageDaemon, Server
from paths import die_with_parent
from workload import REFUSED

HERE = os.path.dirname(os.path.abspath(__file__))
TRIXIE = os.path.join(paths.LAB, "trixie")
BIN = os.path.join(TRIXIE, "bin")
LIBRARIES = os.path.join(TRIXIE, "root", "usr", "lib", "x86_64-linux-gnu")
HEADERS = os.path.join(TRIXIE, "root", "usr", "include")
NBDKIT_PLUGIN = os.path.join(LIBRARIES, "nbdkit", "plugins", "nbdkit-blkio-plugin.so")
REFERENCE = os.path.join(LIBRARIES, "libblkio.so.1")
OURS = os.environ.get("LIBBLKIO", os.path.join(paths.REPO, "target", "release", "libblkio.so"))
# An fio that was built with its libblkio engine; Debian's is built without.
FIO = os.environ.get("LIBBLKIO_FIO", "")

MIB = 1 << 20
RUN_TIMEOUT_S = 120
READY_TIMEOUT_S = 20


class ClientError(Exception):
    """A program failed, ran out of time, or ran on another library."""


def prepare(library):
    subprocess.run([os.path.join(HERE, "setup")], check=True)
    paths.require_setup()
    paths.require_freestone()
    if library == "ours" and not os.path.exists(OURS):
        raise SystemExit(f"no library {OURS}: run `make build`, or name another in the variable LIBBLKIO")


class Client:
    def __init__(self, name, library):
        self.library_name = library
        self.library = os.path.realpath(REFERENCE if library == "reference" else OURS)
        self.directory = os.path.join(paths.LAB, "out", "clients", name)
        self._ends = contextlib.ExitStack()
        self._logs = []
        self.server = None
        # Sockets lie here too: a Unix socket's path has at most 107 bytes.
        self.scratch = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="client-"))
        self.blkio_dirs = {kind: self._directory_of(kind, path) for kind, path in
                           (("ours", OURS), ("reference", REFERENCE))}

    def run(self, program, *arguments, check=True, library=None, timeout_s=RUN_TIMEOUT_S, uses_blkio=True):
        """Run one of trixie's programs, or another by its path, to its end. Returns what it printed; raises unless it
        exits with 0 on the library under test. With check off, returns (exit code, output)."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as log:
            environment = self.environment(library) | {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": os.path.join(log, "ld")}
            try:
                done = subprocess.run(
                    self._command(program, arguments), env=environment, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, preexec_fn=die_with_parent)
            except subprocess.TimeoutExpired as error:
                said = (error.stdout or b"").decode(errors="replace")
                raise ClientError(f"out of time ({timeout_s} s): {program} {' '.join(arguments)}\n{said}") from None
            if uses_blkio:
                expected = os.path.join(self.blkio_dirs[library or self.library_name], "libblkio.so.1")
                used = _libraries_used(log)
                if used != {expected}:
                    raise ClientError(f"{program} ran on {used or 'no libblkio'}, not on {expected}\n{done.stdout.decode(errors='replace')}")
        output = done.stdout.decode(errors="replace")
        if not check:
            return done.returncode, output
        if done.returncode != 0:
            raise ClientError(f"exit code {done.returncode}: {program} {' '.join(arguments)}\n{output}")
        return output

    def start(self, program, *arguments, socket):
        """Start one of trixie's programs and return a Daemon when it listens at its socket."""
        return self.start_command(os.path.basename(program), self._command(program, arguments), socket)

    def start_command(self, name, command, socket):
        """Start another program, whose log has this name, and return a Daemon when it listens at its socket."""
        log = os.path.join(self.directory, f"{name}.log")
        os.makedirs(self.directory, exist_ok=True)
        daemon = Daemon(command, self.environment(), log, socket, self.library)
        self._logs.append(log)
        return self._ends.enter_context(daemon)

    def environment(self, library=None):
        return os.environ | {"BLKIO_DIR": self.blkio_dirs[library or self.library_name]}

    def path(self, name):
        """A new file's or socket's path; the file is removed at the end of the test."""
        return os.path.join(self.scratch, name)

    def image(self, name="disk.img", size_mib=64):
        """A new image without data."""
        path = self.path(name)
        with open(path, "wb") as file:
            file.truncate(size_mib * MIB)
        return path

    def image_with_data(self, name="source.img", size_mib=64):
        """A new image of random data, zeroes and holes, the same in each run."""
        generator = random.Random(size_mib)
        path = self.image(name, size_mib)
        with open(path, "r+b") as file:
            for start in range(0, size_mib, 4):
                file.seek(start * MIB)
                file.write(generator.randbytes(MIB + 512 * generator.randrange(2048)))
        return path

    def serve(self, image, server="freestone", queues=1):
        """Serve an image with a vhost-user-blk server that is not under test; returns its socket. The server itself is
        `self.server`."""
        kind = {"freestone": Server, "qemu-storage-daemon": QemuStorageDaemon}[server]
        log = os.path.join(self.directory, f"{server}.log")
        self._logs.append(log)
        self.server = self._ends.enter_context(kind(image, queues, log))
        return self.server.socket

    def serve_nbd(self, device, export="", tcp=False):
        """Serve a device (a --device, or an image's path) over NBD; returns the server, whose `uri` clients take.
        `export`: more of --export, as ",key=value"."""
        log = os.path.join(self.directory, "freestone.log")
        self._logs.append(log)
        self.server = self._ends.enter_context(NbdServer(device, log, export, tcp))
        return self.server

    def check_end(self):
        for log in self._logs:
            said = paths.tail(log, 10000)
            assert "panicked" not in said, f"{os.path.basename(log)} tells of a panic"
            assert REFUSED not in said, f"{os.path.basename(log)}: a server needs a system call that its sandbox does not know"

    def close(self):
        self._ends.close()

    def logs(self):
        return "".join(f"--- {os.path.basename(log)}\n{paths.tail(log)}\n" for log in self._logs)

    def _directory_of(self, kind, library):
        """A directory where the dynamic linker finds the library by its soname."""
        directory = os.path.join(self.scratch, kind)
        os.mkdir(directory)
        os.symlink(os.path.realpath(library), os.path.join(directory, "libblkio.so.1"))
        return directory

    def _command(self, program, arguments):
        command = [os.path.join(BIN, "run"), program] if "/" in program else [os.path.join(BIN, program)]
        return command + list(arguments)


class NbdServer(Server):
    """`freestone serve` with an NBD export."""

    def __init__(self, device, log, export="", tcp=False):
        super().__init__(device, log=log, export_options=export)
        self.device = device if ":" in device else f"io_uring:path={device}"
        self.socket = os.path.join(self.directory, "nbd.sock")
        self.port = _free_port() if tcp else None

    @property
    def uri(self):
        return f"nbd://127.0.0.1:{self.port}/disk" if self.port else f"nbd+unix:///disk?socket={self.socket}"

    def command(self):
        address = f"listen=127.0.0.1:{self.port}" if self.port else f"socket={self.socket}"
        return [paths.FREESTONE, "serve", "--device", f"{self.device},id=disk",
                "--export", f"nbd:{address}{self.export_options}", "--cores", self.cores]


def _free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Daemon:
    """A program that serves until it is told to end. Use it in a `with`."""

    def __init__(self, command, environment, log, socket, library):
        self.command, self.environment, self.log, self.socket, self.library = command, environment, log, socket, library
        self.process = None

    def __enter__(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, preexec_fn=die_with_parent)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not paths.is_listened_at(self.socket):
            if self.process.poll() is not None:
                raise ClientError(f"ended with code {self.process.returncode}: {' '.join(self.command)}\n{paths.tail(self.log)}")
            if time.monotonic() > deadline:
                self.__exit__()
                raise ClientError(f"not ready in {READY_TIMEOUT_S} s: {' '.join(self.command)}\n{paths.tail(self.log)}")
            time.sleep(0.02)
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def check_library(self):
        """Raises unless the process has the library under test mapped, and no other libblkio."""
        with open(f"/proc/{self.process.pid}/maps") as maps:
            mapped = {line.split()[-1] for line in maps if re.search(r"/libblkio[^/]*$", line.rstrip())}
        if mapped != {self.library}:
            raise ClientError(f"{self.command[0]} runs on {mapped or 'no libblkio'}, not on {self.library}")

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self):
        """SIGTERM; raises unless the program ends by itself with code 0."""
        self.process.terminate()
        try:
            code = self.process.wait(READY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ClientError(f"did not end within {READY_TIMEOUT_S} s of SIGTERM: {' '.join(self.command)}") from None
        if code != 0:
            raise ClientError(f"ended with code {code} after SIGTERM: {' '.join(self.command)}\n{paths.tail(self.log)}")


def _libraries_used(log):
    """The libblkio's of which the dynamic linker says that it initialised them."""
    used = set()
    for path in glob.glob(os.path.join(log, "ld.*")):
        with open(path, errors="replace") as file:
            used |= set(re.findall(r"calling init: (\S*/libblkio\.so\S*)", file.read()))
    return used


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def allocated_bytes(path):
    return os.stat(path).st_blocks * 512


def assert_bytes(path, parts):
    """Each part of the file, (offset, length, byte), is that byte throughout."""
    with open(path, "rb") as file:
        for offset, length, byte in parts:
            file.seek(offset)
            data = file.read(length)
            assert data == bytes([byte]) * length, f"{path}: not all {length} bytes from {offset} on are {byte:#x}"
