"""Disk images in the format qcow2 behind every export: guests that boot from them, loads that verify, kills of the server,
and what QEMU's tools find in the file afterwards."""

import contextlib
import hashlib
import os
import subprocess

import cloud_image
import paths
from lab import needs_freestone
from runner import nightly
from server import Server
from ublk_server import UblkServer, requeued
from vm import Disk
from workload import (ENOUGH, KILLS, MIB, check_tree, copy_tree, fio_verify_again, fio_verify_until_enough, kernel_errors,
                      kill_under_load, make_image, make_tree, requests_in_flight)

# qemu-img check: no errors, or clusters that are neither used nor free.
CLEAN, LEAKS = 0, 3
COPY = "/var/copy"
COPIED = "usr/bin"
IMAGE = "/dev/shm/disk.qcow2"
DISK_MIB = 64
# Linux 6.12 now and then falls over a null pointer in its own ublk driver when a server dies with requests on their way.
KERNEL_FOR_KILLS = paths.NEW_KERNEL
FSX_MIB, FSX_STEPS = 8, 3000
LOAD_MIB = 8
CHURN_AT_MIB, CHURN_MIB = 40, 16
NQN = "nqn.2014-08.org.example:image"
HOST_ID = "4c1d5d0e-6b8f-4d68-8a0a-0d0e6a1b2c3d"
HOST = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
PART_MIB = 8
EXPECTED = "/dev/shm/expected"


class ImageServer(Server):
    """Serves a qcow2 image and the backing files that it names."""

    def device_option(self):
        return f"qcow2:file={self.image},backing=auto{self.device_options}"


@needs_freestone
def a_guest_boots_from_a_compressed_image_below_a_writable_one(lab):
    return _boot_over_vhost_user(lab, "zlib")


@nightly
@needs_freestone
def a_guest_boots_from_an_image_compressed_with_zstd_below_a_writable_one(lab):
    return _boot_over_vhost_user(lab, "zstd")


@needs_freestone
@nightly
def a_guest_boots_from_a_compressed_image_that_its_own_initramfs_serves(lab):
    return _boot_over_ublk(lab, "zstd")


@nightly
@needs_freestone
def a_guest_boots_from_an_image_compressed_with_zlib_that_its_own_initramfs_serves(lab):
    return _boot_over_ublk(lab, "zlib")


def _boot_over_vhost_user(lab, compression):
    base, top = _make_cloud_images(lab, compression)
    before = _sum(base)
    lab.serve(_server(lab, top))
    disk = Disk(lab.server.socket, queues=2, options="bootindex=0")
    took_s = []

    def write_copies_through_kills(guest):
        job = guest.start("copy", f"rm -f {ENOUGH}; until [ -e {ENOUGH} ]; do rm -rf {COPY} && {_COPY_IT} || exit 1; done; sync")
        # The guest's page cache decides when there are writes, so a kill need not catch any.
        kill_under_load(lab.server, job, KILLS, every_s=1, down_s=0.2, count=lambda guest, disk: True)

    for change in write_copies_through_kills, _check_the_copy_and_remove_it:
        guest = lab.start(cloud_image.FirmwareGuest([disk], cpus=2, directory=lab.directory))
        took_s.append(guest.boot_s)
        _check_root(guest, "/dev/vda1")
        change(guest)
        guest.sh("mount -o remount,ro /")
        assert not (errors := kernel_errors(guest)), f"the guest's kernel complains:\n{errors}"
        guest.close()
    lab.guest = None
    lab.stop_server()
    _check(top)
    assert _sum(base) == before, "the backing file has changed"
    _check_partition(lab, top)
    return f"from the firmware to a shell in {took_s[0]:.0f} and {took_s[1]:.0f} s; {KILLS} kills"


