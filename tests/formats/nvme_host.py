"""A host of NVMe/TCP with one queue at a time, for reservations: no program of the machine takes part.

Sources: NVMe/TCP transport specification (PDUs), NVMe over Fabrics (Connect, Property Set), NVM command set (reservations)."""

import socket
import struct

CAPSULE_CMD, C2H_DATA, CAPSULE_RESP = 4, 7, 5
FABRICS, REGISTER, REPORT, ACQUIRE = 0x7F, 0x0D, 0x0E, 0x11
IN_CAPSULE, TRANSPORT = 0x01, 0x5A  # types of SGL descriptors
PERSISTS = 3 << 30
WRITE_EXCLUSIVE = 1


class Queue:
    """A queue of a controller."""

    def __init__(self, address, subsystem, host, identifier, controller=0xFFFF, number=0):
        name, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((name, int(port)), timeout=60)
        self.socket.sendall(struct.pack("<BBBBIHBBI", 0, 0, 128, 0, 128, 0, 0, 0, 0).ljust(128, b"\0"))
        self._receive()
        data = struct.pack("<16sH238x256s256s256x", identifier, controller, subsystem.encode(), host.encode())
        connect = struct.pack("<HHHBBI", 0, number, 31, 0, 0, 0)
        self.controller = self.command(FABRICS, fields=connect, data=data, nsid=1)[0] & 0xFFFF

    def _receive(self):
        """The header and the rest of a PDU."""
        pdu = b""
        while len(pdu) < 8 or len(pdu) < struct.unpack_from("<I", pdu, 4)[0]:
            part = self.socket.recv((struct.unpack_from("<I", pdu, 4)[0] if len(pdu) >= 8 else 8) - len(pdu))
            assert part, f"the target has closed the connection after {pdu!r}"
            pdu += part
        return pdu

    def command(self, opcode, fields=b"", data=b"", nsid=1, length=0):
        """Carries out a command: (the completion's first word, the data that the target has sent). `nsid` of a command of
        fabrics is its type."""
        flags = 0x40
        kind, size = (TRANSPORT, length) if length else (IN_CAPSULE, len(data))
        sgl = struct.pack("<QI3xB", 0, size, kind)
        entry = struct.pack("<BBHI16x", opcode, flags, 0, nsid) + sgl + fields.ljust(24, b"\0")
        header = struct.pack("<BBBBI", CAPSULE_CMD, 0, 72, 72 if data else 0, 72 + len(data))
        self.socket.sendall(header + entry + data)
        received = b""
        while (pdu := self._receive())[0] == C2H_DATA:
            received += pdu[pdu[3]:]
        assert pdu[0] == CAPSULE_RESP, pdu
        word, status = struct.unpack_from("<I10xH", pdu, 8)
        assert status >> 1 == 0, f"opcode {opcode:#x}: status {status >> 1:#x}"
        return word, received

    def close(self):
        self.socket.close()


class Host:
    """A host with its admin queue and an I/O queue."""

    def __init__(self, address, subsystem, host, identifier):
        self.admin = Queue(address, subsystem, host, identifier)
        enable = struct.pack("<B3xIQ", 0, 0x14, 0x460001)
        self.admin.command(FABRICS, fields=enable, nsid=0)
        self.io = Queue(address, subsystem, host, identifier, self.admin.controller, 1)

    def register(self, key):
        self.io.command(REGISTER, struct.pack("<I", PERSISTS), struct.pack("<QQ", 0, key))

    def acquire(self, key):
        self.io.command(ACQUIRE, struct.pack("<I", WRITE_EXCLUSIVE << 8), struct.pack("<QQ", key, 0))

    def reservations(self):
        """(type of the reservation, [(key, identifier of the host)])."""
        _, data = self.io.command(REPORT, struct.pack("<II", 4096 // 4 - 1, 1), length=4096)
        kind, count = struct.unpack_from("<BH", data, 4)
        registrants = [struct.unpack_from("<Q16s", data, 64 + 64 * i + 8) for i in range(count)]
        return kind, registrants

    def close(self):
        self.io.close()
        self.admin.close()
