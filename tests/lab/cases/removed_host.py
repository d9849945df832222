"""A host that loses its access while it writes, and another that keeps its own: two guests, with freestoned on the host."""

import mmap
import os
import random
import time

from freestoned import Freestoned, free_port
from lab import needs_freestone
from runner import nightly
from vm import HOST_ADDRESS, NETWORK, Guest
from workload import MIB

NQN = "nqn.2014-08.org.example:shared"
HALF = MIB  # of the disk: one for each guest
BLOCK = 16 << 10
ROUNDS, MORE_ROUNDS = 6, 200
ROUND_TIMEOUT_S = 60


@needs_freestone
def a_removed_host_writes_nothing_after_the_answer(lab):
    return _remove_under_load(lab, ROUNDS)


@nightly
@needs_freestone
def a_removed_host_writes_nothing_after_the_answer_in_many_rounds(lab):
    return _remove_under_load(lab, MORE_ROUNDS)


def _remove_under_load(lab, rounds):
    shared = _Shared(lab)
    removed, steady = _Host(lab, shared, "removed", 0), _Host(lab, shared, "steady", 1)
    shared.change(add=steady)
    steady.begin("steady")
    waits = []
    for number in range(rounds):
        shared.change(add=removed)
        writer = removed.begin(f"round{number}")
        removed.wait_for_writes()
        time.sleep(random.random() * 0.05)
        began = time.monotonic()
        shared.change(remove=removed)
        waits.append(time.monotonic() - began)
        removed.erase()
        said = writer.wait(ROUND_TIMEOUT_S)
        assert "dd has failed" in said, said
        assert removed.is_erased(), f"round {number}: {removed.name} has written after the answer"
        steady.erase()
        steady.wait_for_writes()
    # The kernel says which data it could not write.
    removed.guest.sh("dmesg -C")
    steady.end()
    shared.daemon.stop()
    waits.sort()
    return f"{rounds} rounds; the answer took {waits[len(waits) // 2] * 1000:.0f} ms, at most {waits[-1] * 1000:.0f} ms"


class _Shared:
    """A daemon that serves one disk to hosts in guests."""

    def __init__(self, lab):
        os.makedirs(lab.directory, exist_ok=True)
        self.daemon = Freestoned(lab.scratch())
        lab.callback(self.daemon.close)
        lab.parts.append(self)
        self.daemon.start()
        self.file = self.daemon.file("disk", 2 * HALF)
        # Direct, as the daemon's: the page cache would not see each other's writes.
        self.disk = os.open(self.file, os.O_RDWR | os.O_DIRECT)
        lab.callback(os.close, self.disk)
        self.port = free_port()
        self.daemon.post("/v1/devices", {"name": "disk", "spec": self.file})
        options = {"listen": f"127.0.0.1:{self.port}", "nqn": NQN, "hosts": "none"}
        self.daemon.post("/v1/exports", {"name": "shared", "kind": "nvme-tcp", "volumes": ["disk"], "options": options})

    def change(self, add=None, remove=None):
        hosts = {"add": [{"nqn": add.nqn}]} if add else {"remove": [remove.nqn]}
        self.daemon.patch("/v1/exports/shared", {"hosts": hosts})

    def logs(self):
        return self.daemon.log()


class _Host:
    """A guest that writes to its half of the disk until a write fails."""

    def __init__(self, lab, shared, name, half):
        self.shared, self.name, self.start = shared, name, half * HALF
        self.nqn = f"nqn.2014-08.org.example:{name}"
        self.guest = lab.start(Guest(directory=os.path.join(lab.directory, name), qemu_arguments=NETWORK))
        lab.parts.append(self.guest)
        self.guest.modprobe("virtio_net", "nvme-tcp")
        self.guest.sh("ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; head -c 1M /dev/zero | tr '\\0' x >/run/data")

    def begin(self, name):
        """Begin to connect and to write; returns the job."""
        # With --ctrl-loss-tmo=0 the kernel does not connect again.
        connect = (f"nvme connect -t tcp -a {HOST_ADDRESS} -s {self.shared.port} -n {NQN} --hostnqn {self.nqn}"
                   " --nr-io-queues 2 --ctrl-loss-tmo=0 >/dev/null")
        disk = "for i in $(seq 300); do disk=$(ls -d /sys/block/nvme*n1 2>/dev/null) && [ -b /dev/${disk##*/} ] && break; sleep 0.02; done"
        write = (f"dd if=/run/data of=/dev/${{disk##*/}} bs={BLOCK} seek={self.start // BLOCK} count={HALF // BLOCK}"
                 " oflag=direct conv=notrunc,nocreat 2>/dev/null")
        return self.guest.start(name, f"{connect} && {disk}; while {write}; do :; done; echo dd has failed")

    def end(self):
        self.shared.change(remove=self)

    def wait_for_writes(self):
        """Wait until every block has been written."""
        self.shared.daemon.wait_for(f"writes of {self.name}", lambda: b"\0" not in self._content())

    def erase(self):
        os.pwritev(self.shared.disk, [mmap.mmap(-1, HALF)], self.start)

    def is_erased(self):
        return self._content() == bytes(HALF)

    def _content(self):
        content = mmap.mmap(-1, HALF)
        assert os.preadv(self.shared.disk, [content], self.start) == HALF
        return content[:]