def _boot_over_ublk(lab, compression):
    base, top = _make_cloud_images(lab, compression)
    before = _sum(base)
    # The disk that holds the images.
    disk = make_image(_image(lab, "images.raw"), cloud_image.SIZE_MIB * MIB)
    _run("mkfs.ext4", "-q", "-F", disk)
    _run("debugfs", "-w", "-f", "/dev/stdin", disk, input="".join(f"write {path} {os.path.basename(path)}\n" for path in (base, top)))
    took_s = []
    for change in _write_a_copy, _check_the_copy_and_remove_it:
        guest = lab.start(cloud_image.UblkGuest(disk, os.path.basename(top), cpus=2, directory=lab.directory))
        took_s.append(guest.boot_s)
        _check_root(guest, "/dev/ublkb0p1")
        change(guest)
        guest.sh("mount -o remount,ro /")
        assert not (errors := kernel_errors(guest)), f"the guest's kernel complains:\n{errors}"
        guest.close()  # a power cut
    lab.guest = None
    subprocess.run(["e2fsck", "-f", "-y", disk], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for path in base, top:
        _run("debugfs", "-R", f"dump /{os.path.basename(path)} {path}", disk)
    _check(top)
    assert _sum(base) == before, "the backing file has changed"
    _check_partition(lab, top)
    return f"from the start of the kernel to a shell in {took_s[0]:.0f} and {took_s[1]:.0f} s"


def _make_cloud_images(lab, compression):
    """A compressed image of a disk that boots, and an empty image over it."""
    raw, base, top = (_image(lab, name) for name in ("cloud.raw", "base.qcow2", "top.qcow2"))
    cloud_image.make(raw, paths.KERNEL)
    _qemu_img("convert", "-c", "-W", "-f", "raw", "-O", "qcow2", "-o", f"compression_type={compression}", raw, base)
    _freestone("image", "create", "--force", "-f", "qcow2", "-b", os.path.basename(base), "-F", "qcow2", top)
    return base, top


def _check_root(guest, disk):
    """All that the guest runs is on this disk, and each file has the bytes that it was made with."""
    roots = [line.split() for line in guest.sh("cat /proc/mounts").splitlines()]
    assert [root[:3] for root in roots if root[1] == "/"] == [[disk, "/", "ext4"]], roots
    guest.sh("cd / && echo 3 >/proc/sys/vm/drop_caches && sha256sum --quiet -c /sums")


_COPY_IT = f"mkdir -p {COPY}/usr && cp -a /{COPIED} {COPY}/{COPIED}"


def _write_a_copy(guest):
    guest.sh(f"{_COPY_IT} && sync")


def _check_the_copy_and_remove_it(guest):
    guest.sh(f"cd {COPY} && grep ' {COPIED}/' /sums | sha256sum --quiet -c && cd / && rm -r {COPY} && fstrim /")


def _check_partition(lab, image):
    """The file system on the first partition of the image is sound, as QEMU reads it and as Freestone does."""
    raw = _image(lab, "raw")
    _qemu_img("convert", "-f", "qcow2", "-O", "raw", image, raw)
    _run("e2fsck", "-f", "-n", f"{raw}?offset={cloud_image.ROOT_OFFSET}")
    sum_by_qemu = _sum(raw)
    _freestone("image", "convert", "--force", "-f", "qcow2", "--backing", "auto", image, raw)
    assert _sum(raw) == sum_by_qemu, "Freestone reads other bytes than QEMU"


@nightly
@needs_freestone
def fsx_reads_from_an_image_what_it_wrote(lab):
    """The disk is one of the guest's kernel. What it discards must not show the backing file."""
    guest = _boot_with_ublk(lab)
    fsx = subprocess.run([os.path.join(paths.HERE, "fsx")], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    for cluster_size, align in ("512", 512), ("4K", 512), ("64K", 4096):
        guest.sh(f"""
            head -c {FSX_MIB}M /dev/urandom >/dev/shm/base
            {paths.QEMU_IMG} convert -c -f raw -O qcow2 -o cluster_size={cluster_size} /dev/shm/base /dev/shm/base.qcow2
            {paths.FREESTONE} image create --force -f qcow2 -o cluster_size={cluster_size} -b base.qcow2 -F qcow2 {IMAGE}
            printf '%s\n' 'flen = {FSX_MIB * MIB}' 'blockmode = true' '[opsize]' 'align = {align}' '[weights]' \
              'truncate = 0' 'fsync = 1' 'fdatasync = 1' 'invalidate = 5' 'punch_hole = 10' 'posix_fadvise = 3' >/run/fsx.toml""")
        server = UblkServer(guest, f"--device qcow2:file={IMAGE},backing=auto --export ublk:id=0,queues=2 --cores 0,1")
        server.start()
        guest.sh(f"{fsx} -f /run/fsx.toml -P /run -S {align} -N {FSX_STEPS} /dev/ublkb0", timeout_s=600)
        on_disk = guest.sh("sync; sha256sum </dev/ublkb0")
        server.stop()
        assert _check_in(guest) == CLEAN, "clusters have leaked, though the server has ended in order"
        guest.sh(f"{paths.QEMU_IMG} convert -f qcow2 -O raw {IMAGE} /dev/shm/raw")
        assert guest.sh("sha256sum </dev/shm/raw") == on_disk, f"clusters of {cluster_size}: QEMU reads other bytes"


@needs_freestone
def kills_of_the_server_of_a_growing_image_lose_no_completed_write(lab):
    """The disk is one of the guest's kernel."""
    guest = _boot_with_ublk(lab)
    guest.sh(f"{paths.FREESTONE} image create -f qcow2 -o cluster_size=16K {IMAGE} {DISK_MIB}M")
    server = UblkServer(guest, f"--device qcow2:file={IMAGE} --export ublk:id=0,queues=2 --cores 0,1")
    server.start()
    file = ("/dev/ublkb0", f"{LOAD_MIB}m", "--bsrange=4k-64k")
    load = guest.start("load", fio_verify_until_enough(*file))
    churn = guest.start("churn", _allocate_and_free("/dev/ublkb0"))
    found = []

    def checked(guest, disk):
        found.append(_check_in(guest))
        return requeued(guest, disk)

    caught = kill_under_load(server, load, KILLS, every_s=0.4, down_s=0.1, disk="ublkb0", count=checked)
    assert any(caught), f"no kill has caught a request: {caught}"
    churn.wait()
    guest.sh("echo 3 >/proc/sys/vm/drop_caches")
    guest.sh(fio_verify_again(*file))
    guest.sh(f"blkdiscard -o {CHURN_AT_MIB}M -l {CHURN_MIB}M /dev/ublkb0")
    guest.sh(f"cmp -n {CHURN_MIB * MIB} -i {CHURN_AT_MIB * MIB}:0 /dev/ublkb0 /dev/zero")
    on_disk = guest.sh("sha256sum </dev/ublkb0")
    server.stop()
    found.append(_check_in(guest))
    guest.sh(f"{paths.QEMU_IMG} convert -f qcow2 -O raw {IMAGE} /dev/shm/raw")
    assert guest.sh("sha256sum </dev/shm/raw") == on_disk, "QEMU reads other bytes than the disk had"
    return f"requests in flight at each kill: {caught}; qemu-img check ended with {found}"


@needs_freestone
@nightly
def kills_of_the_server_of_a_growing_image_are_only_a_pause(lab):
    """A file system that stays mounted notices no kill, although each one finds writes that were not flushed."""
    tree = f"{lab.directory}/tree"
    make_tree(tree)
    image = _image(lab, "disk.qcow2")
    _freestone("image", "create", "--force", "-f", "qcow2", "-o", "cluster_size=16K", image, "256M")
    guest = lab.boot_on(_server(lab, image), cpus=2)
    guest.modprobe("ext4")
    guest.sh("mkfs.ext4 -q -F /dev/vda && mkdir -p /mnt/disk && mount /dev/vda /mnt/disk")
    guest.sh(copy_tree(tree, "/mnt/disk/tree"))
    file = ("/mnt/disk/file", f"{LOAD_MIB // 2}m", f"--numjobs=2 --offset_increment={LOAD_MIB // 2}m")
    load = guest.start("load", fio_verify_until_enough(*file))
    found = []

    def checked(guest, disk):
        found.append(_check(image))
        return requests_in_flight(guest, disk)

    caught = kill_under_load(lab.server, load, KILLS, every_s=1, down_s=0.2, count=checked)
    assert any(caught), f"no kill has caught a request: {caught}"
    guest.sh(check_tree(tree, "/mnt/disk/tree"))
    guest.sh(fio_verify_again(*file))
    guest.sh("umount /mnt/disk && e2fsck -f -n /dev/vda")
    lab.stop_server()
    found.append(_check(image))
    raw = _image(lab, "raw")
    _qemu_img("convert", "-f", "qcow2", "-O", "raw", image, raw)
    _run("e2fsck", "-f", "-n", raw)
    copied = lab.scratch()
    _run("debugfs", "-R", f"rdump /tree {copied}", raw)
    _run("sha256sum", "--quiet", "-c", f"{tree}.sha256", cwd=os.path.join(copied, "tree"))
    return f"requests in flight at each kill: {caught}; qemu-img check ended with {found}"


@needs_freestone
@nightly
def three_initiators_of_a_kernel_share_an_image_and_find_it_again(lab):
    guest = _boot_with_ublk(lab)
    guest.sh("modprobe -a nvme-tcp nbd && ip link set lo up")
    guest.sh(f"{paths.FREESTONE} image create -f qcow2 {IMAGE} {DISK_MIB}M")
    nvme, nbd, ublk = "/dev/nvme0n1", "/dev/nbd0", "/dev/ublkb0"
    server = UblkServer(guest, f"--device qcow2:file={IMAGE} --export nvme-tcp:listen=127.0.0.1:4420,nqn={NQN}"
                               " --export nbd:socket=/run/nbd.sock --export ublk:id=0 --cores 0,1")
    server.start()
    guest.sh(f"nvme connect -t tcp -a 127.0.0.1 -s 4420 -n {NQN} -i 2 --hostnqn {HOST} --hostid {HOST_ID}"
             f" --reconnect-delay 1 --ctrl-loss-tmo 600; {_until(f'[ -b {nvme} ]')}")
    attach = f"{paths.BIN}/nbd-client -unix /run/nbd.sock {nbd}; {_until('[ $(cat /sys/block/nbd0/size) != 0 ]')}"
    guest.sh(attach)
    guest.sh(f"head -c {3 * PART_MIB}M /dev/urandom >{EXPECTED}")
    disks = (nvme, nbd, ublk)
    for part, disk in enumerate(disks):
        at = part * PART_MIB
        # A mebibyte of the part is discarded, and one is overwritten with zeroes.
        guest.sh(f"dd if={EXPECTED} of={disk} bs=1M skip={at} seek={at} count={PART_MIB} oflag=direct conv=fsync,notrunc status=none"
                 f" && blkdiscard -o {at + 1}M -l 1M {disk} && blkdiscard -z -o {at + 3}M -l 1M {disk}"
                 f" && for i in 1 3; do dd if=/dev/zero of={EXPECTED} bs=1M seek=$(({at} + i)) count=1 conv=notrunc status=none; done"
                 f" && blockdev --flushbufs {disk} && dd if=/dev/zero of={disk} bs=4k seek={DISK_MIB * 256 - 1 - part} count=1"
                 " oflag=direct,dsync conv=notrunc status=none")
    _expect(guest, disks)
    server.kill()
    assert _check_in(guest) in (CLEAN, LEAKS)
    server.start()
    guest.sh(f"{paths.BIN}/nbd-client -d {nbd}; {attach}")
    _expect(guest, disks)
    for part, disk in enumerate(disks):
        at = part * PART_MIB + 5
        guest.sh(f"for to in {disk} {EXPECTED}; do dd if={EXPECTED} of=$to bs=1M skip=0 seek={at} count=1 conv=fsync,notrunc"
                 " status=none; done")
    _expect(guest, disks)
    guest.sh(f"nvme disconnect -n {NQN} && {paths.BIN}/nbd-client -d {nbd}")
    server.stop()
    _check_in(guest)
    guest.sh(f"{paths.QEMU_IMG} convert -f qcow2 -O raw {IMAGE} /dev/shm/raw && cmp -n {3 * PART_MIB * MIB} /dev/shm/raw {EXPECTED}")
    guest.sh("dmesg -C")  # the kernel says that connections were lost


def _expect(guest, disks):
    """Each disk has the expected bytes."""
    for disk in disks:
        guest.sh(f"dd if={disk} bs=1M count={3 * PART_MIB} iflag=direct status=none | cmp - {EXPECTED}")


def _until(condition, seconds=20):
    return f"for i in $(seq {20 * seconds}); do {condition} && exit 0; sleep 0.05; done; exit 1"


def _boot_with_ublk(lab):
    guest = lab.boot_alone(cpus=2, kernel=KERNEL_FOR_KILLS)
    guest.modprobe("ublk_drv")
    return guest


def _allocate_and_free(disk):
    """A guest script: clusters behind the load are written and discarded, for as long as the load runs."""
    return (f"until [ -e /run/enough ]; do dd if=/dev/urandom of={disk} bs=256k seek={4 * CHURN_AT_MIB} count={4 * CHURN_MIB}"
            f" oflag=direct conv=notrunc status=none && blkdiscard -o {CHURN_AT_MIB}M -l {CHURN_MIB}M {disk} || exit 1; done")


def _server(lab, image):
    return ImageServer(image, queues=2, log=os.path.join(lab.directory, "server.log"))


def _image(lab, name):
    """A path in the test's directory, for a file that the test makes and that goes with it."""
    path = os.path.join(lab.directory, name)
    lab.callback(_remove, path)
    return path


def _remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _check(image):
    """The exit code of qemu-img check, which is one of those for a valid image."""
    ended = subprocess.run([paths.QEMU_IMG, "check", "-q", "-f", "qcow2", image], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ended.returncode in (CLEAN, LEAKS), f"qemu-img check ended with {ended.returncode}: {ended.stdout.decode()[-2000:]}"
    return ended.returncode


def _check_in(guest):
    """As _check, of the image in the guest."""
    code, output = guest.sh(f"{paths.QEMU_IMG} check -f qcow2 {IMAGE}", check=False)
    assert code in (CLEAN, LEAKS), f"qemu-img check ended with {code}: {output[-2000:]}"
    return code


def _qemu_img(*arguments):
    _run(paths.QEMU_IMG, *arguments)


def _freestone(*arguments):
    _run(paths.FREESTONE, *arguments)


def _run(*command, **options):
    """Run a program of the host; the error of one that fails has what it printed."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert ended.returncode == 0, f"exit code {ended.returncode}: {' '.join(command)}\n{ended.stdout[-2000:]}"


def _sum(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
