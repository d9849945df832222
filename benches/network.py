"""NBD and NVMe/TCP on this host: our servers beside others, with the same client for all."""

import os
import socket as so
import tempfile

import paths
from servers import Server, as_cases, fio, freestone, initiator, measure

MEMORY = "mem:size=1G"
MIB = 1 << 20
CASES = [("randread", "4K", 1), ("randread", "4K", 32), ("randwrite", "4K", 32), ("read", "128K", 8), ("write", "128K", 8)]
NQN = "nqn.2014-08.org.example:bench"
DIGESTS = {"off": "freestone", "on": "freestone, header and data digests"}


def measure_nbd(rounds, seconds):
    """{"bench": cases, "fio": cases}: with our client and with fio's (libnbd)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        image = os.path.join(directory, "disk.img")
        with open(image, "wb") as file:
            file.truncate(1024 * MIB)
        qemu = [paths.QEMU_STORAGE_DAEMON, "--blockdev", f"node-name=d,driver=file,filename={image},cache.direct=off,aio=threads"]
        servers = {
            "freestone": lambda n, s: freestone(n, MEMORY, f"nbd:socket={s}", s),
            "nbdkit memory": lambda n, s: Server(n, ["nbdkit", "--foreground", "--unix", s, "memory", "1G"], s),
            "qemu-storage-daemon": lambda n, s: Server(n, [*qemu, "--nbd-server", f"addr.type=unix,addr.path={s}",
                                                           "--export", "type=nbd,id=e,node-name=d,name=,writable=on"], s),
        }
        clients = {
            "bench": lambda s, *case: initiator(f"nbd:path={s},connections=1", *case, seconds),
            "fio": lambda s, *case: fio(*case, seconds, "--ioengine=nbd", f"--uri=nbd+unix:///?socket={s}"),
        }
        return {client: as_cases(measure({name: _filled(start) for name, start in servers.items()}, CASES, rounds, run))
                for client, run in clients.items()}


def _filled(start):
    """Starts the server and writes its whole disk: memory that was never written costs nothing to read."""
    def start_and_fill(name, socket):
        server = start(name, socket)
        initiator(f"nbd:path={socket},connections=1", "write", "1M", 4, 1)
        return server
    return start_and_fill


def measure_nvme_tcp(rounds, seconds):
    """Our initiator on our target over the loopback interface, without digests and with both."""
    ports = {}

    def target(name, socket):
        port = ports[socket] = free_port()
        server = freestone(name, MEMORY, f"nvme-tcp:listen=127.0.0.1:{port},nqn={NQN}", socket, is_ready=lambda: listens(port))
        initiator(host(port), "write", "1M", 4, 1)
        return server

    found = {}
    for digests, name in DIGESTS.items():
        results = measure({name: target}, CASES, rounds, lambda s, *case, d=digests: initiator(host(ports[s], d), *case, seconds))
        for case, by_server in results.items():
            found.setdefault(case, {}).update(by_server)
    return as_cases(found)


def host(port, digests="off"):
    """Our initiator's device at a target on a port of this host."""
    return f"nvme-tcp:address=127.0.0.1:{port},nqn={NQN},hdgst={digests},ddgst={digests}"


def free_port():
    """No other process takes a port that was given out a moment ago."""
    with so.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def listens(port):
    with so.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
