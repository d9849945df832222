"""Disks of the guest's own kernel: Freestone runs in the guest, and /dev/ublkbN is what it serves."""

import time

import paths
from freestoned import GuestDaemon
from lab import needs_freestone
from runner import nightly
from ublk_server import UblkServer, as_user, requeued, ublk, ublk_fails
from workload import (KILLS, MIB, end_of_load, fio_verify, fio_verify_again, fio_verify_until_enough, kill_under_load,
                      requests_completed)

DISK = "/dev/shm/disk"
DISK_MIB = 96
FILE = f"--device io_uring:path={DISK},id=disk"
# Slow enough that every kill finds requests on their way.
SLOW_FILE = f"{FILE} --layer fault:op=read+write,delay-us=10000"
# Slow enough that the kills fall into the writes and into the verification after them.
LOAD_IOPS = 1000
LOAD_MIB = 32
TAKEOVERS = 5
# Linux 6.12 now and then falls over a null pointer in its own ublk driver when a server dies with requests on their way, or
# half way through taking a disk over.
KERNEL_FOR_KILLS = paths.NEW_KERNEL
QUEUE = "/sys/block/ublkb{}/queue"


@needs_freestone
def disks_of_the_kernel_keep_data_and_promises(lab):
    guest = _boot(lab)
    server = UblkServer(guest, f"{FILE} --device mem:size=16M,id=ram --device mem:size=16M,id=bad"
                        " --layer fault:device=bad,op=read,offset=8M,len=4K,error=medium"
                        " --export ublk:id=0,queues=2 --export ublk:id=5,device=ram,readonly"
                        " --export ublk:device=bad,max-io=64K,queue-size=16 --cores 0,1")
    server.start()
    _what_the_kernel_was_told(guest)
    _a_file_system_keeps_its_files(guest)
    _every_kind_of_request_arrives(guest, server)
    _an_error_reaches_its_reader_alone(guest)
    _the_commands_say_what_there_is(guest)
    server.stop()
    assert ublk(guest, "list") == [], "the server left disks behind"
    guest.sh("[ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ]")
    _what_is_cached_reaches_the_device_before_the_disk_goes(guest)
    _without_recovery_a_disk_ends_with_its_server(guest)


def _what_the_kernel_was_told(guest):
    facts = {
        0: {"write_cache": "write back", "fua": "1", "rotational": "0", "logical_block_size": "512",
            "max_hw_sectors_kb": "512"},
        1: {"write_cache": "write through", "max_hw_sectors_kb": "64"},
        5: {"discard_max_bytes": "0", "write_zeroes_max_bytes": "0"},
    }
    for disk, values in facts.items():
        for name, value in values.items():
            seen = guest.sh(f"cat {QUEUE.format(disk)}/{name}").strip()
            assert seen == value, f"ublkb{disk}: {name} is {seen}, not {value}"
    for name in "discard_max_bytes", "write_zeroes_max_bytes", "discard_granularity":
        assert int(guest.sh(f"cat {QUEUE.format(0)}/{name}")) > 0, name
    assert guest.sh("cat /sys/block/ublkb5/ro /sys/block/ublkb0/ro").split() == ["1", "0"]
    assert guest.sh("ls -d /sys/block/ublkb0/mq/* | wc -l").strip() == "2"
    code, _ = guest.sh("dd if=/dev/zero of=/dev/ublkb5 bs=4k count=1 oflag=direct", check=False)
    assert code != 0, "a read-only disk was written to"


def _a_file_system_keeps_its_files(guest):
    guest.modprobe("ext4")
    guest.sh("mkfs.ext4 -q -F /dev/ublkb0 && mkdir -p /mnt/disk && mount /dev/ublkb0 /mnt/disk")
    guest.sh(fio_verify("/mnt/disk/file", "6m", "--numjobs=2 --offset_increment=6m --bsrange=4k-256k"))
    guest.sh("rm /mnt/disk/file && fstrim /mnt/disk && umount /mnt/disk && e2fsck -f -n /dev/ublkb0")


