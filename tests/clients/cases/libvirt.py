"""libvirt of Debian 12 accepts the XML that Freestone prints, and QEMU runs the command line that libvirt makes of it.

The XML of each export becomes part of a small domain. libvirt's schema validates the domain, libvirt turns it into a command
line of QEMU, and QEMU starts with that line and connects to the export. No libvirtd runs: virsh loads libvirt's driver for
QEMU itself (qemu:///embed), and the lab's QEMU emulates the processor."""

import contextlib
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import paths
from client import BIN as TRIXIE_BIN
from client import MIB
from freestoned import Freestoned, free_port
from paths import die_with_parent
from qmp import Qmp
from runner import Skipped
from server import Server

BIN = os.path.join(paths.LAB, "bookworm", "bin")
SHARE = os.path.join(paths.LAB, "bookworm", "root", "usr", "share", "libvirt")
TIMEOUT_S = 60
QUEUES = 4
VOLUME_MIB = 8
HAS_UBLK = os.path.exists("/dev/ublk-control")
# Where in a domain the lines belong that are printed under these names.
IN_DOMAIN, IN_DEVICES = "libvirt-domain", ("libvirt-disk", "libvirt-filesystem")
# A shell's script: runs a command where libvirt's driver for QEMU finds its tables of processors ($0) and a user libvirt-qemu,
# whose number is root's, and where it writes to /run.
NAMESPACE = """
    mount -t tmpfs none /run
    for file in passwd group; do
        { cat /etc/$file; echo libvirt-qemu:x:0:0::/:/bin/false; } >/run/$file
        mount --bind /run/$file /etc/$file
    done
    mount -t tmpfs none /usr/share
    mkdir /usr/share/libvirt
    mount --bind "$0" /usr/share/libvirt
    exec "$@"
"""
# Part of paths and of a name: XML, QEMU's options and the shell read each of these characters in their own way.
SPECIAL = "it's a&b, <c>"


def libvirts_schema_accepts_the_printed_lines_where_they_belong_and_nowhere_else(client):
    with _exports(client) as exports:
        for export in exports:
            code, said = _validate(client, _domain(export.name, export.lines))
            assert code == 0, f"{export.name}: {said}"
            for program in export.lines:
                code, said = _validate(client, _domain(export.name, export.lines, misplaced=program))
                assert code == 3 and "fails to validate" in said, f"{export.name}, misplaced {program}: {code} {said}"


def qemu_connects_to_each_export_with_the_options_that_libvirt_makes(client):
    with _exports(client) as exports:
        shared = [export for export in exports if IN_DOMAIN in export.lines]
        domains = {export.name: _domain(export.name, export.lines) for export in exports}
        for export in shared:
            lines = {program: line for program, line in export.lines.items() if program != IN_DOMAIN}
            domains[f"{export.name}-alone"] = _domain(export.name, lines)
        commands, said = _commands(client, domains)
        assert set(commands) == {export.name for export in exports}, said
        assert said.count("requires shared memory") == len(shared) > 0, said
        for export in exports:
            device = export.check_command(commands[export.name])
            with _qemu(client, export.name, commands[export.name]) as qmp:
                export.check_connected(qmp, device)
            export.check_disconnected()
        return "exports: " + ", ".join(export.name for export in exports)


class Command:
    """A command line of QEMU, as libvirt prints it: variables of the environment come first."""

    def __init__(self, line):
        words = shlex.split(line)
        self.argv = words[words.index(paths.QEMU):]

    def only(self, option, **wanted):
        """The only option of this name that has these values, parsed."""
        values = [_parsed(value) for name, value in zip(self.argv, self.argv[1:]) if name == option]
        found = [value for value in values if all(value.get(key) == text for key, text in wanted.items())]
        assert len(found) == 1, f"{len(found)} options {option} have {wanted}, want 1: {shlex.join(self.argv)}"
        return found[0]


def _parsed(value):
    """An option as a dictionary: JSON, or KEY=VALUE,… in which a comma of a value is doubled, after a first word."""
    if value.startswith("{"):
        return json.loads(value)
    first, *others = value.replace(",,", "\0").split(",")
    pairs = [word.replace("\0", ",").split("=", 1) for word in others]
    return {"": first} | dict(pairs)


@dataclasses.dataclass
class Export:
    """The lines for libvirt that Freestone prints for an export, and its checks: of QEMU's command line, which returns the
    device, of a QEMU that runs, and of the end of QEMU."""

    name: str
    lines: dict
    check_command: Callable
    check_connected: Callable
    check_disconnected: Callable


