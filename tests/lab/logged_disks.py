"""Disks with a volatile cache that log what is done to them: an NBD server for QEMU's drives, in this process.

One log has the order of everything, over all disks: each write when it arrives and when it is answered, each flush, and
the notes that a program in the guest writes to a further disk. A note is one JSON object in a sector of 512 bytes. It is
in the log after everything that was answered before the note was written, and before everything that came after its answer.

    disks = LoggedDisks(directory, count=5, size=32 * MIB)
    Guest(qemu_arguments=disks.qemu_arguments())      # /dev/vda to /dev/vde, and for notes /dev/vdf
    disks.note(kind="ready")
    disks.close(); disks.events
"""

import dataclasses
import json
import os
import socket
import struct
import threading

import nbd_wire as nbd

SECTOR = 512
NOTES_BYTES = 1 << 20


@dataclasses.dataclass
class Write:
    """A write has arrived at a disk; `data` is None for zeroes."""

    number: int
    disk: int
    offset: int
    length: int
    data: bytes
    is_fua: bool


@dataclasses.dataclass
class Flush:
    """A flush has arrived at a disk."""

    number: int
    disk: int


@dataclasses.dataclass
class Done:
    """The write or flush of this number is answered."""

    number: int


class LoggedDisks:
    def __init__(self, directory, count, size):
        self.count, self.size, self.events = count, size, []
        self.socket = os.path.join(directory, "disks.sock")
        self._content = [bytearray(size) for _ in range(count)] + [bytearray(NOTES_BYTES)]
        self._lock, self._numbers, self._connections, self.errors = threading.Lock(), 0, [], []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen(count + 1)
        threading.Thread(target=self._accept, daemon=True).start()

    def qemu_arguments(self):
        """Drives of a guest. The guest sees a write cache, and flushes it."""
        arguments = []
        for number in range(self.count + 1):
            arguments += [
                "-blockdev", f"driver=nbd,node-name=logged{number},server.type=unix,server.path={self.socket},"
                             f"export={number},discard=unmap",
                "-device", f"virtio-blk-pci,drive=logged{number},num-queues=1",
            ]
        return arguments

    def note(self, **note):
        with self._lock:
            self.events.append(note)

    def close(self):
        """Ends every connection. The log is complete afterwards."""
        self._listener.close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer has closed it

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            with connection:
                disk = self._handshake(connection)
                while disk is not None and self._request(connection, disk):
                    pass
        except (EOFError, OSError):
            pass  # the client is gone
        except Exception as error:
            self.errors.append(error)

    def _handshake(self, connection):
        """Negotiates; returns the number of the disk, or None when the client gives up."""
        connection.sendall(nbd.GREETING + nbd.OPTION_MAGIC + struct.pack(">H", nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES))
        nbd.receive(connection, 4)
        while True:
            magic, option, length = nbd.OPTION.unpack(nbd.receive(connection, nbd.OPTION.size))
            assert magic == nbd.OPTION_MAGIC, magic
            data = nbd.receive(connection, length)

            def reply(kind, payload=b""):
                connection.sendall(nbd.OPTION_REPLY.pack(nbd.OPTION_REPLY_MAGIC, option, kind, len(payload)) + payload)

            if option == nbd.OPT_ABORT:
                reply(nbd.REP_ACK)
                return None
            if option not in (nbd.OPT_GO, nbd.OPT_INFO):
                reply(nbd.REP_ERR_UNSUP)
                continue
            name = data[4:4 + struct.unpack_from(">I", data)[0]].decode()
            if not (name.isdigit() and int(name) <= self.count):
                reply(nbd.REP_ERR_UNKNOWN)
                continue
            flags = nbd.HAS_FLAGS | nbd.SEND_FLUSH | nbd.SEND_FUA | nbd.SEND_TRIM | nbd.SEND_WRITE_ZEROES
            reply(nbd.REP_INFO, struct.pack(">HQH", nbd.INFO_EXPORT, len(self._content[int(name)]), flags))
            reply(nbd.REP_ACK)
            if option == nbd.OPT_GO:
                return int(name)

    def _request(self, connection, disk):
        """Handles one request; returns whether another may come."""
        magic, flags, kind, cookie, offset, length = nbd.REQUEST.unpack(nbd.receive(connection, nbd.REQUEST.size))
        assert magic == nbd.REQUEST_MAGIC, magic
        data = bytes(nbd.receive(connection, length)) if kind == nbd.WRITE else None
        if kind == nbd.DISCONNECT:
            return False
        content, payload, error = self._content[disk], b"", 0
        if offset + length > len(content):
            error = nbd.EINVAL
        elif kind == nbd.READ:
            payload = bytes(content[offset:offset + length])
        elif kind in (nbd.WRITE, nbd.TRIM, nbd.WRITE_ZEROES):
            self._change(disk, offset, length, data, bool(flags & nbd.FUA))
        elif kind == nbd.FLUSH:
            self._log_done(self._log_begin(lambda number: Flush(number, disk)))
        else:
            error = nbd.EINVAL
        connection.sendall(nbd.REPLY.pack(nbd.REPLY_MAGIC, error, cookie) + payload)
        return True

    def _change(self, disk, offset, length, data, is_fua):
        if disk == self.count:
            if data is not None:
                for at in range(0, length, SECTOR):
                    self.note(**json.loads(data[at:at + SECTOR].rstrip(b"\0")))
            return
        number = self._log_begin(lambda number: Write(number, disk, offset, length, data, is_fua))
        self._content[disk][offset:offset + length] = bytes(length) if data is None else data
        self._log_done(number)

    def _log_begin(self, event):
        with self._lock:
            self._numbers += 1
            self.events.append(event(self._numbers))
            return self._numbers

    def _log_done(self, number):
        with self._lock:
            self.events.append(Done(number))
