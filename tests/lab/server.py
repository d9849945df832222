"""The server under test: `freestone serve` on an image file, exported as vhost-user-blk.

    with Server(image, queues=4, log=".../server.log") as server:
        ... server.socket ...
        server.kill()      # kill -9: nothing is told, nothing is flushed
        server.start()     # the same command again
        server.resized()   # SIGHUP: read the image's size again
        server.stop()      # SIGTERM: drain, flush, exit code 0

QemuStorageDaemon serves the same image with qemu-storage-daemon, to tell a fault of the lab from one of Freestone.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time

import paths
from qmp import Qmp
from paths import die_with_parent

READY_TIMEOUT_S = 20
STOP_TIMEOUT_S = 30


class ServerError(Exception):
    """The server did not start, ended on its own, or did not end when told to. Server.logs may say why."""


class Server:
    name = "freestone"
    environment = None  # the lab's own

    def __init__(self, image, queues=1, log="server.log", device_options="", export_options="", cores="0,1"):
        """device_options, export_options: more of --device and --export, as ",key=value"."""
        self.image, self.queues, self.log, self.cores = image, queues, log, cores
        self.device_options, self.export_options = device_options, export_options
        self.directory = tempfile.mkdtemp(prefix="lab-")
        self.socket = os.path.join(self.directory, "vhost.sock")
        self.process = None

    def device_option(self):
        """What is served."""
        return f"io_uring:path={self.image},direct=on{self.device_options}"

    def command(self):
        return [
            paths.FREESTONE, "serve",
            "--device", self.device_option(),
            "--export", f"vhost-user-blk:socket={self.socket},queues={self.queues}{self.export_options}",
            "--cores", self.cores,
        ]

    def __enter__(self):
        os.makedirs(os.path.dirname(self.log) or ".", exist_ok=True)
        open(self.log, "wb").close()
        self.start()
        return self

    def __exit__(self, *exc):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(self):
        """Start the server and return when it listens."""
        with open(self.log, "ab") as log:
            said_before = log.tell()
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                preexec_fn=die_with_parent)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._is_ready(said_before):
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} was not ready in {READY_TIMEOUT_S} s")
            time.sleep(0.02)

    def _is_ready(self, said_before):
        """Whether this process, whose words begin at byte said_before of the log, has printed its ready line."""
        with open(self.log, "rb") as log:
            log.seek(said_before)
            return any(line.startswith(b"ready") for line in log.read().split(b"\n")[:-1])

    def kill(self):
        """kill -9, by its own pid."""
        self.check_alive()
        self.process.kill()
        self.process.wait()

    def resized(self):
        self.process.send_signal(signal.SIGHUP)

    def stop(self):
        """SIGTERM; raises unless the server ends by itself with code 0."""
        self.check_alive()
        self.process.terminate()
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"{self.name} did not end within {STOP_TIMEOUT_S} s of SIGTERM") from None
        if code != 0:
            raise ServerError(f"{self.name} ended with code {code} after SIGTERM")

    def check_alive(self):
        code = self.process.poll()
        if code is not None:
            raise ServerError(f"{self.name} ended on its own with code {code}")

    def logs(self, lines=30):
        return f"--- {os.path.basename(self.log)}\n{paths.tail(self.log, lines)}\n"


class QemuStorageDaemon(Server):
    """No packed rings, no in-flight region (so no kill under load), no serial."""

    name = "qemu-storage-daemon"

    def command(self):
        read_only = "readonly=on" in self.device_options
        return [
            paths.QEMU_STORAGE_DAEMON,
            "--blockdev", f"driver=file,node-name=file,filename={self.image},cache.direct=on,discard=unmap"
            + (",read-only=on" if read_only else ""),
            "--blockdev", "driver=raw,node-name=disk,file=file,discard=unmap" + (",read-only=on" if read_only else ""),
            "--export", f"type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={self.socket},"
            f"num-queues={self.queues},writable={'off' if read_only else 'on'}",
            "--chardev", f"socket,id=qmp,path={self.directory}/qmp.sock,server=on,wait=off", "--monitor", "qmp",
        ]

    def resized(self):
        qmp = Qmp(os.path.join(self.directory, "qmp.sock"))
        qmp.run("block_resize", **{"node-name": "disk", "size": os.path.getsize(self.image)})
        qmp.close()

    def _is_ready(self, said_before):
        return os.path.exists(self.socket)