def _every_kind_of_request_arrives(guest, server):
    before = server.count("ublk:0")
    guest.sh("dd if=/dev/urandom of=/dev/ublkb0 bs=1M count=4 oflag=direct conv=fsync 2>/dev/null")
    guest.sh("dd if=/dev/ublkb0 bs=1M count=4 iflag=direct 2>/dev/null | cmp -n 4M - " + DISK)
    guest.sh("blkdiscard -o 0 -l 1M /dev/ublkb0 && blkdiscard -z -o 1M -l 1M /dev/ublkb0")
    guest.sh("dd if=/dev/ublkb0 bs=1M count=2 iflag=direct 2>/dev/null | cmp -n 2M - /dev/zero")
    guest.sh("dd if=/dev/ublkb0 skip=2 bs=1M count=2 iflag=direct 2>/dev/null >/run/rest; ! cmp -s -n 2M /run/rest /dev/zero")
    after = server.count("ublk:0")
    for kind in "read", "write", "flush", "discard", "write_zeroes":
        assert int(after[kind]) > int(before[kind]), f"{kind}: {before} and then {after}"
    assert after["failed"] == "0" and after["connected"] == "true", after


def _an_error_reaches_its_reader_alone(guest):
    code, output = guest.sh("dd if=/dev/ublkb1 of=/dev/null bs=4k skip=2048 count=1 iflag=direct", check=False)
    assert code != 0 and "Input/output error" in output, output
    guest.sh(fio_verify("/dev/ublkb1", "4m"))
    assert "I/O error" in guest.sh("dmesg -c"), "the kernel has not seen the error"


def _the_commands_say_what_there_is(guest):
    features = ublk(guest, "features")[0]["features"]
    assert "USER_RECOVERY" in features and "NEED_GET_DATA" in features, features
    disks = {disk["id"]: disk for disk in ublk(guest, "list")}
    assert sorted(disks) == [0, 1, 5] and all(disk["state"] == "live" and disk["ours"] for disk in disks.values()), disks
    assert (disks[0]["queues"], disks[1]["queue_size"], disks[5]["read_only"]) == (2, 16, True), disks
    assert "there is no device 9" in ublk_fails(guest, "list -n 9")
    assert "device 9 cannot be deleted" in ublk_fails(guest, "del -n 9")
    assert "serves it" in ublk_fails(guest, "--device mem:size=16M --export ublk:id=1", "serve")
    assert "does not support USER_RECOVERY_FAIL_IO" in ublk_fails(guest, "--device mem:size=1M --export ublk:recovery=fail", "serve")
    ublk(guest, "del -n 5")
    assert [disk["id"] for disk in ublk(guest, "list")] == [0, 1]


def _without_recovery_a_disk_ends_with_its_server(guest):
    server = UblkServer(guest, "--device mem:size=16M --export ublk:id=0,recovery=off")
    server.start()
    server.kill()
    guest.sh("for i in $(seq 200); do [ -e /sys/block/ublkb0 ] || exit 0; sleep 0.1; done; exit 1")
    assert ublk(guest, "list")[0]["state"] == "dead"
    server.start()  # what was left is replaced
    assert ublk(guest, "list")[0]["state"] == "live"
    server.stop()
    assert ublk(guest, "list") == []
    guest.sh("dmesg -C")


def _what_is_cached_reaches_the_device_before_the_disk_goes(guest):
    server = UblkServer(guest, f"{FILE} --export ublk:id=0")
    server.start()
    guest.sh("mkfs.ext4 -q -F /dev/ublkb0 && mount /dev/ublkb0 /mnt/disk")
    guest.sh("head -c 3M /dev/urandom >/run/random && cp /run/random /mnt/disk/file")
    begin = time.monotonic()
    assert "while in use" in server.stop(), "the server has not said that its disk has users"
    took_s = time.monotonic() - begin
    assert took_s < 15, f"a mounted file system held the server up for {took_s:.0f} s"
    guest.sh("umount /mnt/disk")
    guest.sh("for i in $(seq 100); do [ -e /dev/ublkc0 ] || exit 0; sleep 0.1; done; exit 1")
    # Whoever uses a disk that goes is told so in the log of the kernel.
    guest.sh(f"dmesg -C; e2fsck -f -y {DISK} || [ $? = 1 ]; debugfs -R 'dump /file /run/dumped' {DISK} && cmp /run/random /run/dumped")


