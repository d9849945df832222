"""File systems on the disk: made, filled with real files, read back, checked."""

from runner import nightly
from workload import check_tree, copy_tree, make_tree

IMAGE_MIB = 512  # mkfs.xfs wants 300 MiB


def ext4_keeps_a_tree_of_files(lab):
    _keeps_a_tree(lab, "ext4", "mkfs.ext4 -q -F /dev/vda", "e2fsck -f -n /dev/vda")


@nightly
def xfs_keeps_a_tree_of_files(lab):
    _keeps_a_tree(lab, "xfs", "mkfs.xfs -q -f /dev/vda", "xfs_repair -n /dev/vda")


def _keeps_a_tree(lab, module, make, check):
    tree = f"{lab.directory}/tree"
    make_tree(tree)
    guest = lab.boot(queues=2, cpus=2, size_mib=IMAGE_MIB)
    guest.modprobe(module)
    guest.sh(f"{make} && mkdir -p /mnt/disk && mount /dev/vda /mnt/disk")
    guest.sh(copy_tree(tree, "/mnt/disk/tree"))
    guest.sh(f"umount /mnt/disk && {check} && mount /dev/vda /mnt/disk")
    guest.sh(check_tree(tree, "/mnt/disk/tree"))
    guest.sh("rm -r /mnt/disk/tree && fstrim /mnt/disk")
    guest.sh(f"umount /mnt/disk && {check}")
