"""A disk as images of clouds hold one: GRUB, a kernel and a root file system with programs of Debian.

    cloud_image.make(raw, paths.KERNEL)     # a raw image of the disk, with little but what it needs to start
    cloud_image.FirmwareGuest([Disk(…)])    # a guest whose firmware starts the first disk; all that it runs is on that disk
    cloud_image.UblkGuest(disk, "top.qcow2")   # a guest whose initramfs serves an image: its root is a disk of its own kernel

The root has the list /sums of its files' checksums, and its /sbin/init ends in guest/agent, so Guest.sh works."""

import contextlib
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile

import paths
from vm import KERNEL_ARGUMENTS, Guest
from workload import MIB, files_under, make_image

SIZE_MIB = 384  # three times what the root needs
FIRST_SECTOR = 2048  # of the one partition; GRUB is before it
ROOT_OFFSET = FIRST_SECTOR * 512
# With all that they depend on. They are copied from this machine, which is a Debian.
PACKAGES = ("base-files", "base-passwd", "bash", "coreutils", "diffutils", "e2fsprogs", "findutils", "grep", "mount",
            "sed", "util-linux")
LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/lintian/")
MERGED = ("bin", "sbin", "lib", "lib64")  # links to the folders of /usr
# The modules with which a guest finds its root, beside those of the lab's initramfs.
ROOT_MODULES = ("virtio_blk", "ext4")
GRUB = os.path.join(paths.LAB, "root", "usr", "lib", "grub", "i386-pc")
GRUB_MODULES = ("biosdisk", "part_msdos", "ext2", "linux", "normal")
MAX_BOOT_CODE = 440  # bytes of the first sector before the partition table
INIT = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin HOME=/root TERM=dumb
mount -o remount,rw /
mount -t tmpfs run /run
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
exec /bin/bash /sbin/agent
"""


def make(path, kernel):
    """Write a raw image of a disk that boots this kernel, a directory of paths.py."""
    with tempfile.TemporaryDirectory(prefix="lab-") as directory:
        tree = os.path.join(directory, "root")
        _copy_packages(tree)
        for name in ("boot/grub", "dev", "proc", "sys", "run", "tmp", "root", "mnt"):
            os.makedirs(os.path.join(tree, name), exist_ok=True)
        _write_program(os.path.join(tree, "sbin/init"), INIT)
        shutil.copy(os.path.join(paths.HERE, "guest", "agent"), os.path.join(tree, "sbin/agent"))
        shutil.copy(os.path.join(kernel, "vmlinuz"), os.path.join(tree, "boot/vmlinuz"))
        make_initramfs(os.path.join(tree, "boot/initrd"), kernel, ROOT_MODULES)
        with open(os.path.join(tree, "boot/grub/grub.cfg"), "w") as file:
            file.write(f"linux /boot/vmlinuz root=/dev/vda1 {KERNEL_ARGUMENTS}\ninitrd /boot/initrd\nboot\n")
        _write_sums(tree)
        make_image(path, SIZE_MIB * MIB)
        partition_bytes = SIZE_MIB * MIB - ROOT_OFFSET
        subprocess.run(["mkfs.ext4", "-q", "-F", "-E", f"offset={ROOT_OFFSET}", "-d", tree, path, f"{partition_bytes >> 10}k"],
                       check=True)
        _make_bootable(path, os.path.join(directory, "core.img"))


def make_initramfs(path, kernel, modules, before_root=""):
    """Write the lab's initramfs with guest/disk-init, these modules and those that they need, and a script, before_root."""
    with tempfile.TemporaryDirectory(prefix="lab-") as tree:
        for name in ("bin", "sbin", "modules"):
            os.mkdir(os.path.join(tree, name))
        shutil.copy(os.path.join(paths.HERE, "guest", "disk-init"), os.path.join(tree, "init"))
        for applet in ("switch_root", "cp"):
            os.symlink("busybox", os.path.join(tree, "bin", applet))
        if before_root:
            _write_program(os.path.join(tree, "before-root"), before_root)
        # The archive that comes first has the modules of the lab's own.
        with open(os.path.join(tree, "modules", "order"), "w") as order:
            for file in _modules_with_needs(kernel, ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", *modules)):
                name = os.path.basename(file).removesuffix(".xz")
                with open(os.path.join(tree, "modules", name), "wb") as module:
                    subprocess.run(["xz" if file.endswith(".xz") else "cat", *(["-dc"] if file.endswith(".xz") else []), file],
                                   stdout=module, check=True)
                print(name, file=order)
        names = "".join(os.path.relpath(os.path.join(parent, name), tree) + "\n"
                        for parent, directories, files in os.walk(tree) for name in [*directories, *files])
        shutil.copy(os.path.join(kernel, "initramfs.cpio"), path)
        with open(path, "ab") as initramfs:
            subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), stdout=initramfs, cwd=tree, check=True)


class FirmwareGuest(Guest):
    """A guest whose firmware starts the first disk. Nothing of the host is seen in it."""

    def _snapshot(self):
        return None

    def _boot_arguments(self, kernel_arguments):
        return []

    def _root_arguments(self):
        return []


