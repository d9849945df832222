"""A disk that grows while the guest uses it."""

import os
import time

from lab import IMAGE_MIB, sysfs
from workload import MIB, fio_verify

SEEN_WITHIN_S = 10


def the_guest_sees_the_disk_grow_and_uses_the_new_part(lab):
    guest = lab.boot()
    grown = 2 * IMAGE_MIB * MIB
    load = guest.start("load", fio_verify("/dev/vda", "16m", "--rate_iops=1000"))
    os.truncate(lab.image, grown)
    lab.server.resized()
    deadline = time.monotonic() + SEEN_WITHIN_S
    while int(sysfs(guest, "size")) * 512 != grown:
        assert time.monotonic() < deadline, f"after {SEEN_WITHIN_S} s the guest sees {sysfs(guest, 'size')} sectors"
        time.sleep(0.1)
    guest.sh(fio_verify("/dev/vda", "16m", f"--offset={grown - 16 * MIB}"))
    load.wait()
