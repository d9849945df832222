"""Modules that the package freestone-dkms has built (tests/dkms): modprobe loads them, udev gives their nodes to groups."""

import os

import paths
from lab import needs_freestone
from runner import Skipped, nightly
from workload import prepare_null_disks

CHECK = os.path.join(paths.HERE, "guest", "vhost-blk-check")
CASES = "every_layout_of_descriptors_is_served flush_and_get_id_are_served"

# Answers CUSE_INIT (linux/fuse.h) with a device's name.
NODE_IN_USER_SPACE = """
import os, struct, time
cuse = os.open("/dev/cuse", os.O_RDWR)
request = os.read(cuse, 1 << 20)
unique, = struct.unpack_from("<Q", request, 8)
answer = struct.pack("<18I", 7, 31, 0, 0, 4096, 4096, *[0] * 12) + b"DEVNAME=vdac0\\0"
os.write(cuse, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
time.sleep(1000)
"""


@needs_freestone
def modules_of_the_package_load_and_answer_on_the_first_kernel(lab):
    return _load_and_answer(lab, paths.KERNEL)


@nightly
@needs_freestone
def modules_of_the_package_load_and_answer_on_the_newest_kernel(lab):
    return _load_and_answer(lab, paths.NEW_KERNEL)


def _load_and_answer(lab, kernel):
    if os.getuid() != 0:
        raise Skipped("a Debian system in a folder needs root")
    directory, lower = paths.dkms_modules()
    with open(f"{kernel}/release") as release:
        is_built = os.path.isdir(f"{directory}/{release.read().strip()}")
    if not is_built:
        raise Skipped("kernel/ does not know the series of this kernel")
    guest = lab.boot_alone(cpus=2, kernel=kernel)
    # depmod reads each module: under emulation, only those that are needed.
    guest.sh(f"""
        release=$(uname -r)
        modules=/run/modules/lib/modules/$release
        mkdir -p $modules/kernel/drivers $modules/updates/dkms
        cp -r /lib/modules/$release/kernel/drivers/vhost $modules/kernel/drivers/
        cp /lib/modules/$release/modules.builtin* /lib/modules/$release/modules.order $modules/
        cp {directory}/$release/*.ko.xz $modules/updates/dkms/
        depmod -b /run/modules $release
        modprobe -d /run/modules vhost_blk
        [ "$(modinfo -b /run/modules -F filename vhost_blk)" = $modules/updates/dkms/vhost_blk.ko.xz ]""")
    # udev of the system that the package was installed in. Without the variable, its programs do nothing in a chroot.
    guest.sh(f"""
        mkdir -p /run/system/upper /run/system/work /run/udev-root
        mount -t overlay -o lowerdir={lower},upperdir=/run/system/upper,workdir=/run/system/work system /run/udev-root
        cd /run/udev-root
        export SYSTEMD_IGNORE_CHROOT=1
        for dir in dev proc sys; do mount --rbind /$dir $dir; done
        mkdir -p run
        cp {directory}/60-freestone-dkms.rules usr/lib/udev/rules.d/
        chroot . /usr/lib/systemd/systemd-udevd --daemon
        [ "$(stat -c %a:%g /dev/vhost-blk)" = 600:0 ]
        chroot . udevadm trigger --action=add --settle /sys/class/misc/vhost-blk""")
    group_and_mode = guest.sh("chroot /run/udev-root stat -c %G:%a /dev/vhost-blk").strip()
    assert group_and_mode == "kvm:660", group_and_mode
    # A character device of user space (CUSE) with the name of a disk's pass-through node; it is gone with its program.
    guest.modprobe("cuse")
    guest.start("node", f"exec python3 -c '{NODE_IN_USER_SPACE}'")
    group_and_mode = guest.sh("""
        until [ -e /dev/vdac0 ]; do [ ! -e /run/node.code ]; sleep 0.1; done
        SYSTEMD_IGNORE_CHROOT=1 chroot /run/udev-root udevadm trigger --action=add --settle /sys/class/cuse/vdac0
        chroot /run/udev-root stat -c %G:%a /dev/vdac0
        pkill -f DEVNAME=vdac0""").strip()
    assert group_and_mode == "disk:660", group_and_mode
    prepare_null_disks(guest)
    said = guest.sh(f"{CHECK} {CASES}")
    guest.sh("modprobe -d /run/modules -r vhost_blk; [ ! -e /dev/vhost-blk ]; pkill systemd-udevd")
    return said.strip()