@needs_freestone
def kill_9_under_load_is_only_a_pause_for_a_disk_of_the_kernel(lab):
    guest = _boot(lab, KERNEL_FOR_KILLS)
    guest.modprobe("ext4")
    server = UblkServer(guest, f"{SLOW_FILE} --export ublk:id=0,queues=2 --cores 0,1")
    server.start()
    guest.sh("mkfs.ext4 -q -F /dev/ublkb0 && mkdir -p /mnt/disk && mount /dev/ublkb0 /mnt/disk")
    file = ("/mnt/disk/file", f"{LOAD_MIB // 2}m", f"--numjobs=2 --offset_increment={LOAD_MIB // 2}m --rate_iops={LOAD_IOPS // 2}")
    load = guest.start("load", fio_verify_until_enough(*file))
    caught = kill_under_load(server, load, KILLS, every_s=0.4, down_s=0.2, disk="ublkb0", count=requeued)
    assert sum(map(bool, caught)) > KILLS / 4, f"requests in flight at each kill: {caught}: too few to show anything"
    server.kill()
    _no_other_server_gets_the_disk(guest)
    server.start()
    guest.sh("echo 3 >/proc/sys/vm/drop_caches")
    guest.sh(fio_verify_again(*file))
    guest.sh("umount /mnt/disk && e2fsck -f -n /dev/ublkb0")
    server.kill()
    ublk(guest, "del -n 0")
    assert ublk(guest, "list") == []
    return f"requests in flight at each kill: {caught}"


@needs_freestone
@nightly
def a_successor_that_is_killed_while_it_takes_a_disk_over_is_succeeded_itself(lab):
    guest = _boot(lab, KERNEL_FOR_KILLS)
    server = UblkServer(guest, f"{SLOW_FILE} --export ublk:id=0,queues=2 --cores 0,1")
    server.start()
    file = ("/dev/ublkb0", "16m", f"--rate_iops={LOAD_IOPS}")
    load = guest.start("load", fio_verify_until_enough(*file))
    were_ready = []
    for i in range(TAKEOVERS):
        time.sleep(0.5)
        server.kill()
        were_ready.append(server.start_and_kill(after_s=0.02 * i))
        server.start()
    end_of_load(load)
    assert False in were_ready, "every successor was ready when it was killed"
    guest.sh(fio_verify_again(*file))
    server.stop()
    return f"ready when killed: {were_ready}"


@needs_freestone
def a_plain_disk_fails_what_its_dead_server_had_and_keeps_the_rest_waiting(lab):
    guest = _boot(lab, KERNEL_FOR_KILLS)
    slow = f"{FILE} --layer fault:op=read,delay-us=600000000,offset=1M,len=4K"
    first = UblkServer(guest, f"-n 4 -q 2 -o recovery=plain {slow}", command="ublk add")
    first.start()
    guest.sh("dd if=/dev/urandom of=/dev/ublkb4 bs=1M count=2 oflag=direct 2>/dev/null")
    read = "dd if=/dev/ublkb4 bs=4k count=1 skip={} iflag=direct status=none | cmp -n 4096 - <(tail -c +{} " + DISK + ")"
    caught = guest.start("caught", "set -o pipefail; " + read.format(256, (1 << 20) + 1))
    guest.sh("for i in $(seq 100); do [ $(awk '{print $1}' /sys/block/ublkb4/inflight) = 1 ] && exit 0; sleep 0.05; done; exit 1")
    first.kill()
    guest.sh("for i in $(seq 200); do [ -e /run/caught.code ] && exit 0; sleep 0.05; done; exit 1")
    assert guest.sh("cat /run/caught.out; exit $(cat /run/caught.code)", check=False)[0] != 0, "no server was left to answer it"
    waits = guest.start("waits", "set -o pipefail; " + read.format(0, 1))
    time.sleep(1)
    assert waits.is_running() and not caught.is_running()
    second = UblkServer(guest, f"-n 4 {slow}", command="ublk recover")
    second.start()
    waits.wait()
    second.stop()
    assert "I/O error" in guest.sh("dmesg -c"), "the kernel has not seen the error"


