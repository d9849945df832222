"""The write cache: shown to the guest, and switched by it (VIRTIO_BLK_F_CONFIG_WCE)."""

from lab import needs_freestone, sysfs
from workload import fio_verify


def the_guest_switches_the_write_cache_off_and_on(lab):
    guest = lab.boot()
    for mode in ("write back", "write through", "write back"):
        guest.sh(f"echo '{mode}' >/sys/block/vda/cache_type")
        assert sysfs(guest, "cache_type") == mode
        assert sysfs(guest, "queue/write_cache") == mode
        guest.sh(fio_verify("/dev/vda", "4m", "--fsync=32"))


@needs_freestone
def a_disk_may_start_with_its_write_cache_off(lab):
    guest = lab.boot(export_options=",writeback=off")
    assert sysfs(guest, "cache_type") == "write through"
    guest.sh(fio_verify("/dev/vda", "4m"))