@contextlib.contextmanager
def _exports(client):
    """Exports of each kind that has lines for libvirt."""
    daemon = Freestoned(os.path.join(client.scratch, "daemon"))
    with contextlib.closing(daemon), FsServer(client) as fs_server:
        daemon.start()
        daemon.post("/v1/devices", {"name": "data", "spec": daemon.file("disk", 256 * MIB)})
        yield [
            _vhost_user_blk(daemon, "blk"),
            _vhost_user_blk(daemon, "blk-read-only", read_only=True),
            _nbd(daemon, "nbd-unix", {"socket": daemon.path(f"{SPECIAL}.nbd"), "name": SPECIAL}),
            _nbd(daemon, "nbd-read-only", {"socket": daemon.path("read-only.nbd")}, read_only=True),
            *(_nbd(daemon, f"nbd-tcp{number}", {"listen": f"{address}:{free_port()}"}) for number, address in enumerate(_loopbacks())),
            *(_ublk(daemon, name, read_only) for name, read_only in (("ublk", False), ("ublk-read-only", True)) if HAS_UBLK),
            _virtio_fs(fs_server),
        ]
        daemon.stop()


def _loopbacks():
    """The loopback addresses of this machine, which may have no IPv6."""
    yield "127.0.0.1"
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        probe.bind(("::1", 0))
        yield "[::1]"


def _created(daemon, name, kind, read_only, options):
    """Creates an export of a volume of its own; returns the lines for libvirt."""
    daemon.post("/v1/volumes", {"name": name, "backing": "data", "size_bytes": VOLUME_MIB * MIB})
    daemon.post("/v1/exports", {"name": name, "kind": kind, "volumes": [name], "options": options, "read_only": read_only})
    programs = [program for program in daemon.get(f"/v1/exports/{name}/attach")["lines"] if program.startswith("libvirt")]
    return {program: daemon.cli("export", "show", name, "--attach", program) for program in programs}


def _vhost_user_blk(daemon, name, read_only=False):
    path = daemon.path(f"{SPECIAL}.{name}")
    lines = _created(daemon, name, "vhost-user-blk", read_only, {"socket": path, "queues": str(QUEUES)})

    def check_command(command):
        _check_shared_memory(command)
        chardev = command.only("-chardev", path=path)
        device = command.only("-device", driver="vhost-user-blk-pci")
        assert (chardev[""], chardev["reconnect"]) == ("socket", "1"), chardev
        assert (device["chardev"], device["num-queues"]) == (chardev["id"], QUEUES), device
        return device

    def check_connected(qmp, device):
        features = _check_vhost_user(qmp, device, path, QUEUES)
        assert any(feature.startswith("VIRTIO_BLK_F_RO:") for feature in features) == read_only, features
        _check_clients(daemon, name, 1)

    return Export(name, lines, check_command, check_connected, lambda: _check_clients(daemon, name, 0))


def _nbd(daemon, name, options, read_only=False):
    lines = _created(daemon, name, "nbd", read_only, options)
    server = {"type": "unix", "path": options["socket"]} if "socket" in options else _inet(options["listen"])
    storage = {"driver": "nbd", "server": server, "export": options.get("name", name)}
    return _opened_by_qemu(name, lines, storage, read_only, lambda count: _check_clients(daemon, name, count))


def _inet(address):
    host, port = address.rsplit(":", 1)
    return {"type": "inet", "host": host.strip("[]"), "port": port}


def _ublk(daemon, name, read_only=False):
    lines = _created(daemon, name, "ublk", read_only, {})
    path = daemon.cli("export", "show", name, "--attach", "path").strip()
    storage = {"driver": "host_device", "filename": path, "aio": "native", "cache": {"direct": True, "no-flush": False}}
    # The kernel is the only client of the export, whether or not QEMU uses its disk.
    return _opened_by_qemu(name, lines, storage, read_only, lambda count: _check_clients(daemon, name, 1))


def _opened_by_qemu(name, lines, storage, read_only, check_clients):
    """The export as a disk that QEMU opens with these options and serves to the guest itself."""
    def check_command(command):
        opened = command.only("-blockdev", **storage)
        raw = command.only("-blockdev", driver="raw", file=opened["node-name"])
        assert raw["read-only"] == read_only, raw
        return command.only("-device", driver="virtio-blk-pci", drive=raw["node-name"])

    def check_connected(qmp, device):
        block, = [block for block in qmp.run("query-block") if device["id"] in block["qdev"].split("/")]
        assert block["inserted"]["image"]["virtual-size"] == VOLUME_MIB * MIB, block
        assert block["inserted"]["ro"] == read_only, block
        check_clients(1)

    return Export(name, lines, check_command, check_connected, lambda: check_clients(0))


def _virtio_fs(server):
    def check_command(command):
        _check_shared_memory(command)
        chardev = command.only("-chardev", path=server.socket)
        device = command.only("-device", driver="vhost-user-fs-pci")
        # A new server would not know the guest's open files.
        assert chardev[""] == "socket" and "reconnect" not in chardev, chardev
        assert (device["chardev"], device["tag"], device["queue-size"]) == (chardev["id"], server.TAG, 1024), device
        return device

    def check_connected(qmp, device):
        _check_vhost_user(qmp, device, server.socket, 2)  # the second one is for urgent requests

    return Export("fs", server.lines(), check_command, check_connected, server.check_guest_has_disconnected)


