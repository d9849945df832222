"""The parts of the NBD protocol that the lab speaks itself: constants, and a client that reads and writes.

Source: the NBD project's doc/proto.md."""

import socket
import struct

GREETING, OPTION_MAGIC = b"NBDMAGIC", b"IHAVEOPT"
OPTION_REPLY_MAGIC, REQUEST_MAGIC, REPLY_MAGIC = 0x3E889045565A9, 0x25609513, 0x67446698
FIXED_NEWSTYLE, NO_ZEROES = 1, 2  # handshake flags, both sides
OPT_EXPORT_NAME, OPT_ABORT, OPT_INFO, OPT_GO = 1, 2, 6, 7
REP_ACK, REP_INFO, REP_ERR_UNSUP, REP_ERR_UNKNOWN = 1, 3, 2**31 + 1, 2**31 + 6
INFO_EXPORT = 0
HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES = 1, 4, 8, 32, 64
READ, WRITE, DISCONNECT, FLUSH, TRIM, WRITE_ZEROES = 0, 1, 2, 3, 4, 6
FUA = 1
EINVAL = 22
OPTION, OPTION_REPLY = struct.Struct(">8sII"), struct.Struct(">QIII")
REQUEST, REPLY = struct.Struct(">IHHQQI"), struct.Struct(">IIQ")


def receive(connection, size):
    """Exactly `size` bytes. Raises EOFError when the peer has closed the connection."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if got == 0:
            raise EOFError(f"the connection was closed after {at} of {size} bytes")
        at += got
    return data


def _connected(connection, path, name=""):
    """Connects to an export of the server at the Unix socket `path`."""
    connection.connect(path)
    greeting = receive(connection, 18)
    assert greeting[:16] == GREETING + OPTION_MAGIC, greeting
    option = OPTION.pack(OPTION_MAGIC, OPT_EXPORT_NAME, len(name)) + name.encode()
    connection.sendall(struct.pack(">I", FIXED_NEWSTYLE | NO_ZEROES) + option)
    receive(connection, 10)  # size and flags


def _answered(connection, cookie):
    """The error of the reply to a request, or 0."""
    magic, error, answered = REPLY.unpack(receive(connection, REPLY.size))
    assert (magic, answered) == (REPLY_MAGIC, cookie), (magic, answered)
    return error


def read_export(path, spans, name=""):
    """The bytes of each (offset, length) of an export of the server at the Unix socket `path`; None for a range that cannot be
    read."""
    with socket.socket(socket.AF_UNIX) as connection:
        _connected(connection, path, name)
        found = []
        for cookie, (offset, length) in enumerate(spans):
            connection.sendall(REQUEST.pack(REQUEST_MAGIC, 0, READ, cookie, offset, length))
            found.append(None if _answered(connection, cookie) else receive(connection, length))
        connection.sendall(REQUEST.pack(REQUEST_MAGIC, 0, DISCONNECT, 0, 0, 0))
        return found


def write_export(path, data, name=""):
    """Writes to the beginning of an export, in requests of 4 KiB with FUA."""
    with socket.socket(socket.AF_UNIX) as connection:
        _connected(connection, path, name)
        for offset in range(0, len(data), 4096):
            part = data[offset:offset + 4096]
            connection.sendall(REQUEST.pack(REQUEST_MAGIC, FUA, WRITE, offset, offset, len(part)) + part)
            error = _answered(connection, offset)
            assert error == 0, f"a write of {len(part)} bytes at {offset}: error {error}"
        connection.sendall(REQUEST.pack(REQUEST_MAGIC, 0, DISCONNECT, 0, 0, 0))
