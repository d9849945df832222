#!/usr/bin/env python3
"""The node of freestone-csi with disks and mounts of the kernel: runs in a guest, beside a daemon with the device `disk`.

    tests/csi/real_node.py nvme-tcp|ublk SOCKET DIRECTORY [PID|sanity|direct]

With PID, that of the daemon, the last step kills it while a volume is in use. `sanity` runs csi-sanity instead of the steps;
`direct` has a direct volume as the only step."""

import json
import os
import signal
import stat
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(REPO, "tests", "lab"), os.path.join(REPO, "target", "csi", "messages")]

import conformance  # noqa: E402
from driver import MIB, SINGLE_WRITER, Driver, block, mount  # noqa: E402

# Unmounting has 30 s, and the system gets some time.
MOST_OF_AN_UNSTAGE_S = 90
SANITY_TIMEOUT_S = 1500


class Volume:
    """A volume, and the calls for it in their order."""

    def __init__(self, driver, name, capability, size=64 * MIB):
        self.driver, self.capability = driver, capability
        self.node = driver.call("NodeGetInfo").node_id
        self.staging, self.target = driver.path(f"{name}-staging"), driver.path(f"{name}-target")
        self.id, self.context = driver.create(name, size, capability), {}

    def attach(self, capability=None, check=True):
        """Publish it to the node and stage it; with check off, the refusal of the staging."""
        capability = capability or self.capability
        answer = self.driver.call("ControllerPublishVolume", volume_id=self.id, node_id=self.node, volume_capability=capability)
        self.fields = {"volume_id": self.id, "publish_context": answer.publish_context, "volume_context": self.context,
                       "volume_capability": capability, "staging_target_path": self.staging}
        if not check:
            return self.driver.refusal("NodeStageVolume", **self.fields)
        for _ in range(2):
            self.driver.call("NodeStageVolume", **self.fields)
            self.driver.restart()
        return None

    def publish(self, readonly=False):
        for _ in range(2):
            self.driver.call("NodePublishVolume", **self.fields, target_path=self.target, readonly=readonly)

    def unpublish(self):
        for _ in range(2):
            self.driver.call("NodeUnpublishVolume", volume_id=self.id, target_path=self.target)
        assert not os.path.exists(self.target)

    def unstage(self):
        for _ in range(2):
            self.driver.call("NodeUnstageVolume", volume_id=self.id, staging_target_path=self.staging)

    def delete(self):
        self.driver.call("ControllerUnpublishVolume", volume_id=self.id, node_id=self.node)
        self.driver.call("DeleteVolume", volume_id=self.id)


def disks():
    """The disks of nvme-tcp and ublk that the kernel has."""
    return {name for name in os.listdir("/sys/block") if name.startswith(("nvme", "ublk"))}


def files_stay(driver, fs_type):
    """A file system is made once, grows in use, and keeps its files."""
    volume = Volume(driver, f"files-{fs_type}", mount(fs_type=fs_type), 320 * MIB)  # XFS has 300 MiB at least
    volume.attach()
    volume.publish()
    with open(os.path.join(volume.target, "file"), "w", encoding="utf-8") as file:
        file.write("data")
    total = lambda: driver.call("NodeGetVolumeStats", volume_id=volume.id, volume_path=volume.target).usage[0].total
    before, size = total(), 2 * volume_size(driver, volume)
    driver.call("ControllerExpandVolume", volume_id=volume.id, capacity_range={"required_bytes": size})
    grown = driver.call("NodeExpandVolume", volume_id=volume.id, volume_path=volume.target, capacity_range={"required_bytes": size})
    assert grown.capacity_bytes == size and total() > 1.5 * before, (grown, before, total())
    refusal = driver.refusal("NodeUnstageVolume", volume_id=volume.id, staging_target_path=volume.staging)
    assert refusal.code == "FAILED_PRECONDITION", refusal
    volume.unpublish()
    volume.unstage()
    assert not os.path.ismount(volume.staging) and not disks(), disks()
    volume.attach()
    volume.publish(readonly=True)
    with open(os.path.join(volume.target, "file"), encoding="utf-8") as file:
        assert file.read() == "data"
    try:
        with open(os.path.join(volume.target, "other"), "w", encoding="utf-8"):
            raise AssertionError("a read-only mount was written")
    except OSError:
        pass
    volume.unpublish()
    volume.unstage()
    volume.delete()


