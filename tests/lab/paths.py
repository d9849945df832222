"""Where the lab's things are (tests/lab/setup puts them there), and small helpers that every lab program shares."""

import ctypes
import os
import signal
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(os.path.dirname(HERE))
LAB = os.environ.get("LAB_DIR", os.path.join(REPO, "target", "lab"))
BIN = os.path.join(LAB, "bin")
QEMU = os.path.join(BIN, "qemu-system-x86_64")
QEMU_STORAGE_DAEMON = os.path.join(BIN, "qemu-storage-daemon")
QEMU_IMG = os.path.join(BIN, "qemu-img")
FIO = os.path.join(BIN, "fio")
MDADM = os.path.join(LAB, "root", "sbin", "mdadm")
# What guests boot, unless a test needs what only the newest kernel has: directories with vmlinux, lib/modules, initramfs.cpio.
# The variables name others, such as tests/lab/debug-kernel's.
KERNEL = os.environ.get("LAB_KERNEL", os.path.join(LAB, "kernel"))
NEW_KERNEL = os.environ.get("LAB_NEW_KERNEL", os.path.join(LAB, "kernel-new"))
RELEASE = os.path.join(REPO, "target", "release")
FREESTONE = os.environ.get("FREESTONE", os.path.join(RELEASE, "freestone"))
FREESTONED = os.environ.get("FREESTONED", os.path.join(os.path.dirname(FREESTONE), "freestoned"))
RAID_CHECK = os.environ.get("RAID_CHECK", os.path.join(os.path.dirname(FREESTONE), "raid-check"))
# Built with it.
DRIVER_CHECK = os.path.join(os.path.dirname(FREESTONE), "examples", "driver_check")


def require_setup():
    """Make sure that QEMU and the kernel are there; setup returns at once when they are."""
    subprocess.run([os.path.join(HERE, "setup")], check=True)


def require_freestone():
    for program, variable in ((FREESTONE, "FREESTONE"), (FREESTONED, "FREESTONED")):
        if not os.access(program, os.X_OK):
            sys.exit(f"no program {program}: run `make build`, or name another in the variable {variable}")


def kernel_modules(kernel):
    """The directory with the modules of kernel/, built for a kernel of the lab; at once when they are there. Empty for a
    kernel whose series they do not know."""
    built = subprocess.run([os.path.join(HERE, "kernel-modules"), kernel], check=True, stdout=subprocess.PIPE, text=True)
    return built.stdout.strip()


def dkms_modules():
    """The directory with the modules that freestone-dkms has built (RELEASE/NAME.ko.xz) and its udev rules, and the lower
    folders of a Debian system with udev; at once when they are there."""
    built = subprocess.run([os.path.join(REPO, "tests", "dkms"), "--built"], check=True, stdout=subprocess.PIPE, text=True)
    return built.stdout.splitlines()


def accelerator():
    """kvm where setup saw a guest boot with it, else tcg: a /dev/kvm that exists may still not run a stock kernel."""
    try:
        with open(os.path.join(LAB, "accelerator")) as file:
            return file.read().strip()
    except FileNotFoundError:
        return "tcg"


def last_lines(data, lines=30):
    return "\n".join(bytes(data).decode(errors="replace").replace("\r", "").splitlines()[-lines:])


def tail(path, lines=30):
    """The last lines of a file; empty when there is none."""
    try:
        with open(path, "rb") as file:
            return last_lines(file.read(), lines)
    except FileNotFoundError:
        return ""


def is_listened_at(path):
    """Whether a program listens at a Unix socket, whose file is there a moment before. Makes no connection."""
    accepts = 0x10000  # __SO_ACCEPTCON, include/linux/net.h
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as sockets:
        found = [line.split(maxsplit=7) for line in sockets]
    return any(fields[-1].rstrip("\n") == path and int(fields[3], 16) & accepts for fields in found if len(fields) == 8)


def die_with_parent():
    """Runs in a child: the kernel kills it when this program is killed, so that no guest or server is left behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
