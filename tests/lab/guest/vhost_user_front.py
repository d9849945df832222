"""The front end of vhost-user by hand: what a VMM sends to an export, for rings of vhost_ring.py.

Source: the vhost-user specification (QEMU, docs/interop/vhost-user.rst)."""

import array
import os
import socket
import struct
import time

import vhost_ring as vr

GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE, SET_LOG_BASE = 1, 2, 3, 5, 6
SET_NUM, SET_ADDR, SET_BASE, GET_BASE, SET_KICK, SET_CALL, SET_ERR = range(8, 15)
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_ENABLE, GET_CONFIG, SET_CONFIG = 15, 16, 18, 24, 25
GET_INFLIGHT, SET_INFLIGHT = 31, 32
VERSION, REPLY, NEED_REPLY = 1, 4, 8
F_PROTOCOL_FEATURES, F_RING_PACKED, F_IN_ORDER = 1 << 30, 1 << 34, 1 << 35
MQ, LOG_SHMFD, REPLY_ACK, CONFIG, INFLIGHT_SHMFD = (1 << bit for bit in (0, 1, 3, 9, 12))
# Where the driver's memory stands in the front end's own addresses.
USER = 0x7E00_0000_0000
WRITEBACK_OFFSET = 32


class Refused(Exception):
    """The export refused a message, or hung up."""


class FrontEnd:
    """A connection to an export, which serves rings of a memory."""

    def __init__(self, path, memory, rings, features=vr.FEATURES, bases=None, has_inflight=True, inflight=None, wait_s=30):
        """bases: where the front end believes each ring to be; its used index unless given. inflight: the region that
        an earlier connection has kept."""
        self.memory, self.rings, self.inflight = memory, rings, inflight
        self.socket = connect(path, wait_s)
        self.socket.settimeout(wait_s)
        self.offered, = struct.unpack("<Q", self.ask(GET_FEATURES)[0])
        self.send(SET_OWNER)
        protocol = struct.unpack("<Q", self.ask(GET_PROTOCOL_FEATURES)[0])[0] & (MQ | LOG_SHMFD | REPLY_ACK | CONFIG | INFLIGHT_SHMFD)
        self.send(SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol))
        self.features = features
        self.set_features(features)
        if has_inflight:
            self.share_inflight()
        self.set_memory()
        for index, ring in enumerate(rings):
            self.start(index, ring, ring.used_index() if bases is None else bases[index])

    def message(self, request, body=b"", flags=VERSION, fds=()):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([struct.pack("<III", request, flags, len(body)) + body], ancillary)

    def answer(self, request):
        fds, header = array.array("i"), b""
        while len(header) < 12:
            data, ancillary, *_ = self.socket.recvmsg(12 - len(header), socket.CMSG_SPACE(4))
            if not data:
                raise Refused(f"the export hung up instead of answering message {request}")
            header += data
            for _, _, passed in ancillary:
                fds.frombytes(passed[:len(passed) - len(passed) % fds.itemsize])
        got, flags, size = struct.unpack("<III", header)
        assert got == request and flags & REPLY, (got, request, flags)
        body = b""
        while len(body) < size:
            body += self.socket.recv(size - len(body))
        return body, (fds[0] if fds else None)

    def ask(self, request, body=b""):
        self.message(request, body)
        return self.answer(request)

    def send(self, request, body=b"", fds=()):
        """Send a message, and wait until it has been carried out. Before REPLY_ACK is agreed on, just send it."""
        if not hasattr(self, "features"):
            return self.message(request, body, fds=fds)
        self.message(request, body, VERSION | NEED_REPLY, fds)
        if struct.unpack("<Q", self.answer(request)[0])[0]:
            raise Refused(f"the export refused message {request}")

    def set_features(self, features):
        self.send(SET_FEATURES, struct.pack("<Q", features | F_PROTOCOL_FEATURES))

    def share_inflight(self):
        shape = struct.pack("<HH4x", len(self.rings), max(ring.size for ring in self.rings))
        if self.inflight is None:
            body, fd = self.ask(GET_INFLIGHT, bytes(16) + shape)
            self.inflight = (struct.unpack_from("<QQ", body), fd)
        (size, offset), fd = self.inflight
        self.send(SET_INFLIGHT, struct.pack("<QQ", size, offset) + shape, [fd])

    def set_memory(self):
        half, fd = self.memory.half, self.memory.fd
        table = struct.pack("<II8Q", 2, 0, 0, half, USER, half, half, half, USER + half, 0)
        self.send(SET_MEM_TABLE, table, [fd, fd])

    def state(self, request, index, value):
        self.send(request, struct.pack("<II", index, value))

    def start(self, index, ring, base, logged=False):
        ring.index = index
        self.state(SET_NUM, index, ring.size)
        self.state(SET_BASE, index, base)
        addresses = (USER + ring.desc, USER + ring.used, USER + ring.avail, ring.used)
        self.send(SET_ADDR, struct.pack("<II4Q", index, int(logged), *addresses))
        for request, event in ((SET_CALL, ring.call), (SET_ERR, ring.err), (SET_KICK, ring.kick)):
            self.send(request, struct.pack("<Q", index), [event])
        self.state(SET_ENABLE, index, 1)

    def stop(self, index):
        """Stop a ring and return its base."""
        return struct.unpack("<II", self.ask(GET_BASE, struct.pack("<II", index, 0))[0])[1]

    def set_writeback(self, is_on):
        self.send(SET_CONFIG, struct.pack("<III", WRITEBACK_OFFSET, 1, 0) + bytes([is_on]))

    def config(self, size=60):
        return self.ask(GET_CONFIG, struct.pack("<III", 0, size, 0) + bytes(size))[0][12:]

    def set_log(self, fd, size):
        """The answer to this message is its acknowledgement, whether it is asked for or not."""
        self.message(SET_LOG_BASE, struct.pack("<QQ", size, 0), fds=[fd])
        self.answer(SET_LOG_BASE)

    def close(self):
        self.socket.close()


def connect(path, wait_s):
    """Connect to a server that may not listen yet."""
    deadline = time.monotonic() + wait_s
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(path)
            return client
        except (FileNotFoundError, ConnectionRefusedError):
            client.close()
            assert time.monotonic() < deadline, f"nothing listens on {path}"
            time.sleep(0.01)


def eventually(what, is_so, wait_s=30):
    deadline = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {wait_s} s: {what}"
        time.sleep(0.01)