def volume_size(driver, volume):
    return driver.call("ControllerGetVolume", volume_id=volume.id).volume.capacity_bytes


def blocks_are_a_device_and_foreign_data_is_kept(driver):
    """A block volume is the disk itself; a file system is not made over its data."""
    volume = Volume(driver, "blocks", block())
    volume.attach()
    volume.publish()
    assert stat.S_ISBLK(os.stat(volume.target).st_mode)
    disk = os.open(volume.target, os.O_RDWR)
    assert os.lseek(disk, 0, os.SEEK_END) == volume_size(driver, volume)
    os.pwrite(disk, b"mine", 4096)
    os.fsync(disk)
    os.close(disk)
    volume.unpublish()
    volume.unstage()
    refusal = volume.attach(mount(), check=False)
    assert refusal.code == "INTERNAL" and "data at 4096" in refusal.message, refusal
    volume.unstage()
    volume.delete()
    assert not disks(), disks()


def a_direct_volume_of_kata_has_a_file_system(driver):
    """It is made and grown by a disk that the kernel has for a moment only."""
    volume = Volume(driver, "direct", mount(SINGLE_WRITER))
    volume.context, directory = {"node-backend": "kata"}, driver.path("kata")
    for _ in range(2):
        volume.attach()
        assert not disks(), disks()
        volume.publish()
        [place] = os.listdir(directory)
        with open(os.path.join(directory, place, "mountInfo.json"), encoding="utf-8") as file:
            assert stat.S_ISSOCK(os.stat(json.load(file)["device"]).st_mode)
        volume.unpublish()
        assert not os.listdir(directory)
        volume.unstage()
        size = 2 * volume_size(driver, volume)
        driver.call("ControllerExpandVolume", volume_id=volume.id, capacity_range={"required_bytes": size})
    # Now this machine mounts it, as the guest would: it was grown once, to half of the size.
    volume.context = {}
    volume.attach()
    volume.publish()
    total = driver.call("NodeGetVolumeStats", volume_id=volume.id, volume_path=volume.target).usage[0].total
    assert size / 4 < total < size / 2, (size, total)
    volume.unpublish()
    volume.unstage()
    volume.delete()


def a_daemon_that_is_gone_does_not_hold_the_node(driver, pid):
    """Unstaging ends in time, though the data of the file system cannot be written."""
    volume = Volume(driver, "gone", mount())
    volume.attach()
    with open(os.path.join(volume.staging, "file"), "wb") as file:
        file.write(b"x" * MIB)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    driver.call("NodeUnstageVolume", volume_id=volume.id, staging_target_path=volume.staging)
    took_s = time.monotonic() - began
    assert took_s < MOST_OF_AN_UNSTAGE_S and not os.path.ismount(volume.staging), took_s
    print(f"unstaged {took_s:.0f} s after the daemon was killed")


def steps(driver, pid=None):
    """The life of volumes, with and without a file system."""
    for fs_type in ("ext4", "xfs"):
        files_stay(driver, fs_type)
    blocks_are_a_device_and_foreign_data_is_kept(driver)
    if pid:
        a_daemon_that_is_gone_does_not_hold_the_node(driver, int(pid))


def sanity(driver):
    """All specs of csi-sanity, which mount and unmount disks of the kernel."""
    for kind in conformance.KINDS:
        print(conformance.run(driver, kind, SANITY_TIMEOUT_S))
        assert not disks(), disks()


def main():
    kind, daemon, directory, *more = sys.argv[1:]
    entry = f'[[backend]]\nname = "rack1"\nurl = "unix://{daemon}"\nlisten = "127.0.0.1:4420-4499"\nbacking = "disk"\n'
    driver = Driver(directory, [entry], "--host-nqn", Driver.host("node"), "--socket", daemon,
                    "--kata-dir", os.path.join(directory, "kata"), node=kind)
    driver.start()
    try:
        apart = {"sanity": sanity, "direct": a_direct_volume_of_kata_has_a_file_system}
        if more and more[0] in apart:
            apart[more[0]](driver)
        else:
            steps(driver, *more)
        driver.stop()
    except BaseException:
        print(driver.log())
        raise
    finally:
        driver.close()
    print("passed")


if __name__ == "__main__":
    main()
