"""A small io_uring for tests: rings, commands and registered buffers, by system calls (io_uring.pdf; linux/io_uring.h).

A ring is also made as a 32-bit program makes it: x86-64 kernels take 32-bit system calls from any program by int 0x80,
and look at nothing else. Pointers that such a call passes must lie below 4 GiB: low_memory()."""

import ctypes
import errno
import mmap
import os
import struct
import time

IOPOLL, SQPOLL, SUBMIT_ALL, SQE128, CQE32, SINGLE_ISSUER, DEFER_TASKRUN = 1, 2, 1 << 7, 1 << 10, 1 << 11, 1 << 12, 1 << 13
URING_CMD, READ, READ_FIXED, NOP = 46, 22, 4, 0
FIXED, ASYNC = 1, 1 << 4
GETEVENTS = 1
REGISTER_BUFFERS = 0
SETUP, ENTER, REGISTER = 425, 426, 427
SQ_RING, CQ_RING, SQES = 0, 0x8000000, 0x10000000
PARAMS_BYTES = 120
LONGEST_S = 60

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def system_call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def address_of(buffer):
    """Of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


MAP_32BIT = 0x40


def low_memory(size, prot=mmap.PROT_READ | mmap.PROT_WRITE):
    """Memory below 4 GiB."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT, prot=prot)


# long call(number, a, b, c, d, e): the registers of a 32-bit system call are eax, ebx, ecx, edx, esi, edi.
_CODE = bytes.fromhex("53 55 89f8 89f3 87d1 4489c6 4489cf 31ed cd80 5d 5b c3")


def call_of_32_bits(number, *arguments):
    global _caller
    if _caller is None:
        _code = low_memory(4096, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        _code[: len(_CODE)] = _CODE
        _caller = _code, ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint32] * 6)(address_of(_code))
    result = _caller[1](number, *arguments, *[0] * (5 - len(arguments)))
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


_caller = None


class Ring:
    """An io_uring. submit() takes what sqe() has laid out; wait() gives (user data, result) of completions."""

    def __init__(self, entries=64, flags=0, is_compat=False):
        params = low_memory(4096) if is_compat else bytearray(PARAMS_BYTES)
        struct.pack_into("<I", params, 8, flags)
        if is_compat:
            self.fd = call_of_32_bits(SETUP, entries, address_of(params))
        else:
            self.fd = system_call(SETUP, entries, address_of(params))
        self.flags, self.is_compat = flags, is_compat
        self.entries, cq_entries = struct.unpack_from("<II", params, 0)
        self.sq_head, self.sq_tail, self.sq_mask, _, self.sq_flags, _, self.sq_array = struct.unpack_from("<7I", params, 40)
        self.cq_head, self.cq_tail, self.cq_mask, _, _, self.cq_cqes = struct.unpack_from("<6I", params, 80)
        self.sqe_bytes = 128 if flags & SQE128 else 64
        self.cqe_bytes = 32 if flags & CQE32 else 16
        shared = dict(flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.sq = mmap.mmap(self.fd, self.sq_array + self.entries * 4, offset=SQ_RING, **shared)
        self.cq = mmap.mmap(self.fd, self.cq_cqes + cq_entries * self.cqe_bytes, offset=CQ_RING, **shared)
        self.sqes = mmap.mmap(self.fd, self.entries * self.sqe_bytes, offset=SQES, **shared)
        for i in range(self.entries):
            struct.pack_into("<I", self.sq, self.sq_array + 4 * i, i)
        self.offered = 0
        self.buffers = None

    def sqe(self, opcode, fd, *, flags=0, op=0, offset=None, address=0, length=0, command_flags=0, data=0, index=0, command=b""):
        """Lay out an entry. offset: in the place of a command's number."""
        tail, = struct.unpack_from("<I", self.sq, self.sq_tail)
        slot = (tail + self.offered) & (self.entries - 1)
        raw = bytearray(self.sqe_bytes)
        struct.pack_into("<BBHiQQIIQHHI", raw, 0, opcode, flags, 0, fd, op if offset is None else offset, address, length,
                         command_flags, data, index, 0, 0)
        raw[48:48 + len(command)] = command
        assert len(raw) == self.sqe_bytes, "the command does not fit"
        self.sqes[slot * self.sqe_bytes:(slot + 1) * self.sqe_bytes] = bytes(raw)
        self.offered += 1

    def submit(self, wait=0):
        tail, = struct.unpack_from("<I", self.sq, self.sq_tail)
        struct.pack_into("<I", self.sq, self.sq_tail, tail + self.offered)
        offered, self.offered = self.offered, 0
        submitted = system_call(ENTER, self.fd, offered, wait, GETEVENTS if wait else 0, 0, 0)
        assert submitted == offered, (submitted, offered)

    def take(self):
        """The completions that are there."""
        head, = struct.unpack_from("<I", self.cq, self.cq_head)
        tail, = struct.unpack_from("<I", self.cq, self.cq_tail)
        mask, = struct.unpack_from("<I", self.cq, self.cq_mask)
        taken = []
        while head != tail:
            taken.append(struct.unpack_from("<Qi", self.cq, self.cq_cqes + (head & mask) * self.cqe_bytes))
            head = head + 1 & 0xFFFFFFFF
        struct.pack_into("<I", self.cq, self.cq_head, head)
        return taken

    def wait(self, count):
        """So many completions: (user data, result)."""
        taken, deadline = self.take(), time.monotonic() + LONGEST_S
        while len(taken) < count:
            assert time.monotonic() < deadline, f"{count - len(taken)} completions are missing"
            system_call(ENTER, self.fd, 0, 1, GETEVENTS, 0, 0)
            taken += self.take()
        return taken

    def run(self, *arguments, **options):
        """The result of one entry."""
        self.sqe(*arguments, **options)
        self.submit()
        (_, result), = self.wait(1)
        return result

    def register(self, *buffers):
        """Registered buffers, index 0 and up."""
        shape = "<II" if self.is_compat else "<QQ"
        vector = b"".join(struct.pack(shape, address_of(buffer), len(buffer)) for buffer in buffers)
        self.buffers = bytearray(vector)
        system_call(REGISTER, self.fd, REGISTER_BUFFERS, address_of(self.buffers), len(buffers))

    def close(self):
        os.close(self.fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def name_of(result):
    """EIO for -5, for messages."""
    return errno.errorcode.get(-result, result) if result < 0 else result
