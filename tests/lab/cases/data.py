"""Reads, writes, discards and write zeroes, each checked for what it must and must not change."""

import os

from lab import FEATURE_WRITE_ZEROES, features
from workload import MIB, fio_verify

# The disk's first `count` MiB become x, the letter.
FILL = "tr '\\0' 'x' </dev/zero | dd of=/dev/vda bs=1M iflag=fullblock oflag=direct conv=fsync 2>&1"


def random_writes_are_read_back_with_their_checksums(lab):
    guest = lab.boot(queues=2, cpus=2)
    guest.sh(fio_verify("/dev/vda", "32m", "--bs=4k"))
    guest.sh(fio_verify("/dev/vda", "32m", "--bsrange=4k-256k --iodepth=4"))


def a_block_changed_behind_the_guest_is_noticed(lab):
    """The proof that the other tests would see wrong data."""
    guest = lab.boot()
    guest.sh(fio_verify("/dev/vda", "4m"))
    with open(lab.image, "r+b") as file:
        file.seek(MIB + 100)
        file.write(b"wrong")
        os.fsync(file.fileno())
    code, output = guest.sh(fio_verify("/dev/vda", "4m", "--verify_only"), check=False)
    assert code != 0 and "verify" in output, f"fio ended with code {code}:\n{output}"


def mixed_reads_and_writes_keep_their_checksums(lab):
    guest = lab.boot(queues=2, cpus=2)
    guest.sh(fio_verify("/dev/vda", "16m", "--rw=randrw --rwmixread=50 --fsync=64"))


def trims_run_beside_verified_writes(lab):
    guest = lab.boot(queues=2, cpus=2)
    guest.sh(FILL + " count=32")
    trims = f"--name=trim --filename=/dev/vda --rw=randtrim --bs=16k --offset={16 * MIB} --size={16 * MIB}"
    guest.sh(fio_verify("/dev/vda", "16m", f"{trims} --ioengine=libaio --iodepth=8 --direct=1"))
    # Every block of the second half was trimmed once: a file reads as zeroes there.
    guest.sh(f"cmp -n {16 * MIB} -i {16 * MIB}:0 /dev/vda /dev/zero")


def discard_frees_the_file_and_leaves_the_neighbours(lab):
    guest = lab.boot()
    _fill(guest)
    before = _allocated(lab.image)
    guest.sh(f"blkdiscard -o {2 * MIB} -l {4 * MIB} /dev/vda")
    _check_hole(guest)
    freed = before - _allocated(lab.image)
    assert freed >= 3 * MIB, f"4 MiB were discarded, the image file shrank by {freed} bytes only"


def write_zeroes_clears_and_leaves_the_neighbours(lab):
    guest = lab.boot()
    assert FEATURE_WRITE_ZEROES in features(guest)
    # Punching a hole in a block device is a write-zeroes request that may unmap; the kernel has no other way for it.
    _fill(guest)
    guest.sh(f"fallocate --punch-hole -o {2 * MIB} -l {4 * MIB} /dev/vda")
    _check_hole(guest)
    # This one may not unmap.
    _fill(guest)
    guest.sh(f"blkdiscard -z -o {2 * MIB} -l {4 * MIB} /dev/vda")
    _check_hole(guest)


def _fill(guest):
    guest.sh(FILL + " count=8")


def _check_hole(guest):
    """MiB 2 to 6 are zero, MiB 0, 1, 6 and 7 are as _fill left them; read from the disk."""
    guest.sh("""
        part() { dd if=/dev/vda bs=1M skip=$1 count=$2 iflag=direct 2>/dev/null; }
        [ $(part 2 4 | tr -d '\\0' | wc -c) = 0 ] || { echo "the middle is not zero"; exit 1; }
        for i in 0 6; do
            [ $(part $i 2 | tr -d 'x' | wc -c) = 0 ] || { echo "the neighbours at $i MiB were changed"; exit 1; }
        done""")


def _allocated(path):
    return os.stat(path).st_blocks * 512
