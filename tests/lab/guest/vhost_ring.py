"""Split rings made by hand, and /dev/vhost-blk to serve them: no virtual machine is needed.

The memory that a driver would own is a memfd. Half of it stands behind the other half in the device's memory table,
so that a buffer over the middle is two pieces for the host. Virtio 1.2, sections 2.7 and 5.2; linux/vhost.h."""

import ctypes
import fcntl
import mmap
import os
import select
import struct
import time

SECTOR = 512
IN, OUT, FLUSH, GET_ID, DISCARD, WRITE_ZEROES = 0, 1, 4, 8, 11, 13
OK, IOERR, UNSUPP, UNSET = 0, 1, 2, 0xFF
READ_ONLY, WRITE_THROUGH = 1, 2
NEXT, WRITE, INDIRECT = 1, 2, 4
F_FLUSH, F_LOG_ALL, F_INDIRECT, F_EVENT_IDX, F_VERSION_1 = (1 << bit for bit in (9, 26, 28, 29, 32))
FEATURES = F_FLUSH | F_INDIRECT | F_VERSION_1
LONGEST_S = 30


def _io(direction, number, size):
    return direction << 30 | size << 16 | 0xAF << 8 | number


SET_FEATURES, SET_OWNER, SET_MEM_TABLE, SET_LOG_BASE = _io(1, 0, 8), _io(0, 1, 0), _io(1, 3, 8), _io(1, 4, 8)
SET_FORK_FROM_OWNER, RESET_OWNER = _io(1, 0x84, 1), _io(0, 2, 0)
NEW_WORKER, FREE_WORKER, ATTACH_WORKER = _io(2, 8, 4), _io(1, 9, 4), _io(1, 0x15, 8)
SET_NUM, SET_ADDR, SET_BASE, GET_BASE = _io(1, 0x10, 8), _io(1, 0x11, 40), _io(1, 0x12, 8), _io(3, 0x12, 8)
SET_KICK, SET_CALL, SET_ERR, SET_BUSY_POLL = (_io(1, number, 8) for number in (0x20, 0x21, 0x22, 0x23))
SET_DISK, START, STOP, SET_CONFIG, GET_STATS = _io(1, 0xF0, 4), _io(1, 0xF1, 8), _io(1, 0xF2, 8), _io(1, 0xF3, 32), _io(3, 0xF4, 168)
SET_CHANGES, STOP_CHANGES = _io(1, 0xF5, 24), _io(0, 0xF6, 0)
SET_MAP, STOP_MAP = _io(1, 0xF7, 24), _io(0, 0xF8, 0)
EXTENT_READ, EXTENT_READ_WRITE = 1, 3
MAP_UPDATE, MAP_PUNT, MAP_PUNT_FLUSH = 1, 2, 4
SET_BACKEND, SET_NWORKERS = _io(1, 0xFF, 8), _io(1, 0x1F, 4)
STATS = ("kicks reads writes flushes discards write_zeroes others read_bytes written_bytes errors bounced fallbacks").split()


