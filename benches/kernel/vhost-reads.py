#!/usr/bin/env python3
"""vhost-reads.py LIBRARY SAMPLES DEPTH SERVER…: instructions, kicks and signals of a random read of 4 KiB, with DEPTH reads in
flight, from a vhost-user server of a null_blk disk. Runs in a guest of benches/kernel/run.

In SERVER, DISK and SOCKET stand for the paths. Prints the median of each figure, a read."""

import ctypes
import os
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "lab" / "guest"))
import vhost_ring as vr  # noqa: E402
from vhost_disks import MIB, NullDisk  # noqa: E402
from vhost_user_front import FrontEnd  # noqa: E402

BLOCK, DISK_MIB, READS = 4096, 1024, 256
POINTERS = ("avail_index", "used_event", "used_index", "avail_event", "avail", "used", "sectors", "statuses")


class Client(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [
        ("blocks", ctypes.c_uint64), ("random", ctypes.c_uint64), ("size", ctypes.c_uint32), ("kick", ctypes.c_uint32),
        ("call", ctypes.c_uint32), ("next", ctypes.c_uint16), ("seen", ctypes.c_uint16)]


class Sample(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("instructions", "reads", "kicks", "signals")]


def main():
    library, samples, depth = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    socket = f"/run/vhost-reads-{os.getpid()}.sock"
    with NullDisk(size=DISK_MIB, memory_backed=0, discard=0, hw_queue_depth=128) as disk:
        words = [word.replace("DISK", disk.path).replace("SOCKET", socket) for word in sys.argv[4:]]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        memory = vr.Memory()
        ring = vr.Ring(memory, event_idx=True)
        requests = [vr.Request(ring, vr.IN, size=BLOCK) for _ in range(depth)]
        front = FrontEnd(socket, memory, [ring], features=vr.FEATURES | vr.F_EVENT_IDX)
        os.set_blocking(ring.call, True)  # qemu-storage-daemon makes it one that does not block
        figures = measure(library, memory, ring, requests, samples)
        front.close()
        server.terminate()
        server.wait(30)
    print(*(f"{figure:.3f}" for figure in figures))


def measure(library, memory, ring, requests, samples):
    base = memory.address()

    def address(gpa):
        return base + memory.at(gpa)

    table = ctypes.c_void_p * ring.size
    sectors, statuses = table(), table()
    for request in requests:
        memory.write(request.status, b"\0")
        sectors[request.head], statuses[request.head] = address(request.header + 8), address(request.status)
    client = Client(
        address(ring.avail + 2), address(ring.avail + 4 + 2 * ring.size), address(ring.used + 2),
        address(ring.used + 4 + 8 * ring.size), address(ring.avail + 4), address(ring.used + 4),
        ctypes.addressof(sectors), ctypes.addressof(statuses), DISK_MIB * MIB // BLOCK, 88172645463325252, ring.size,
        ring.kick, ring.call, 0, 0)
    heads = (ctypes.c_uint32 * len(requests))(*(request.head for request in requests))
    check(library.begin(ctypes.byref(client), heads, len(requests)))
    taken, idle_before, began = [], idle_s(), time.monotonic()
    for _ in range(samples + 2):
        sample = Sample()
        check(library.take(ctypes.byref(client), ctypes.c_uint64(READS), 1, ctypes.byref(sample)))
        taken.append([count / sample.reads for count in (sample.instructions, sample.kicks, sample.signals)])
    idle, ran = idle_s() - idle_before, time.monotonic() - began
    # The clock would run on in an idle processor. The file has hundredths of a second.
    assert idle < 0.02 + ran / 20, f"the processor was idle for {idle:.2f} of {ran:.2f} s"
    check(library.take(ctypes.byref(client), ctypes.c_uint64(len(requests)), 0, ctypes.byref(Sample())))
    # The first ones warm the server up.
    return [statistics.median(figures) for figures in zip(*taken[2:])]


def idle_s():
    with open("/proc/uptime") as file:
        return float(file.read().split()[1])


def check(code):
    assert code == 0, os.strerror(-code)


main()
