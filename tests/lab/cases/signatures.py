"""`freestone array create` on what other programs have made: it names each format, and changes nothing without --force.

crates/signatures has the table. Debian has no bcachefs-tools; that format is tried by the crate's own tests only."""

import hashlib
import os
import subprocess

import paths
from lab import needs_freestone
from workload import MIB

BLANK_MIB, SIZE_MIB, GUEST_MIB = 64, 320, 40  # the smallest XFS has 300 MiB
LONGEST_S = 120
TREE = os.path.join(paths.HERE, "cases")
SECRET = "--object secret,id=key,data=secret -o key-secret=key,iter-time=10"
# The name in the message, and a command that makes an image at FILE: of an empty file of SIZE_MIB, or a new one.
MADE_NEW = [
    ("qcow image", "qemu-img create -f qcow2 FILE 64M"),
    ("QED image", "qemu-img create -f qed FILE 64M"),
    ("VMDK image", "qemu-img create -f vmdk FILE 64M"),
    ("VHDX image", "qemu-img create -f vhdx FILE 64M"),
    ("VHD image", "qemu-img create -f vpc FILE 64M"),
    ("VDI image", "qemu-img create -f vdi FILE 64M"),
    ("Parallels image", "qemu-img create -f parallels FILE 64M"),
    ("LUKS", f"qemu-img create -f luks {SECRET} FILE 8M"),
    ("SquashFS", f"mksquashfs {TREE} FILE -quiet -no-progress"),
    ("EROFS", f"mkfs.erofs FILE {TREE}"),
    ("ISO 9660", f"genisoimage -quiet -o FILE {TREE}"),
]
MADE_IN_PLACE = [
    ("ext2/3/4", "mkfs.ext4 -q -F FILE"),
    ("XFS", "mkfs.xfs -q -f FILE"),
    ("Btrfs", "mkfs.btrfs -q -f FILE"),
    ("F2FS", "mkfs.f2fs -q -f FILE"),
    ("FAT", "mkfs.fat -F 12 FILE 4096"),
    ("FAT", "mkfs.fat -F 16 FILE"),
    ("FAT", "mkfs.fat -F 32 FILE"),
    ("exFAT", "mkfs.exfat FILE"),
    ("NTFS", "mkntfs -q -Q -F FILE"),
    ("UDF", "mkudffs FILE"),
    ("swap space", "mkswap FILE"),
    ("GPT", "echo 'label: gpt' | sfdisk -q FILE"),
    ("partition table (MBR)", "printf 'label: dos\\n8192\\n' | sfdisk -q FILE"),
    ("VHD image", "qemu-img create -f vpc -o subformat=fixed,force_size=on FILE 64M"),
]
# In a guest, whose kernel has MD and loop devices: LOOPS are two of them.
MADE_IN_A_GUEST = [
    *((f"Linux MD {version}", f"{paths.MDADM} --create /dev/md0 --run --assume-clean --metadata={version} --level=1 --raid-devices=2"
                              f" LOOPS && {paths.MDADM} --stop /dev/md0") for version in ("0.90", "1.0", "1.1", "1.2")),
    ("DDF RAID", f"{paths.MDADM} --create /dev/md0 --run --metadata=ddf --level=container --raid-devices=2 LOOPS && {paths.MDADM} --stop /dev/md0"),
    ("LVM physical volume", "lvm pvcreate -q --config 'devices { use_devicesfile = 0 } global { event_activation = 0 }' LOOPS"),
]
PATH = f"PATH={paths.BIN}:$PATH:/usr/sbin:/sbin"


@needs_freestone
def an_array_is_not_made_of_what_other_programs_have_made_unless_forced(lab):
    directory = lab.scratch()
    blank = [_blank(os.path.join(directory, f"blank{number}")) for number in range(2)]
    for number, (kind, command) in enumerate(MADE_NEW + MADE_IN_PLACE):
        path = os.path.join(directory, f"image{number}")
        if (kind, command) in MADE_IN_PLACE:
            _blank(path, SIZE_MIB)
        done = _run(f"{PATH} LC_ALL=C; {command.replace('FILE', path)}", directory)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        os.truncate(path, max(os.path.getsize(path), BLANK_MIB * MIB))
        _is_refused(directory, [blank[0], path, blank[1]], path, kind, command)
        if (kind, command) != MADE_IN_PLACE[-1]:
            os.unlink(path)
    # What was refused above is accepted by force; and it was the image that was refused.
    done = _create(directory, "--force", blank[0], path, blank[1])
    assert done.returncode == 0, done.stdout
    _is_refused(directory, [blank[0]] + [_blank(os.path.join(directory, f"more{number}")) for number in range(2)], blank[0],
                "Freestone array", "freestone array create")
    for name in blank:
        _blank(name)
    done = _create(directory, _blank(path), *blank)
    assert done.returncode == 0, done.stdout
    return f"{len(MADE_NEW + MADE_IN_PLACE)} images of other programs"


@needs_freestone
def an_array_is_not_made_of_members_of_md_and_lvm_unless_forced(lab):
    guest = lab.boot_alone()
    guest.modprobe("loop", "raid1", "md_mod")
    create = f"{paths.FREESTONE} array create test --level 5"
    for kind, command in MADE_IN_A_GUEST:
        guest.sh(f"rm -f /dev/shm/*; cd /dev/shm; truncate -s {GUEST_MIB}M a b c d; for i in 0 1; do losetup -d /dev/loop$i 2>/dev/null || true; done;"
                 " losetup /dev/loop0 a && losetup /dev/loop1 b")
        guest.sh(f"{PATH} DM_DISABLE_UDEV=1; export DM_DISABLE_UDEV; {command.replace('LOOPS', '/dev/loop0 /dev/loop1')} 2>&1")
        guest.sh("sync; cd /dev/shm; cp --sparse=always a before")
        code, said = guest.sh(f"cd /dev/shm; {create} /dev/loop0 c d 2>&1", check=False)
        assert code == 1 and f"loop0 holds {kind} at byte" in said, f"{command}: exit code {code}\n{said}"
        changed = guest.sh("sync; cd /dev/shm; cmp a before || true; stat -c '%n has %b blocks' c d | grep -v ' 0 ' || true")
        assert not changed, f"{command}: a refused create has written: {changed}"
    guest.sh(f"cd /dev/shm; {create} --force /dev/loop0 c d 2>&1")


def _blank(path, size_mib=BLANK_MIB):
    """A file that has nothing but its size."""
    with open(path, "wb") as file:
        file.truncate(size_mib * MIB)
    return path


def _run(command, directory):
    return subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, cwd=directory, timeout=LONGEST_S, env={**os.environ, "XDG_RUNTIME_DIR": directory})


def _create(directory, *arguments):
    return _run(f"{paths.FREESTONE} array create test --level 5 {' '.join(arguments)}", directory)


def _is_refused(directory, members, image, kind, made_by):
    before = [_content(path) for path in members]
    done = _create(directory, *members)
    assert done.returncode == 1, f"{made_by}: exit code {done.returncode}\n{done.stdout}"
    assert f"{os.path.basename(image)} holds {kind} at byte" in done.stdout, f"{made_by}: {done.stdout}"
    assert [_content(path) for path in members] == before, f"{made_by}: a refused create has written"


def _content(path):
    """What is to stay the same: nothing of a file without data is read."""
    if os.stat(path).st_blocks == 0:
        return "blank"
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