@needs_freestone
def a_disk_that_shall_fail_does_so_until_the_next_server_comes(lab):
    guest = _boot(lab, KERNEL_FOR_KILLS)
    server = UblkServer(guest, f"{FILE} --export ublk:id=0,recovery=fail")
    server.start()
    read = "dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct"
    guest.sh(read)
    server.kill()
    guest.sh("for i in $(seq 100); do " + read + " || exit 0; sleep 0.05; done; exit 1")
    assert ublk(guest, "list")[0]["state"] == "fail-io"
    server.start()
    guest.sh(fio_verify("/dev/ublkb0", "4m"))
    server.stop()
    assert "error, dev ublkb0" in guest.sh("dmesg -c"), "the kernel has not seen the error"


@needs_freestone
def a_disk_of_a_vhost_user_server_keeps_data(lab):
    """The memory of a ublk disk is not what that server maps: its data is copied."""
    guest = _boot(lab, paths.NEW_KERNEL)
    below = UblkServer(guest, f"{FILE} --export vhost-user-blk:socket=/run/below.sock,queues=4", name="below")
    below.start()
    server = UblkServer(guest, "--device virtio-blk-vhost-user:path=/run/below.sock --export ublk:id=0,queues=2 --cores 0,1")
    server.start()
    guest.sh(fio_verify("/dev/ublkb0", "8m"))
    server.stop()
    below.stop()


@needs_freestone
def a_disk_grows_with_its_device(lab):
    guest = _boot(lab, paths.NEW_KERNEL)
    server = UblkServer(guest, f"{FILE} --export ublk:id=0")
    server.start()
    guest.modprobe("ext4")
    guest.sh("mkfs.ext4 -q -F /dev/ublkb0 && mkdir -p /mnt/disk && mount /dev/ublkb0 /mnt/disk")
    sectors = (DISK_MIB + 32) * MIB // 512
    guest.sh(f"truncate -s {(DISK_MIB + 32) * MIB} {DISK} && kill -HUP $(cat /run/server.pid)")
    guest.sh(f"for i in $(seq 100); do [ $(cat /sys/block/ublkb0/size) = {sectors} ] && exit 0; sleep 0.1; done; exit 1")
    guest.sh("resize2fs /dev/ublkb0 && head -c 100M /dev/urandom >/mnt/disk/file && umount /mnt/disk && e2fsck -f -n /dev/ublkb0")
    server.stop()


