"""Disks of the guest's own kernel whose requests Freestone serves without their bytes (UBLK_F_AUTO_BUF_REG, Linux 6.16)."""

import json

import paths
from freestoned import GuestDaemon
from lab import needs_freestone
from ublk_server import UblkServer, requeued, ublk
from workload import KILLS, end_of_load, fio_verify, fio_verify_again, fio_verify_until_enough, kill_under_load

BACK = "/mnt/back"
FILE_MIB = 32
ODD_BYTES = (16 << 20) + 700
SIZES = "--bsrange=4k-1m"
FILE = f"--device io_uring:path={BACK}/a,direct=on,id=a"
# Slow enough that every kill finds requests on their way.
SLOW_FILE = f"{FILE} --layer fault:op=read+write,delay-us=10000"
LOAD = ("/dev/ublkb0", f"{FILE_MIB // 2}m", "--rate_iops=500")


@needs_freestone
def disks_without_copies_keep_data(lab):
    guest = _boot(lab)
    server = UblkServer(guest, f"{FILE} --device io_uring:path={BACK}/b,direct=on,id=b"
                        f" --device io_uring:path={BACK}/c,id=c --device io_uring:path={BACK}/odd,direct=on,id=odd"
                        " --device mem:size=16M,id=ram --layer concat:devices=a+b,id=both"
                        " --export ublk:id=0,device=both,queues=2,max-io=1M --export ublk:id=1,device=c"
                        " --export ublk:id=2,device=odd --export ublk:id=3,device=ram"
                        " --export ublk:id=4,device=c,zero-copy=off,readonly --cores 0,1")
    server.start()
    assert [_is_zero_copy(guest, disk) for disk in range(5)] == [True, True, True, False, False]
    for disk, size in (0, "48m"), (1, "16m"):
        guest.sh(fio_verify(f"/dev/ublkb{disk}", size, SIZES))
    guest.sh(fio_verify("/dev/ublkb0", "1m", "--bs=512"))
    guest.sh("dd if=/dev/urandom of=/dev/ublkb0 bs=1M count=64 oflag=direct conv=fsync 2>/dev/null")
    guest.sh(f"dd if=/dev/ublkb0 bs=1M count=64 iflag=direct 2>/dev/null | cmp - <(cat {BACK}/a {BACK}/b)")
    _memory_is_as_aligned_as_the_file_demands(guest)
    _the_end_inside_a_block_reads_as_zeroes(guest)
    server.stop()
    assert ublk(guest, "list") == []


def _memory_is_as_aligned_as_the_file_demands(guest):
    """Reads into odd memory are refused or right, whatever the alignment, on the disk as on one with copies."""
    guest.sh("head -c 65536 /dev/ublkb0 >/run/head")
    guest.sh("""python3 - <<'END'
import ctypes, mmap, os
want = open("/run/head", "rb").read()
fd = os.open("/dev/ublkb0", os.O_RDONLY | os.O_DIRECT)
read = ctypes.CDLL(None, use_errno=True).pread
memory = mmap.mmap(-1, 1 << 17)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
done = []
for skip in 0, 4, 16, 64, 256, 512, 516, 1024, 2048 + 8:
    for length in 512, 4096, 65536:
        count = read(fd, ctypes.c_void_p(base + skip), ctypes.c_size_t(length), ctypes.c_long(0))
        assert count in (-1, length) and (count == length or ctypes.get_errno() == 22), (skip, length, count)
        assert count == -1 or memory[skip:skip + length] == want[:length], (skip, length)
        done.append(count > 0)
assert done[:3] == [True] * 3, done
END""")


def _the_end_inside_a_block_reads_as_zeroes(guest):
    guest.sh(f"head -c {ODD_BYTES} /dev/urandom >/run/random; cp /run/random {BACK}/odd && sync && echo 3 >/proc/sys/vm/drop_caches")
    size = (ODD_BYTES + 511) // 512 * 512
    last = size // 512 - 1
    guest.sh(f"[ $(blockdev --getsize64 /dev/ublkb2) = {size} ]; cp /run/random /run/whole; truncate -s {size} /run/whole")
    for flags in "iflag=direct", "":
        guest.sh(f"dd if=/dev/ublkb2 bs=512 skip={last - 9} {flags} 2>/dev/null | cmp - <(tail -c 5120 /run/whole)")
    guest.sh("dd if=/dev/ublkb2 bs=1M iflag=direct 2>/dev/null | cmp - /run/whole")
    # The last block may be written as far as the file goes.
    guest.sh(f"dd if=/run/whole of=/dev/ublkb2 bs=512 skip={last} seek={last} oflag=direct conv=fsync 2>/dev/null")
    assert int(guest.sh(f"stat -c %s {BACK}/odd")) == ODD_BYTES
    guest.sh(f"! head -c 512 /dev/urandom | dd of=/dev/ublkb2 bs=512 seek={last} oflag=direct 2>/dev/null")
    assert "I/O error" in guest.sh("dmesg -c"), "the kernel has not seen that the file cannot hold the bytes"
    guest.sh(f"cmp /run/random {BACK}/odd")