class Memory:
    """The driver's memory, by address in its own address space (gpa)."""

    def __init__(self, size=32 << 20):
        self.size, self.half = size, size // 2
        self.fd = os.memfd_create("guest")
        os.truncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.free = mmap.PAGESIZE

    def address(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def table(self):
        """A struct vhost_memory: the second half first."""
        address = self.address()
        return struct.pack("<II8Q", 2, 0, 0, self.half, address + self.half, 0, self.half, self.half, address, 0)

    def at(self, gpa):
        """Where a byte is in the map."""
        return (gpa + self.half) % self.size

    def allocate(self, size, align=16):
        gpa = -(-self.free // align) * align
        self.free = gpa + size
        assert self.free <= self.size, "the driver's memory is full"
        return gpa

    def write(self, gpa, data):
        first = min(len(data), self.half - gpa) if gpa < self.half else len(data)
        self.map[self.at(gpa):self.at(gpa) + first] = data[:first]
        if first < len(data):
            self.map[self.at(gpa + first):self.at(gpa + first) + len(data) - first] = data[first:]

    def read(self, gpa, size):
        first = min(size, self.half - gpa) if gpa < self.half else size
        data = self.map[self.at(gpa):self.at(gpa) + first]
        return data if first == size else data + self.map[self.at(gpa + first):self.at(gpa + first) + size - first]


class Ring:
    """A split ring in the driver's memory."""

    def __init__(self, memory, size=128, event_idx=False, base=0):
        self.memory, self.size, self.event_idx = memory, size, event_idx
        self.desc = self.area(16 * size, 16)
        self.avail = self.area(6 + 2 * size, 2)
        self.used = self.area(6 + 8 * size, 4)
        for index in (self.avail + 2, self.used + 2):
            memory.write(index, struct.pack("<H", base))
        self.free = list(range(size))
        self.next = self.seen = base
        self.kick, self.call, self.err = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3))
        self.chains = {}

    def area(self, size, align):
        gpa = self.memory.allocate(size, align)
        self.memory.write(gpa, bytes(size))
        return gpa

    def put(self, index, gpa, size, flags=0, next_=0, table=None):
        self.memory.write((self.desc if table is None else table) + 16 * index, struct.pack("<QIHH", gpa, size, flags, next_))

    def chain(self, pieces, indirect=False):
        """Describe pieces (gpa, size, is_written) and return the head."""
        if indirect:
            head, table = self.free.pop(0), self.memory.allocate(16 * len(pieces))
            for i, (gpa, size, is_written) in enumerate(pieces):
                more = NEXT if i + 1 < len(pieces) else 0
                self.put(i, gpa, size, more | (WRITE if is_written else 0), i + 1 if more else 0, table)
            self.put(head, table, 16 * len(pieces), INDIRECT)
            self.chains[head] = [head]
            return head
        heads = [self.free.pop(0) for _ in pieces]
        for i, (gpa, size, is_written) in enumerate(pieces):
            more = NEXT if i + 1 < len(pieces) else 0
            self.put(heads[i], gpa, size, more | (WRITE if is_written else 0), heads[i + 1] if more else 0)
        self.chains[heads[0]] = heads
        return heads[0]

    def offer(self, *heads):
        """Make chains available, without a kick."""
        for head in heads:
            self.memory.write(self.avail + 4 + 2 * (self.next % self.size), struct.pack("<H", head))
            self.next = (self.next + 1) & 0xFFFF
        self.memory.write(self.avail + 2, struct.pack("<H", self.next))

    def notify(self):
        os.eventfd_write(self.kick, 1)

    def pieces(self, head):
        """(gpa, size, is written) of a chain, as a device finds them."""
        table, index, found = self.desc, head, []
        while True:
            gpa, size, flags, next_ = struct.unpack("<QIHH", self.memory.read(table + 16 * index, 16))
            if flags & INDIRECT:
                table, index = gpa, 0
                continue
            found.append((gpa, size, bool(flags & WRITE)))
            if not flags & NEXT:
                return found
            index = next_

    def used_index(self):
        return struct.unpack("<H", self.memory.read(self.used + 2, 2))[0]

    def used_entry(self, index):
        """(head, length) of an entry."""
        return struct.unpack("<II", self.memory.read(self.used + 4 + 8 * (index % self.size), 8))

    def take(self):
        """(head, length) of everything used since the last call; its descriptors are free again."""
        taken = []
        while self.seen != self.used_index():
            taken.append(self.used_entry(self.seen))
            self.free += self.chains.pop(taken[-1][0], [])
            self.seen = (self.seen + 1) & 0xFFFF
        if self.event_idx:
            self.memory.write(self.avail + 4 + 2 * self.size, struct.pack("<H", self.seen))
        return taken

    def wait(self, count=1, by_interrupt=True):
        """Wait for so many completions; those that have no interrupt are polled for."""
        deadline, taken = time.monotonic() + LONGEST_S, []
        while True:
            taken += self.take()
            if len(taken) >= count:
                return taken
            assert time.monotonic() < deadline, f"{len(taken)} of {count} requests are complete: {taken}"
            if not by_interrupt:
                time.sleep(0.001)
            # An interrupt that does not come is an error, not a delay.
            elif not self.has_risen(self.call, 1) and self.seen != self.used_index():
                assert self.has_risen(self.call, 5), "requests are complete without an interrupt"

    def has_risen(self, event, wait_s=0.0):
        """Whether an eventfd was written; resets it."""
        if not select.select([event], [], [], wait_s)[0]:
            return False
        os.eventfd_read(event)
        return True


