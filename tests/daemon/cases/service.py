"""freestoned as a service: another user than root, a socket and a watchdog of the service manager."""

import os
import re
import shutil
import socket
import subprocess
import time

import paths
from freestoned import MIB, DaemonError, Freestoned, Refused
from runner import Skipped

NOBODY = 65534
UNIT = os.path.join(paths.REPO, "crates", "daemon", "systemd", "freestoned.service")
# Of 10, as systemd-analyze counts.
MOST_EXPOSED = 3.0


def _at(subject, name):
    return os.path.join(subject.scratch, name)


def another_user_serves_its_files_and_is_told_which_capability_it_lacks(subject):
    if os.geteuid() != 0:
        raise Skipped("only root can become somebody else")
    # Where the program lies, that user may not look.
    program = _at(subject, "freestoned")
    shutil.copy2(paths.FREESTONED, program)
    os.chmod(subject.scratch, 0o755)
    home = _at(subject, "home")
    os.makedirs(home)
    members = [_at(subject, f"home/m{slot}") for slot in range(3)]
    for member in members:
        with open(member, "wb") as file:
            file.truncate(32 * MIB)
        os.chown(member, NOBODY, NOBODY)
    os.chown(home, NOBODY, NOBODY)
    daemon = Freestoned(home)
    daemon.program = program
    daemon.prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]
    subject.ends.callback(daemon.close)
    daemon.start()
    system = daemon.get("/v1/system")
    assert (system["user"], system["capabilities"]) == (NOBODY, []), system
    daemon.post("/v1/arrays", {"name": "data", "level": "5", "members": members})
    daemon.post("/v1/volumes", {"name": "v1", "backing": "data", "size_bytes": MIB})
    daemon.post("/v1/exports", {"name": "vm1", "kind": "vhost-user-blk", "volumes": ["v1"]})
    assert os.stat(daemon.path("vm1.sock")).st_uid == NOBODY
    for kind, options, capability in (("ublk", {}, "CAP_SYS_ADMIN"), ("nbd", {"listen": "127.0.0.1:809"}, "CAP_NET_BIND_SERVICE")):
        try:
            daemon.post("/v1/exports", {"name": "e2", "kind": kind, "volumes": ["v1"], "options": options})
            raise AssertionError(f"{kind} was not refused")
        except Refused as refused:
            assert refused.detail == f"export e2: it takes {capability}, which freestoned does not have", refused
    try:
        daemon.post("/v1/devices", {"name": "secret", "spec": "/etc/shadow"})
        raise AssertionError("it opened what is not its")
    except Refused as refused:
        assert "Permission denied" in refused.detail, refused
    daemon.stop()


def the_service_manager_passes_the_socket_and_is_told_of_readiness_and_life(subject):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_at(subject, "api.sock"))
    listener.listen()
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(_at(subject, "notify.sock"))
    manager.settimeout(20)
    daemon = Freestoned(_at(subject, "d"))
    daemon.socket = _at(subject, "api.sock")
    daemon.inherited = (listener.fileno(),)
    daemon.prefix = ["sh", "-c", f'LISTEN_PID=$$ exec "$@" 3<&{listener.fileno()}', "sh"]
    daemon.more_environment = {"LISTEN_FDS": "1", "NOTIFY_SOCKET": _at(subject, "notify.sock"), "WATCHDOG_USEC": "600000"}
    subject.ends.callback(daemon.close)
    daemon.start()
    assert manager.recv(4096).startswith(b"READY=1")
    began = time.monotonic()
    seen = [manager.recv(4096) for _ in range(3)]
    assert all(message.startswith(b"WATCHDOG=1") for message in seen), seen
    assert time.monotonic() - began < 5
    daemon.stop()
    assert os.path.exists(_at(subject, "api.sock")), "the socket is the manager's"
    while not (message := manager.recv(4096)).startswith(b"STOPPING=1"):
        assert message.startswith(b"WATCHDOG=1"), message


def two_daemons_do_not_share_a_state_or_a_socket(subject):
    daemon = subject.daemon()
    other = Freestoned(_at(subject, "other"))
    other.socket = daemon.socket
    subject.ends.callback(other.close)
    try:
        other.start(wait=False)
        code = other.process.wait(timeout=20)
    finally:
        other.close()
    assert code == 1 and "the socket is in use by another process" in other.log(), (code, other.log())
    assert daemon.get("/v1/system")["pid"] == daemon.process.pid
    try:
        Freestoned(_at(subject, "third"), "--cores", "9999").start()
        raise AssertionError("there is no such processor")
    except DaemonError as error:
        assert "9999" in str(error), error


def the_unit_leaves_little_to_an_attacker(subject):
    del subject  # no daemon runs
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT],
                          capture_output=True, text=True, timeout=60, env=os.environ | {"SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"})
    level = re.search(r"Overall exposure level for freestoned\.service: ([0-9.]+)", done.stdout)
    assert level, done.stdout[-2000:] + done.stderr
    assert float(level[1]) <= MOST_EXPOSED, done.stdout
    granted = [line for line in done.stdout.splitlines() if "✗" in line and "CapabilityBoundingSet" in line]
    assert not granted, granted
    return f"exposure level {level[1]}"