@needs_freestone
def a_disk_of_the_daemon_stays_while_the_daemon_ends_and_its_queues_go_from_core_to_core(lab):
    guest = _boot(lab, paths.NEW_KERNEL)
    guest.modprobe("ext4")
    daemon = GuestDaemon(guest, "--cores 0,1")
    daemon.start()
    daemon.cli(f"device create disk {DISK}")
    daemon.cli(f"volume create v1 --device disk --size {DISK_MIB - 16}M")
    daemon.cli("export create vm1 --kind ublk --volume v1 -o queues=2")
    guest.sh("mkfs.ext4 -q -F /dev/ublkb0 && mkdir -p /mnt/disk && mount /dev/ublkb0 /mnt/disk")
    file = ("/mnt/disk/file", f"{LOAD_MIB}m", f"--rate_iops={LOAD_IOPS}")
    load = guest.start("load", fio_verify_until_enough(*file))
    took_ms, name = [], "v1"
    for end in ("TERM", "KILL") * max(1, KILLS // 5):
        for cores in ("--cores 1", "--cores 0", "--cores 1,0", ""):
            began = time.monotonic()
            daemon.cli(f"export remap vm1 {cores}")
            took_ms.append(round(1000 * (time.monotonic() - began)))
        # Its disk is the same under whatever name.
        new = f"v{len(took_ms)}"
        daemon.cli(f"volume rename {name} {new}")
        name = new
        said = daemon.end(end)
        assert end == "KILL" or "waits for the next server" in said, said
        disk, = ublk(guest, "list")
        assert disk["state"] == "quiesced", disk
        daemon.start()
        assert load.is_running(), load.wait()
        before = requests_completed(guest, "ublkb0")
        while load.is_running() and requests_completed(guest, "ublkb0") == before:
            time.sleep(0.05)
    end_of_load(load)
    guest.sh("echo 3 >/proc/sys/vm/drop_caches")
    guest.sh(fio_verify_again(*file))
    guest.sh("umount /mnt/disk && e2fsck -f -n /dev/ublkb0")
    # A person who ends it wants it gone.
    daemon.end("INT")
    assert ublk(guest, "list") == []
    return f"the queues moved {len(took_ms)} times under load, in {min(took_ms)} to {max(took_ms)} ms"


@needs_freestone
def an_ordinary_user_has_disks_of_their_own(lab):
    guest = _boot(lab)
    user, stranger = 4711, 4712
    disk = UblkServer(guest, "--device mem:size=16M --export ublk:id=5,queues=2", uid=user)
    # Without the rule the control device is root's.
    assert "needs root, or a udev rule" in ublk_fails(guest, disk.arguments, "serve", user)
    guest.sh("chmod 666 /dev/ublk-control")  # what the rule does for a group
    roots = UblkServer(guest, f"{FILE} --export ublk:id=0", name="roots")
    roots.start()
    udev = guest.start("udev", f"""for i in $(seq 600); do [ ! -e /run/udev.end ] || exit 0
        for node in /dev/ublk[bc][0-9]*; do [ -O $node ] && {paths.FREESTONE} ublk chown $node; done; sleep 0.1; done""")
    disk.start()
    guest.sh(f"for i in $(seq 100); do [ $(stat -c %u /dev/ublkb5) = {user} ] && exit 0; sleep 0.05; done; exit 1")
    mine = as_user(user)
    guest.sh(f"{mine} dd if=/dev/urandom of=/dev/ublkb5 bs=1M count=4 oflag=direct conv=fsync 2>/dev/null"
             f" && {mine} dd if=/dev/ublkb5 bs=1M count=4 iflag=direct 2>/dev/null >/run/read && [ $(stat -c %s /run/read) = 4194304 ]")
    found, = ublk(guest, "list", uid=user)
    assert (found["id"], found["unprivileged"], found["owner"]["uid"], found["recovery"]) == (5, True, user, "off"), found
    assert "no recovery" in guest.sh("cat /run/server.out")
    assert sorted(found["id"] for found in ublk(guest, "list")) == [0, 5]
    # What is another's stays so.
    for uid, number in (user, 0), (stranger, 5):
        assert "denied" in (said := ublk_fails(guest, f"del -n {number}", uid=uid)) or "permitted" in said, said
    assert ublk(guest, "list", uid=stranger) == []
    assert guest.sh("stat -c %u /dev/ublkc0 /dev/ublkb0").split() == ["0", "0"]
    ublk(guest, "del -n 5", uid=user)
    disk.kill()
    disk.start()
    disk.stop()
    disk.start()
    ublk(guest, "del -n 5")  # root may
    guest.sh("touch /run/udev.end")
    udev.wait()
    roots.stop()


def _no_other_server_gets_the_disk(guest):
    """The disk of a dead server goes on over its own device, or not at all."""
    disk = ublk(guest, "list")[0]
    assert disk["state"] == "quiesced", disk
    refusals = {
        "--device mem:size=96M --export ublk:id=0": "it was not served from",
        f"{SLOW_FILE.replace(DISK, DISK + ',readonly=on')} --export ublk:id=0": "read-only",
        f"{SLOW_FILE} --export ublk:id=0,begin=add": "it already exists, quiesced",
        f"{SLOW_FILE} --export ublk:id=3,begin=recover": "the device does not exist",
    }
    for arguments, words in refusals.items():
        output = ublk_fails(guest, arguments, "serve")
        assert words in output, f"{arguments}: {output}"
    assert ublk(guest, "list")[0]["state"] == "quiesced"


def _boot(lab, kernel=paths.KERNEL):
    guest = lab.boot_alone(cpus=2, kernel=kernel)
    guest.modprobe("ublk_drv")
    guest.sh(f"truncate -s {DISK_MIB}M {DISK}")
    return guest