class Disk:
    """A device of /dev/vhost-blk, owned by this process."""

    def __init__(self, memory, features=FEATURES, has_tasks=True):
        """has_tasks: workers are tasks of this process; else they are kernel threads."""
        self.fd = os.open("/dev/vhost-blk", os.O_RDWR | os.O_NONBLOCK)
        self.memory, self.rings = memory, []
        fcntl.ioctl(self.fd, SET_FORK_FROM_OWNER, bytes([has_tasks]))
        fcntl.ioctl(self.fd, SET_OWNER)
        self.set_memory()
        self.set_features(features)

    def set_memory(self):
        fcntl.ioctl(self.fd, SET_MEM_TABLE, self.memory.table())

    def set_features(self, features):
        fcntl.ioctl(self.fd, SET_FEATURES, struct.pack("<Q", features))

    def attach(self, path, flags=os.O_RDWR):
        disk = os.open(path, flags)
        try:
            fcntl.ioctl(self.fd, SET_DISK, struct.pack("<i", disk))
        finally:
            os.close(disk)
        return self

    def detach(self):
        fcntl.ioctl(self.fd, SET_DISK, struct.pack("<i", -1))

    def configure(self, flags=0, serial=b"", discard=0, zeroes=0):
        fcntl.ioctl(self.fd, SET_CONFIG, struct.pack("<III20s", flags, discard, zeroes, serial))

    def set_changes(self, address, size, granularity=4096, flags=0):
        fcntl.ioctl(self.fd, SET_CHANGES, struct.pack("<QQII", address, size, granularity, flags))

    def stop_changes(self):
        fcntl.ioctl(self.fd, STOP_CHANGES)

    def set_map(self, capacity, extents, flags=0):
        """extents: (sector, sectors, sector of the disk, rights)."""
        array = ctypes.create_string_buffer(b"".join(struct.pack("<QQQII", *extent, 0) for extent in extents))
        fcntl.ioctl(self.fd, SET_MAP, struct.pack("<QQII", capacity, ctypes.addressof(array), len(extents), flags))

    def stop_map(self):
        fcntl.ioctl(self.fd, STOP_MAP)

    def punted(self, wait_s=0):
        """(ring, head) of each request that was punted since the last call."""
        if not select.select([self.fd], [], [], wait_s)[0]:
            return []
        return [(self.rings[queue], head) for queue, head in struct.iter_unpack("<II", os.read(self.fd, 4096))]

    def complete(self, ring, head, length):
        assert os.write(self.fd, struct.pack("<III", ring.index, head, length)) == 12

    def state(self, command, index, number=0):
        return struct.unpack("<II", fcntl.ioctl(self.fd, command, struct.pack("<II", index, number)))[1]

    def add(self, ring, base=0, starts=True):
        """Hand a ring over, and start it. Returns the ring."""
        index, address = len(self.rings), self.memory.address()
        self.rings.append(ring)
        ring.index = index
        self.state(SET_NUM, index, ring.size)
        self.state(SET_BASE, index, base)
        desc, used, avail = (address + self.memory.at(gpa) for gpa in (ring.desc, ring.used, ring.avail))
        fcntl.ioctl(self.fd, SET_ADDR, struct.pack("<IIQQQQ", index, 0, desc, used, avail, 0))
        for command, event in ((SET_CALL, ring.call), (SET_ERR, ring.err), (SET_KICK, ring.kick)):
            fcntl.ioctl(self.fd, command, struct.pack("<Ii", index, event))
        if starts:
            self.state(START, index)
        return ring

    def stop(self, ring):
        """Stop a ring and return its base."""
        self.state(STOP, ring.index)
        return self.state(GET_BASE, ring.index)

    def stats(self, ring):
        # What the kernel writes does not come back in an immutable argument of this size by itself.
        raw = bytearray(168)
        struct.pack_into("<I", raw, 0, ring.index)
        fcntl.ioctl(self.fd, GET_STATS, raw)
        _, inflight, *counters = struct.unpack("<II20Q", raw)
        return dict(zip(STATS, counters), inflight=inflight, batches=counters[len(STATS):])

    def close(self):
        os.close(self.fd)


def header(type_, sector=0):
    return struct.pack("<IIQ", type_, 0, sector)


def cut(gpa, sizes, is_written):
    """Pieces of these sizes from an address on."""
    pieces = []
    for size in sizes:
        pieces.append((gpa, size, is_written))
        gpa += size
    return pieces


class Request:
    """A request in the driver's memory: header, data, status, each cut as the caller wants."""

    def __init__(self, ring, type_, sector=0, data=b"", size=0, cuts=None, header_cuts=(16,), is_joined=False, indirect=False, align=4096, skew=0):
        """data: what the device reads. size: bytes that it writes. cuts: the data's pieces. is_joined: header or status
        share a descriptor with the data. skew: how far the data is from an aligned address."""
        memory = ring.memory
        self.ring, self.size = ring, size
        total = size or len(data)
        before = 16 if is_joined and data else 0
        self.data = memory.allocate(before + total + skew + 1, align) + skew + before
        memory.write(self.data, data if data else bytes([0xEE]) * size)
        self.header = self.data - 16 if before else memory.allocate(16)
        memory.write(self.header, header(type_, sector))
        self.status = self.data + size if is_joined and size else memory.allocate(1)
        memory.write(self.status, bytes([UNSET]))
        cuts = list(cuts or ([total] if total else []))
        pieces = cut(self.header, header_cuts, False)
        if before:
            pieces = cut(self.header, [16 + cuts[0]], False) + cut(self.data + cuts[0], cuts[1:], False)
        elif data:
            pieces += cut(self.data, cuts, False)
        if is_joined and size:
            pieces += cut(self.data, cuts[:-1] + [cuts[-1] + 1], True)
        else:
            pieces += (cut(self.data, cuts, True) if size else []) + [(self.status, 1, True)]
        self.head = ring.chain(pieces, indirect)

    def result(self):
        return self.ring.memory.read(self.status, 1)[0]

    def content(self):
        return self.ring.memory.read(self.data, self.size)


def run(ring, *arguments, **options):
    """Make a request, wait for it, and return (status, used length, data)."""
    free = ring.memory.free
    request = Request(ring, *arguments, **options)
    ring.offer(request.head)
    ring.notify()
    (head, used), = ring.wait()
    assert head == request.head, f"head {head} was used, not {request.head}"
    answer = request.result(), used, request.content()
    ring.memory.free = free
    return answer
