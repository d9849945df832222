"""What the guest is told about the disk: serial, sizes, limits, read-only."""

import hashlib
import os

from lab import IMAGE_MIB, needs_freestone, sysfs
from workload import MIB, fio_verify, make_image


@needs_freestone
def the_serial_reaches_the_guest(lab):
    guest = lab.boot(export_options=",serial=FREESTONE-0042")
    assert sysfs(guest, "serial") == "FREESTONE-0042"


def size_and_limits_reach_the_guest(lab):
    guest = lab.boot()
    assert int(sysfs(guest, "size")) * 512 == IMAGE_MIB * MIB
    queue = {name: int(sysfs(guest, f"queue/{name}")) for name in (
        "logical_block_size", "physical_block_size", "minimum_io_size", "optimal_io_size", "max_segments",
        "discard_granularity", "discard_max_bytes", "max_discard_segments", "write_zeroes_max_bytes")}
    assert queue["logical_block_size"] in (512, 4096), queue
    assert queue["physical_block_size"] % queue["logical_block_size"] == 0, queue
    assert queue["minimum_io_size"] >= queue["logical_block_size"], queue
    assert queue["max_segments"] >= 16, queue
    assert queue["discard_granularity"] >= queue["logical_block_size"], queue
    assert queue["discard_max_bytes"] > 0 and queue["write_zeroes_max_bytes"] > 0, queue


@needs_freestone
def a_disk_of_4096_byte_blocks_keeps_its_data(lab):
    guest = lab.boot(device_options=",block-size=4096")
    assert sysfs(guest, "queue/logical_block_size") == "4096"
    assert int(sysfs(guest, "size")) * 512 == IMAGE_MIB * MIB, "the guest counts in 512 bytes, whatever the block"
    guest.sh(fio_verify("/dev/vda", "8m"))


def a_read_only_disk_is_read_and_never_written(lab):
    image = make_image(os.path.join(lab.directory, "read-only.img"), 16 * MIB)
    with open(image, "r+b") as file:
        file.write(os.urandom(MIB))
    before = _sha256(image)
    guest = lab.boot(image=image, device_options=",readonly=on")
    assert sysfs(guest, "ro") == "1"
    assert guest.sh("sha256sum </dev/vda").split()[0] == before
    code, _ = guest.sh("dd if=/dev/zero of=/dev/vda bs=4k count=1 oflag=direct", check=False)
    assert code != 0, "a write to a read-only disk succeeded"
    assert _sha256(image) == before
    os.unlink(image)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
