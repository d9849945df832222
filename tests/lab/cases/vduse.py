"""A disk that Freestone serves over VDUSE, in the guest: through both drivers of the vDPA bus, and after a kill."""

import paths
from freestoned import GuestDaemon
from lab import needs_freestone
from runner import nightly
from ublk_server import UblkServer
from workload import KILLS, MIB, end_of_load, fio_verify_until_enough, kill_under_load

NAME = "disk"
IMAGE = "/dev/shm/disk"
DISK_MIB = 48
BUS = "/sys/bus/vdpa"
# Slow enough that the kills fall into the writes.
LOAD_IOPS = 600
LOAD_MIB = 16


@needs_freestone
def a_vduse_disk_passes_the_suite_of_every_device_through_vhost_vdpa(lab):
    guest = _boot(lab, "vhost_vdpa")
    server = _server(guest)
    server.start()
    guest.sh(f"vdpa dev add name {NAME} mgmtdev vduse")
    _bind(guest, "vhost_vdpa")
    _wait_for(guest, "[ -c /dev/vhost-vdpa-0 ]")
    output = guest.sh(f"{paths.DRIVER_CHECK} virtio-blk vhost-vdpa /dev/vhost-vdpa-0", timeout_s=600)
    assert "ok: conformance" in output, output
    # On the bus it outlives an orderly stop, and a new server is taken for the old one.
    server.stop()
    server.start()
    assert "ok: conformance" in guest.sh(f"{paths.DRIVER_CHECK} virtio-blk vhost-vdpa /dev/vhost-vdpa-0", timeout_s=600)
    # Another shape is refused, a second server too, and nothing has changed.
    for options, message in (("queues=2", "another process"), ("queues=2,journal=/dev/shm/other", "another process")):
        code, output = guest.sh(f"{_command(options, device='null')} 2>&1", check=False)
        assert code == 1 and message in output, (code, output)
    server.stop()
    code, output = guest.sh(f"{_command('queues=1', device='null')} 2>&1", check=False)
    assert code != 0 and "more queues" in output, (code, output)
    # Off the bus, nothing is left of it.
    guest.sh(f"vdpa dev del {NAME}")
    server.start()
    server.stop()
    guest.sh(f"[ ! -e /dev/vduse/{NAME} ] && [ ! -e /dev/shm/freestone/vduse-{NAME} ]")


@needs_freestone
def a_vduse_disk_keeps_its_data_when_its_server_is_killed_under_load(lab):
    guest = _boot(lab, "virtio_vdpa", "virtio_blk")
    server = _server(guest)
    server.start()
    guest.sh(f"vdpa dev add name {NAME} mgmtdev vduse")
    _wait_for(guest, "[ -b /dev/vda ]")
    size = int(guest.sh("blockdev --getsize64 /dev/vda"))
    assert size == DISK_MIB * MIB, size
    load = guest.start("load", fio_verify_until_enough("/dev/vda", f"{LOAD_MIB}m", f"--rate_iops={LOAD_IOPS}"))
    caught = kill_under_load(server, load, KILLS, every_s=0.8, down_s=0.2)
    assert sum(map(bool, caught)) > KILLS / 4, f"requests in flight at each kill: {caught}: too few to show anything"
    guest.sh("""mkfs.ext4 -q /dev/vda && mkdir -p /run/mnt && mount /dev/vda /run/mnt
        head -c 4M /dev/urandom >/run/mnt/a && sha256sum /run/mnt/a >/run/sum""")
    server.kill()
    # A driver at work is not given another disk.
    code, output = guest.sh(f"{_command('queues=2', device='null')} 2>&1", check=False)
    assert code != 0 and f"the driver uses io_uring:{IMAGE} of {DISK_MIB * MIB} bytes" in output, (code, output)
    server.start()
    guest.sh("""sync; echo 3 >/proc/sys/vm/drop_caches; sha256sum -c --quiet /run/sum
        fstrim /run/mnt; umount /run/mnt; e2fsck -fn /dev/vda""")
    _grows(guest)
    return f"requests in flight at each kill: {caught}"


@needs_freestone
@nightly
def a_vduse_disk_goes_on_while_its_queues_go_from_core_to_core(lab):
    guest = _boot(lab, "virtio_vdpa", "virtio_blk")
    daemon = GuestDaemon(guest, "--cores 0,1")
    daemon.start()
    daemon.cli(f"device create disk {IMAGE}")
    daemon.cli(f"export create vm1 --kind vduse --device disk -o name={NAME} -o queues=2")
    guest.sh(f"vdpa dev add name {NAME} mgmtdev vduse")
    _wait_for(guest, "[ -b /dev/vda ]")
    load = guest.start("load", fio_verify_until_enough("/dev/vda", f"{LOAD_MIB}m", f"--rate_iops={LOAD_IOPS}"))
    moves = 0
    while moves < 24:
        for cores in ("--cores 1", "--cores 0", "--cores 1,0", ""):
            daemon.cli(f"export remap vm1 {cores}")
            moves += 1
    assert load.is_running(), guest.sh("cat /run/load.out")
    end_of_load(load)
    assert "vduse" in (shown := daemon.cli("export show vm1")), shown
    return f"the queues moved {moves} times under load"


def _grows(guest):
    guest.sh(f"truncate -s {2 * DISK_MIB}M {IMAGE}; kill -HUP $(cat /run/server.pid)")
    _wait_for(guest, f"[ $(blockdev --getsize64 /dev/vda) = {2 * DISK_MIB * MIB} ]")


def _boot(lab, *drivers):
    guest = lab.boot_alone(cpus=2)
    guest.modprobe("vduse", *drivers)
    guest.sh(f"truncate -s {DISK_MIB}M {IMAGE}")
    return guest


def _bind(guest, driver):
    guest.sh(f"""[ ! -e {BUS}/devices/{NAME}/driver ] || echo {NAME} >{BUS}/devices/{NAME}/driver/unbind
        echo {driver} >{BUS}/devices/{NAME}/driver_override; echo {NAME} >{BUS}/drivers/{driver}/bind || true""")


def _server(guest):
    return UblkServer(guest, _arguments("queues=2"))


def _arguments(options, device=f"io_uring:path={IMAGE}"):
    return f"--device {device} --export vduse:name={NAME},{options}"


def _command(options, device):
    return f"{paths.FREESTONE} serve {_arguments(options, device)}"


def _wait_for(guest, condition):
    guest.sh(f"for i in $(seq 600); do {condition} && exit 0; sleep 0.1; done; exit 1")
