"""GFS2 with dlm on a disk that two guests share over NVMe/TCP: reservations fence a host that is taken for dead."""

import os

import paths
from lab import needs_freestone
from runner import nightly
from shared_volume import RESERVATION_CONFLICT, share

FENCE = os.path.join(paths.REPO, "docs", "fence-nvme")

DISK_MIB = 256
LOG = "/mnt/log"
LINES_BEFORE = 20
STEP_TIMEOUT_S = 600
WRITE_EXCLUSIVE_FOR_ALL_REGISTRANTS = 5
TOKEN_MS = 30000  # for which an emulated host on a busy machine may be silent

COROSYNC = f"""
totem {{
  version: 2
  cluster_name: lab
  transport: knet
  token: {TOKEN_MS}
}}
nodelist {{
  node {{
    nodeid: 1
    name: host1
    ring0_addr: 10.8.0.1
  }}
  node {{
    nodeid: 2
    name: host2
    ring0_addr: 10.8.0.2
  }}
}}
quorum {{
  provider: corosync_votequorum
  two_node: 1
}}
logging {{
  to_stderr: yes
  to_syslog: no
}}
"""

# Appends lines "NAME NUMBER" under a lock of the file, each durable before it is counted in /run/appended.
APPENDER = f"""
import fcntl, os, sys
number = 0
while not os.path.exists("/run/enough"):
    log = os.open("{LOG}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    fcntl.flock(log, fcntl.LOCK_EX)
    os.write(log, f"{{sys.argv[1]}} {{number}}\\n".encode())
    os.fsync(log)
    os.close(log)
    number += 1
    with open("/run/appended.new", "w") as file:
        file.write(str(number))
    os.rename("/run/appended.new", "/run/appended")
"""


@needs_freestone
@nightly
def a_host_of_a_gfs2_volume_that_is_taken_for_dead_is_fenced_and_the_other_continues(lab):
    server, (one, two) = share(lab, DISK_MIB)
    one.guest.modprobe("gfs2")
    one.guest.sh(f"mkfs.gfs2 -O -q -p lock_dlm -t lab:shared -j 2 -J 32 {one.disk}", STEP_TIMEOUT_S)
    _mount(one, two)
    assert one.reservation() == (WRITE_EXCLUSIVE_FOR_ALL_REGISTRANTS, 1, {1: True, 2: True}), one.reservation()
    writer, _ = (host.guest.start("append", f"exec python3 - host{host.number} <<'END'\n{APPENDER}\nEND") for host in (one, two))
    for host in one, two:
        host.until(f"[ $(cat /run/appended || echo 0) -ge {LINES_BEFORE} ]", STEP_TIMEOUT_S)
    one.guest.sh("dmesg -C")
    durable = _appended(two)
    two.guest.qmp("stop")
    one.until("dmesg | grep -q 'jid=1: Done'", STEP_TIMEOUT_S)
    _is_fenced(server, one)
    before = _appended(one)
    one.until(f"[ $(cat /run/appended) -ge {before + LINES_BEFORE} ]", STEP_TIMEOUT_S)
    one.guest.sh("touch /run/enough")
    writer.wait(STEP_TIMEOUT_S)
    lines = _lines(one, durable)
    # The host was not dead.
    two.guest.qmp("cont")
    code, said = two.guest.sh(f"dd if=/dev/zero of={two.disk} bs=64k count=1 oflag=direct", STEP_TIMEOUT_S, check=False)
    assert code != 0 and RESERVATION_CONFLICT in said, said
    two.guest.close()
    one.drop_caches()
    assert _lines(one, durable) == lines, "the host that was fenced has changed the file"
    one.guest.sh(f"umount /mnt && fsck.gfs2 -n {one.disk}", STEP_TIMEOUT_S)
    lab.guest = one.guest  # whose kernel has no complaint
    return f"{len(lines)} lines, {durable} at least of the host that was fenced"


def _mount(*hosts):
    """Start the cluster, and mount the volume on all hosts."""
    for host in hosts:
        host.guest.modprobe("dlm")
        host.guest.sh(f"""
            mkdir -p /dev/misc /etc/corosync /etc/dlm
            ln -s /dev/dlm-control /dev/dlm-monitor /dev/dlm_plock /dev/misc
            printf '%s' '{COROSYNC}' >/etc/corosync/corosync.conf
            printf 'fence_all {FENCE} disk={host.disk}\nunfence_all\n' >/etc/dlm/dlm.conf""")
        host.guest.start("corosync", "exec corosync -f")
    for host in hosts:
        host.until("corosync-quorumtool -s 2>/dev/null | grep -q '^Quorate: *Yes'")
        host.guest.start("dlm_controld", "exec dlm_controld -D")
    for host in hosts:
        host.until("dlm_tool status 2>/dev/null | grep -q '^node 2 M'")
        host.guest.modprobe("gfs2")
    for mount in [host.guest.start("mount", f"mount -t gfs2 -o noatime {host.disk} /mnt") for host in hosts]:
        mount.wait(STEP_TIMEOUT_S)


def _is_fenced(server, one):
    """The second host has lost its key to the first, which made the target abort its commands."""
    assert one.reservation() == (WRITE_EXCLUSIVE_FOR_ALL_REGISTRANTS, 1, {1: True}), one.reservation()
    last = server.changes()[-1]
    assert "action: PreemptAndAbort" in last and "current: 1, preempted: 2" in last and "1b2c01" in last, last


def _lines(host, durable):
    """The lines of the file: all that the first host has counted, and at least these of the second, none torn."""
    lines = host.guest.sh(f"cat {LOG}").splitlines()
    numbers = {name: [int(line.split()[1]) for line in lines if line.startswith(name + " ")] for name in ("host1", "host2")}
    assert sum(map(len, numbers.values())) == len(lines), lines
    for name, found in numbers.items():
        assert found == list(range(len(found))), f"{name}: {found}"
    assert len(numbers["host1"]) == _appended(host) and len(numbers["host2"]) >= durable, lines
    return lines


def _appended(host):
    return int(host.guest.sh("cat /run/appended"))