@needs_freestone
def kill_9_under_load_is_only_a_pause_for_a_disk_without_copies(lab):
    guest = _boot(lab)
    server = UblkServer(guest, f"{SLOW_FILE} --export ublk:id=0,queues=2 --cores 0,1")
    server.start()
    assert _is_zero_copy(guest, 0)
    load = guest.start("load", fio_verify_until_enough(*LOAD))
    caught = kill_under_load(server, load, KILLS, every_s=0.4, down_s=0.2, disk="ublkb0", count=requeued)
    guest.sh(fio_verify_again(*LOAD))
    server.stop()
    return f"requests in flight at each kill: {caught}"


@needs_freestone
def a_disk_goes_on_with_copies_and_without(lab):
    guest = _boot(lab)
    servers = {
        zero_copy: UblkServer(guest, f"{FILE} --export ublk:id=0,zero-copy={zero_copy} --cores 0", name=zero_copy)
        for zero_copy in ("auto", "off")
    }
    # A disk that was made without copies, and one that was made with them; its successors do as they can.
    for first, second in ("auto", "off"), ("off", "auto"):
        servers[first].start()
        assert _is_zero_copy(guest, 0, first) == (first == "auto")
        load = guest.start("load", fio_verify_until_enough(*LOAD))
        for name in second, first, second:
            servers[first if name == second else second].kill()
            servers[name].start()
            is_zero_copy = first == name == "auto"
            assert _is_zero_copy(guest, 0, name) == is_zero_copy, name
        end_of_load(load)
        guest.sh(fio_verify("/dev/ublkb0", "8m", SIZES))
        guest.sh(f"dd if=/dev/ublkb0 bs=1M iflag=direct 2>/dev/null | cmp - {BACK}/a")
        servers[second].stop()
        assert ublk(guest, "list") == []


@needs_freestone
def a_disk_without_copies_goes_from_core_to_core_and_its_volume_to_a_device_that_needs_them(lab):
    guest = _boot(lab)
    daemon = GuestDaemon(guest, f"--cores 0,1 --sandbox-path {BACK} --sandbox-path /dev/shm")
    daemon.start()
    guest.sh("truncate -s 48M /dev/shm/memory")
    daemon.cli(f"device create disk {BACK}/a")
    daemon.cli("device create memory /dev/shm/memory")
    daemon.cli(f"volume create v1 --device disk --size {FILE_MIB - 8}M")
    daemon.cli("export create vm1 --kind ublk --volume v1 -o queues=2")
    shown = json.loads(daemon.cli("export show vm1 --json"))
    assert shown["description"].endswith(", zero copy"), shown
    load = guest.start("load", fio_verify_until_enough(*LOAD))
    for end in "TERM", "KILL":
        for cores in "--cores 1", "--cores 1,0", "":
            daemon.cli(f"export remap vm1 {cores}")
        daemon.end(end)
        daemon.start()
    daemon.cli("volume move v1 --to memory --wait")
    assert load.is_running(), load.wait()
    end_of_load(load)
    guest.sh(fio_verify_again(*LOAD))
    daemon.cli("export remap vm1 --cores 0")
    guest.sh(fio_verify_again(*LOAD))
    # A person who ends it wants it gone.
    daemon.end("INT")
    assert ublk(guest, "list") == []


def _is_zero_copy(guest, disk, name="server"):
    return f"/dev/ublkb{disk}, zero copy\n" in guest.sh(f"cat /run/{name}.out")


def _boot(lab):
    """Files on a disk of the kernel: in memory, files are copied."""
    guest = lab.boot_alone(cpus=2, kernel=paths.NEW_KERNEL)
    guest.modprobe("ublk_drv", "ext4")
    guest.sh("modprobe null_blk memory_backed=1 nr_devices=1 gb=1")
    guest.sh(f"mkfs.ext4 -q -F /dev/nullb0 256M && mkdir -p {BACK} && mount /dev/nullb0 {BACK}")
    guest.sh(f"cd {BACK}; for name in a b c; do truncate -s {FILE_MIB}M $name; done; truncate -s {ODD_BYTES} odd")
    return guest
