"""The server goes away and comes back: the guest sees a pause, never an error, and no write is lost."""

import time

from lab import needs_freestone
from runner import nightly
from workload import KILLS, fio_verify, fio_verify_until_enough, kill_under_load

# Slow enough that the kills fall into the writes and into the verification after them.
LOAD_IOPS = 1000
LOAD_MIB = 24
FEW_KILLS = 4


@needs_freestone
def kill_under_load_is_only_a_pause(lab):
    _survives_kills(lab, KILLS, queues=1, cpus=1, packed=False)


@nightly
@needs_freestone
def kill_under_load_is_only_a_pause_with_packed_rings(lab):
    _survives_kills(lab, FEW_KILLS, queues=1, cpus=1, packed=True)


@nightly
@needs_freestone
def kill_under_load_is_only_a_pause_with_four_queues(lab):
    _survives_kills(lab, FEW_KILLS, queues=4, cpus=4, packed=False)


@needs_freestone
@nightly
def kill_under_load_is_only_a_pause_with_four_packed_queues(lab):
    _survives_kills(lab, KILLS, queues=4, cpus=4, packed=True)


@needs_freestone
def an_orderly_restart_under_load_is_only_a_pause(lab):
    guest = lab.boot(queues=2, cpus=2)
    load = guest.start("load", fio_verify("/dev/vda", "32m", f"--rate_iops={LOAD_IOPS}"))
    for _ in range(3):
        time.sleep(1.5)
        lab.server.stop()
        lab.server.start()
    load.wait()


@needs_freestone
def an_idle_guest_finds_its_data_after_a_kill(lab):
    guest = lab.boot()
    guest.sh(fio_verify("/dev/vda", "8m"))
    lab.server.kill()
    time.sleep(1)
    lab.server.start()
    guest.sh(fio_verify("/dev/vda", "8m", "--verify_only"))


def _survives_kills(lab, kills, queues, cpus, packed):
    guest = lab.boot(queues=queues, cpus=cpus, packed=packed)
    spread = (f"--numjobs={queues} --offset_increment={LOAD_MIB // queues}m --cpus_allowed=0-{cpus - 1}"
              f" --cpus_allowed_policy=split --rate_iops={LOAD_IOPS // queues}")
    load = guest.start("load", fio_verify_until_enough("/dev/vda", f"{LOAD_MIB // queues}m", spread))
    caught = kill_under_load(lab.server, load, kills, every_s=1, down_s=0.2)
    assert sum(map(bool, caught)) > kills / 2, f"requests in flight at each kill: {caught}: too few to show anything"