class UblkGuest(Guest):
    """A guest whose initramfs starts `freestone serve` on an image; the root is /dev/ublkb0p1."""

    def __init__(self, disk, image, **options):
        """disk: a raw image of a disk with ext4, in which the image has the name `image`."""
        super().__init__(qemu_arguments=["-drive", f"file={disk},format=raw,if=none,id=images,cache=writeback",
                                         "-device", "virtio-blk-pci,drive=images"], **options)
        self.image = image
        self._initramfs = os.path.join(self.directory, "initramfs.cpio")

    def __enter__(self):
        os.makedirs(self.directory, exist_ok=True)
        make_initramfs(self._initramfs, self.kernel, ("ublk_drv", *ROOT_MODULES), self._server_script())
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._initramfs)

    def _snapshot(self):
        return None

    def _boot_arguments(self, kernel_arguments):
        arguments = f"{KERNEL_ARGUMENTS} root=/dev/ublkb0p1"
        return ["-kernel", f"{self.kernel}/vmlinux", "-initrd", self._initramfs, "-append", arguments]

    def _server_script(self):
        """The program is the host's, which is there over 9p."""
        return f"""
until [ -e /sys/bus/virtio/drivers/9pnet_virtio/virtio* ] && [ -b /dev/vda ]; do usleep 5000; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /host
for dir in dev proc sys; do mount -o bind /$dir /host/$dir; done
mount -t ext4 /dev/vda /host/run
chroot /host {paths.FREESTONE} serve --device qcow2:file=/run/{self.image},backing=auto \\
  --export ublk:id=0,queues=2 >/dev/console 2>&1 &
"""


def _copy_packages(tree):
    """Copy the files of the packages, and of those that they need."""
    for name in MERGED:
        os.makedirs(os.path.join(tree, "usr", name), exist_ok=True)
        os.symlink(f"usr/{name}", os.path.join(tree, name))
    listed = subprocess.run(["dpkg-query", "-L", *_with_needs(PACKAGES)], check=True, stdout=subprocess.PIPE, text=True).stdout
    for source in listed.splitlines():
        if not source.startswith("/") or source.startswith(LEFT_OUT) or not os.path.lexists(source):
            continue
        target = os.path.join(tree, source[1:])
        if os.path.lexists(target):
            continue
        if os.path.isdir(source) and not os.path.islink(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    shutil.copy("/etc/ld.so.cache", os.path.join(tree, "etc", "ld.so.cache"))


def _with_needs(packages):
    """The packages and all installed ones that they depend on, by the first name of each alternative that is installed."""
    fields = "${Package}\t${db:Status-Abbrev}\t${Pre-Depends}, ${Depends}\n"
    said = subprocess.run(["dpkg-query", "-W", "-f", fields], check=True, stdout=subprocess.PIPE, text=True).stdout
    needs = {}
    for line in said.splitlines():
        name, status, relations = line.split("\t")
        if status.startswith("ii"):
            needs[name] = [[word.split()[0].split(":")[0] for word in relation.split("|") if word.strip()]
                           for relation in relations.split(",")]
    found, waiting = set(), list(packages)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [next(filter(needs.__contains__, alternatives), None) or name for alternatives in needs[name]]
    return sorted(found)


def _write_program(path, text):
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o755)


def _write_sums(tree):
    """Write /sums: the checksum of every file of the root."""
    lines = []
    for path in files_under(tree):
        with open(path, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {os.path.relpath(path, tree)}\n")
    with open(os.path.join(tree, "sums"), "w") as sums:
        sums.writelines(lines)


def _modules_with_needs(kernel, modules):
    """The files of the modules, in the order in which they are loaded."""
    with open(os.path.join(kernel, "release")) as file:
        release = file.read().strip()
    files = []
    for module in modules:
        said = subprocess.run(["modprobe", "-d", kernel, "-S", release, "--show-depends", module], check=True,
                              stdout=subprocess.PIPE, text=True).stdout
        files += [line.split()[1] for line in said.splitlines() if line.startswith("insmod")]
    return list(dict.fromkeys(files))


def _make_bootable(path, core):
    """Write GRUB's first sector, its core behind that, and the partition table: one partition, for Linux, active."""
    subprocess.run([os.path.join(paths.BIN, "grub-mkimage"), "-d", GRUB, "-O", "i386-pc", "-o", core,
                    "-p", "(hd0,msdos1)/boot/grub", *GRUB_MODULES], check=True)
    with open(os.path.join(GRUB, "boot.img"), "rb") as boot, open(core, "rb") as rest, open(path, "r+b") as disk:
        code = rest.read()
        assert 512 + len(code) <= ROOT_OFFSET, f"GRUB has {len(code)} bytes, more than fit before the partition"
        disk.write(boot.read()[:MAX_BOOT_CODE])
        sectors = SIZE_MIB * MIB // 512 - FIRST_SECTOR
        disk.seek(446)
        disk.write(struct.pack("<B3sB3sII", 0x80, b"\xfe\xff\xff", 0x83, b"\xfe\xff\xff", FIRST_SECTOR, sectors))
        disk.seek(510)
        disk.write(b"\x55\xaa" + code)