class FsServer(Server):
    """`freestone fs serve` on an empty directory."""

    TAG = "home"

    def __init__(self, client):
        super().__init__(image=None, log=os.path.join(client.directory, "fs.log"))
        self.socket = os.path.join(self.directory, f"{SPECIAL}.fs")
        self.served = os.path.join(self.directory, "served")
        os.mkdir(self.served)

    def command(self):
        return [paths.FREESTONE, "fs", "serve", self.served, "--socket", self.socket,
                "--virtiofsd", os.path.join(TRIXIE_BIN, "virtiofsd")]

    def lines(self):
        """The lines for libvirt."""
        done = _done([paths.FREESTONE, "fs", "attach", "--json", "--socket", self.socket, "--tag", self.TAG])
        assert done.returncode == 0, done.stderr
        return {program: line for program, line in json.loads(done.stdout)["lines"].items() if program.startswith("libvirt")}

    def check_guest_has_disconnected(self):
        code = self.process.wait(TIMEOUT_S)
        assert code == 0 and "the guest has disconnected" in paths.tail(self.log), (code, paths.tail(self.log))


def _check_shared_memory(command):
    memory = command.only("-object", id=command.only("-machine")["memory-backend"])
    assert (memory["qom-type"], memory["share"]) == ("memory-backend-memfd", True), memory


def _check_vhost_user(qmp, device, path, queues):
    """The device's socket is connected. Returns the features that the server offers the guest."""
    chardev, = [chardev for chardev in qmp.run("query-chardev") if chardev["label"] == device["chardev"]]
    assert chardev["filename"] == f"unix:{path}", chardev  # else disconnected:unix:…
    status = qmp.run("x-query-virtio-status", path=f"/machine/peripheral/{device['id']}/virtio-backend")
    assert status["num-vqs"] == queues, status
    return status["host-features"]["dev-features"]


def _check_clients(daemon, name, count):
    daemon.wait_for(f"{count} clients of {name}", lambda: len(daemon.get(f"/v1/exports/{name}/clients")) == count)


def _domain(name, lines, misplaced=None):
    """A domain with these lines, which have one element each, all but the misplaced one where they belong."""
    places = {True: "", False: ""}
    for program, line in lines.items():
        assert program in (IN_DOMAIN, *IN_DEVICES), f"{name}: no place in a domain is known for {program}"
        ElementTree.fromstring(line)
        places[(program in IN_DEVICES) != (program == misplaced)] += line
    return f"""<domain type='qemu'>
        <name>{name}</name><memory unit='MiB'>64</memory><vcpu>{QUEUES}</vcpu><os><type machine='q35'>hvm</type></os>
        <features><acpi/></features>
        {places[False]}<devices><emulator>{paths.QEMU}</emulator>{places[True]}</devices>
        </domain>"""


def _validate(client, domain):
    """Exit code and words of xmllint with libvirt's schema: 3 for an invalid domain."""
    with open(client.path("domain.xml"), "w", encoding="utf-8") as file:
        file.write(domain)
    schema = os.path.join(SHARE, "schemas", "domain.rng")
    done = _done([os.path.join(BIN, "xmllint"), "--noout", "--relaxng", schema, file.name])
    return done.returncode, done.stderr


def _commands(client, domains):
    """What libvirt makes of domains: the Command of each that it accepts, by name, and its errors."""
    if os.geteuid() != 0:
        raise Skipped("libvirt's driver needs a mount namespace: only root has one")
    script = []
    for name, domain in domains.items():
        with open(client.path(f"{name}.xml"), "w", encoding="utf-8") as file:
            file.write(domain)
        script += [f"echo {name}", f"domxml-to-native qemu-argv {file.name}"]
    # One virsh for all: it asks QEMU for its abilities first, which takes 4 s.
    virsh = [os.path.join(BIN, "virsh"), "--connect", f"qemu:///embed?root={client.path('libvirt')}", "; ".join(script)]
    done = _done(["unshare", "--mount", "sh", "-euc", NAMESPACE, SHARE, *virsh])
    commands, name = {}, None
    for line in filter(None, done.stdout.splitlines()):
        if line in domains:
            name = line
        else:
            commands[name] = Command(line)
    return commands, done.stderr


@contextlib.contextmanager
def _qemu(client, name, command):
    """QEMU with a command line of libvirt, which has it wait before the first instruction of the guest; its QMP."""
    monitor = command.only("-chardev", id="charmonitor")["path"]
    # As libvirt does when it starts a guest.
    os.makedirs(os.path.dirname(monitor))
    with open(command.only("-object", id="masterKey0")["file"], "wb") as key:
        key.write(os.urandom(32))
    qemu = client.start_command(f"qemu-{name}", command.argv, monitor)
    with contextlib.closing(Qmp(monitor)) as qmp:
        yield qmp
    qemu.stop()


def _done(command):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
                          preexec_fn=die_with_parent)
