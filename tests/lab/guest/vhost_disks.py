"""Disks for the checks of /dev/vhost-blk: of null_blk, by its configfs (nr_devices=0), and of the device mapper."""

import mmap
import os
import subprocess
import time

CONFIGFS = "/sys/kernel/config/nullb"
MIB = 1 << 20
DISK_MIB = 32


class NullDisk:
    """A disk of null_blk, which keeps its data in memory. It is gone at the end of the `with`."""

    count = 0

    def __init__(self, **settings):
        self.settings = {"size": DISK_MIB, "memory_backed": 1, "discard": 1, "submit_queues": 1, **settings}

    def __enter__(self):
        NullDisk.count += 1
        self.name = f"checked{NullDisk.count}"
        self.directory, self.path = f"{CONFIGFS}/{self.name}", f"/dev/{self.name}"
        os.mkdir(self.directory)
        for name, value in self.settings.items():
            self.set(name, value)
        self.set("power", 1)
        deadline = time.monotonic() + 10
        while not os.path.exists(self.path):
            assert time.monotonic() < deadline, f"no {self.path}"
            time.sleep(0.01)
        return self

    def set(self, name, value):
        with open(f"{self.directory}/{name}", "w") as file:
            file.write(str(value))

    def __exit__(self, *_):
        os.rmdir(self.directory)

    def read(self, offset, size):
        """What the disk holds, past the page cache."""
        disk = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, size)
        assert os.preadv(disk, [buffer], offset) == size
        os.close(disk)
        return buffer[:]

    def write(self, offset, data):
        """Changes what the disk holds, past the page cache."""
        disk = os.open(self.path, os.O_WRONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, len(data))
        buffer[:] = data
        assert os.pwritev(disk, [buffer], offset) == len(data)
        os.close(disk)

    def in_flight(self):
        with open(f"/sys/block/{self.name}/inflight") as file:
            return sum(map(int, file.read().split()))


class Mapped:
    """A disk of the device mapper, by its table. It is gone at the end of the `with`."""

    def __init__(self, name, *table):
        self.name, self.table = name, "\n".join(table)

    def __enter__(self):
        subprocess.run(["dmsetup", "create", "--noudevsync", self.name, "--table", self.table], check=True)
        minor = subprocess.run(["dmsetup", "info", "-c", "--noheadings", "-o", "minor", self.name], check=True, stdout=subprocess.PIPE, text=True)
        self.path = f"/dev/dm-{minor.stdout.strip()}"
        return self

    def set(self, command):
        """Suspends (without a flush of what is in flight) or resumes it."""
        subprocess.run(["dmsetup", command, "--noudevsync", *(["--noflush", "--nolockfs"] if command == "suspend" else []), self.name], check=True)

    def set_table(self, *table):
        subprocess.run(["dmsetup", "reload", "--noudevsync", self.name, "--table", "\n".join(table)], check=True)
        self.set("suspend")
        self.set("resume")

    def __exit__(self, *_):
        subprocess.run(["dmsetup", "remove", "--noudevsync", self.name], check=True)
