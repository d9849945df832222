"""freestone-csi in a guest, with the disks and mounts of the guest's kernel (tests/csi/real_node.py)."""

import os
import subprocess

import paths
from freestoned import GuestDaemon
from lab import needs_freestone

CSI = os.path.join(paths.REPO, "tests", "csi")
FREESTONE_CSI = os.environ.get("FREESTONE_CSI", os.path.join(os.path.dirname(paths.FREESTONE), "freestone-csi"))
PYTHON = os.path.join(paths.REPO, "target", "csi", "venv", "bin", "python")
DISK = "/dev/shm/disk"
STEPS_TIMEOUT_S = 800


@needs_freestone
def volumes_over_nvme_tcp_are_mounted_grown_and_given_up(lab):
    guest, _ = _boot(lab, "nvme-tcp")
    said = _steps(guest, "nvme-tcp", "$(cat /run/daemon.pid)")
    assert "unstaged" in said, said
    # The kernel says which data it could not write to the daemon that was killed.
    guest.sh("dmesg -C")
    return said.splitlines()[0]


@needs_freestone
def volumes_over_ublk_are_mounted_grown_and_given_up(lab):
    # Older kernels do not resize such disks.
    guest, daemon = _boot(lab, "ublk_drv", kernel=paths.NEW_KERNEL)
    _steps(guest, "ublk")
    daemon.end()


def _boot(lab, module, **options):
    subprocess.run([os.path.join(CSI, "setup")], check=True)
    guest = lab.boot_alone(cpus=2, **options)
    guest.modprobe(module, "ext4", "xfs")
    guest.sh(f"ip link set lo up; truncate -s 3G {DISK}")
    daemon = GuestDaemon(guest)
    daemon.start()
    daemon.cli(f"device create disk {DISK}")
    return guest, daemon


def _steps(guest, kind, more=""):
    said = guest.sh(f"FREESTONE_CSI={FREESTONE_CSI} {PYTHON} {CSI}/real_node.py {kind} {GuestDaemon.DIRECTORY}/d.sock /run/csi {more} 2>&1",
                    timeout_s=STEPS_TIMEOUT_S, check=False)
    assert "passed" in said[1].splitlines()[-1:], said[1]
    return said[1]
