"""freestone-csi as a process, and its calls over gRPC."""

import os
import signal
import socket
import subprocess
import time

# Else gRPC stops its threads before each fork of this program, and now and then waits for them without an end.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import csi_pb2  # noqa: E402
import csi_pb2_grpc  # noqa: E402
import grpc  # noqa: E402
import paths  # noqa: E402
from paths import die_with_parent  # noqa: E402

FREESTONE_CSI = os.environ.get("FREESTONE_CSI", os.path.join(os.path.dirname(paths.FREESTONE), "freestone-csi"))
START_TIMEOUT_S = 60
CALL_TIMEOUT_S = 120  # of a call: it bounds failures alone
MIB = 1 << 20

WRITER = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
SINGLE_WRITER = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_SINGLE_WRITER
WRITERS = csi_pb2.VolumeCapability.AccessMode.MULTI_NODE_MULTI_WRITER


def mount(mode=WRITER, fs_type="ext4"):
    """A capability with a file system."""
    return csi_pb2.VolumeCapability(access_mode={"mode": mode}, mount={"fs_type": fs_type})


def block(mode=WRITER):
    """A capability without one."""
    return csi_pb2.VolumeCapability(access_mode={"mode": mode}, block={})


class CallError(Exception):
    """A call that the driver has refused: its code and message."""

    def __init__(self, name, error):
        self.code, self.message = error.code().name, error.details()
        super().__init__(f"{name}: {self.code}: {self.message}")


def channel_to(path):
    """A channel of its own to the socket of a process. The socket's path is no authority that HTTP/2 permits."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost")]
    return grpc.insecure_channel(f"unix:{path}", options=options)


def request(name):
    """The message of a call."""
    return getattr(csi_pb2, f"{name}Request")


def send(channel, name, message):
    """The answer of a call; raises CallError."""
    is_node = name.startswith("Node")
    is_identity = name in ("Probe", "GetPluginInfo", "GetPluginCapabilities")
    service = csi_pb2_grpc.NodeStub if is_node else csi_pb2_grpc.IdentityStub if is_identity else csi_pb2_grpc.ControllerStub
    try:
        return getattr(service(channel), name)(message, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        raise CallError(name, error) from None


def free_ports(count):
    """The first of so many ports in a row that were free a moment ago."""
    for first in range(20000 + os.getpid() % 1000 * 10, 60000, count):
        listeners = []
        try:
            for port in range(first, first + count):
                listener = socket.socket()
                listeners.append(listener)
                listener.bind(("127.0.0.1", port))
            return first
        except OSError:
            pass
        finally:
            for listener in listeners:
                listener.close()
    raise RuntimeError("no free ports")


def listens_at(daemon):
    """The address of a daemon that listens on TCP, HOST:PORT."""
    lines = daemon.wait_for("its address", lambda: [line for line in daemon.log().splitlines() if "listen" in line])
    port = lines[-1].split("127.0.0.1:")[1].split('"')[0].split()[0].strip(",")
    return f"127.0.0.1:{port}"


def write_private(path, text):
    """Write a file that only its owner can read, as files with secrets must be."""
    with open(path, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(text)


class Driver:
    """A driver whose socket, records and log lie in a directory."""

    def __init__(self, directory, backends, *arguments, node="fake"):
        self.directory, self.arguments, self.node_backend = directory, arguments, node
        os.makedirs(directory, exist_ok=True)
        self.socket = self.path("csi.sock")
        self.process = self.channel = None
        with open(self.path("backends.toml"), "w", encoding="utf-8") as file:
            file.write("\n".join(backends))

    @staticmethod
    def backend(daemon, name="rack1", more='backing = "data"', ports=16):
        """The entry of a daemon, whose exports listen on free ports."""
        first = free_ports(ports)
        listen = f"127.0.0.1:{first}-{first + ports - 1}"
        return f'[[backend]]\nname = "{name}"\nurl = "unix://{daemon.socket}"\nlisten = "{listen}"\n{more}\n'

    def path(self, name):
        return os.path.join(self.directory, name)

    def start(self):
        """Start it, and wait until it answers."""
        command = [FREESTONE_CSI, "--endpoint", f"unix://{self.socket}", "--backends", self.path("backends.toml"),
                   "--node-id", os.path.basename(self.directory), "--node-backend", self.node_backend,
                   "--state-dir", self.path("state"), "--log", "info,csi=debug", *self.arguments]
        with open(self.path("log"), "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, preexec_fn=die_with_parent)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self.socket) == 0:
                    break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"freestone-csi does not answer\n{self.log()}")
            time.sleep(0.01)
        self.channel = channel_to(self.socket)

    def kill(self):
        """kill -9."""
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def restart(self):
        """kill -9, and a start."""
        self.kill()
        self.start()

    def stop(self):
        """End it in good order."""
        if self.process and self.process.poll() is None:
            self.channel.close()
            self.process.send_signal(signal.SIGTERM)
            if self.process.wait(timeout=60) != 0:
                raise RuntimeError(f"freestone-csi ended with {self.process.returncode}\n{self.log()}")

    def close(self):
        if self.process and self.process.poll() is None:
            self.kill()

    def log(self):
        return paths.tail(self.path("log"), 40)

    def call(self, name, /, **fields):
        """The answer of a call, repeated while a job does its work; raises CallError."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                return self.once(name, **fields)
            except CallError as error:
                if error.code != "ABORTED" or "% done" not in error.message or time.monotonic() > deadline:
                    raise

    def once(self, name, /, **fields):
        """The answer of a call; raises CallError."""
        return send(self.channel, name, request(name)(**fields))

    def refusal(self, name, /, **fields):
        """The CallError of a call that is to fail."""
        try:
            answer = self.once(name, **fields)
        except CallError as error:
            return error
        raise AssertionError(f"{name} succeeds: {answer}")

    def create(self, name="pvc-1", size=64 * MIB, capability=None, **fields):
        """The identity of a new volume."""
        fields.setdefault("volume_capabilities", [capability or mount()])
        return self.call("CreateVolume", name=name, capacity_range={"required_bytes": size}, **fields).volume.volume_id

    def node(self, name="a"):
        """The identity of another node."""
        return f'{{"n":"{name}","q":"{self.host(name)}"}}'

    @staticmethod
    def host(name="a"):
        """The NQN of another node's host."""
        return f"nqn.2014-08.org.example:{name}"
