#!/usr/bin/env python3
"""A thousand hostile clients of one daemon: half-open, slow to read, a byte at a time, floods of handshakes, VMMs that truncate their memory.

    swarm.py '{"nbd": ["127.0.0.1", 10809], "nvme": [...], "api": [...], "vhost": [PATH, ...]}'

It runs until its standard input ends, then prints what it did as one JSON object. Connections over TCP come from the addresses
127.0.0.2 to 127.0.0.9; whatever a server closes is opened again at the next turn."""

import array
import collections
import ctypes
import json
import mmap
import os
import resource
import select
import socket
import struct
import sys
import time

ADDRESSES = [f"127.0.0.{last}" for last in range(2, 10)]
TURN_S = 0.02
REOPENED_A_TURN, TINY_A_TURN, FLOODED_A_TURN = 4, 8, 1

# NBD: client flags (fixed newstyle, no zeroes), then NBD_OPT_EXPORT_NAME of the default export, then a read of 32 MiB.
NBD_FLAGS = struct.pack(">I", 3)
NBD_EXPORT = NBD_FLAGS + b"IHAVEOPT" + struct.pack(">II", 1, 0)
NBD_READ = struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, 0, 32 << 20)
# NVMe/TCP: ICReq of 128 bytes, version 0, no digests.
NVME_ICREQ = struct.pack("<BBBBIHBBI", 0, 0, 128, 0, 128, 0, 0, 0, 0).ljust(128, b"\0")
HTTP_HEAD = b"GET /v1/system HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Which clients there are: server, bytes sent at once, bytes sent one at a time afterwards, how many.
KINDS = [
    ("nbd", b"", b"", 80),
    ("nbd", NBD_FLAGS, b"", 80),
    ("nbd", NBD_EXPORT + NBD_READ, b"", 64),
    ("nbd", b"", NBD_EXPORT + NBD_READ, 60),
    ("nvme", b"", b"", 120),
    ("nvme", NVME_ICREQ[:4], b"", 120),
    ("nvme", NVME_ICREQ, b"", 120),
    ("nvme", b"", NVME_ICREQ + b"\x04", 60),
    ("api", b"", b"", 100),
    ("api", HTTP_HEAD, b"", 80),
    ("api", HTTP2_PREFACE, b"", 80),
    ("api", b"", HTTP_HEAD, 40),
]


class Client:
    """One connection over TCP that never does what its server waits for."""

    def __init__(self, number, server, at_once, slowly):
        # Those that finish NBD's handshake come from one address: without keys nothing else tells them from good clients.
        number = 0 if NBD_READ in at_once + slowly else number
        self.source, self.server, self.at_once, self.slowly = ADDRESSES[number % len(ADDRESSES)], server, at_once, slowly
        self.socket, self.sent = None, 0

    def open(self):
        self.socket, self.sent = socket.socket(), 0
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.bind((self.source, 0))
        self.socket.settimeout(1)
        try:
            self.socket.connect(tuple(self.server))
            self.socket.setblocking(False)
            if self.at_once:
                self.socket.send(self.at_once)
            return True
        except OSError:
            self.close()
            return False

    def send_a_byte(self):
        if self.socket and self.sent < len(self.slowly):
            try:
                self.sent += self.socket.send(self.slowly[self.sent:self.sent + 1])
            except BlockingIOError:
                pass
            except OSError:
                self.close()

    def close(self):
        if self.socket:
            self.socket.close()
        self.socket = None


class Vmm:
    """A vhost-user front end that takes the memory of its ring away, and kicks."""

    REGION = 1 << 20

    def __init__(self, path):
        self.path = path

    def attack(self):
        """Set one queue up, truncate the memory, kick; whether the server had taken the memory."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as self.socket:
            self.socket.settimeout(5)
            self.socket.connect(self.path)
            memory = os.memfd_create("guest")
            kick, call = os.eventfd(0), os.eventfd(0)
            try:
                os.ftruncate(memory, self.REGION)
                with mmap.mmap(memory, self.REGION) as ram:
                    self._set_up(memory, kick, call, ram)
                os.ftruncate(memory, 0)
                os.eventfd_write(kick, 1)
                # An answer to a further message comes after the kick was seen, or the connection has ended.
                self._send(1)
                return bool(self._receive())
            finally:
                for fd in (memory, kick, call):
                    os.close(fd)

    def _set_up(self, memory, kick, call, ram):
        self._send(1)  # GET_FEATURES
        features = struct.unpack("<Q", self._receive())[0]
        self._send(2, struct.pack("<Q", features & ~(1 << 26)))
        self._send(3)
        base = ctypes.addressof(ctypes.c_char.from_buffer(ram))  # any address; the server only adds and subtracts
        self._send(5, struct.pack("<IIQQQQ", 1, 0, 0, self.REGION, base, 0), [memory])
        self._send(8, struct.pack("<II", 0, 64))
        self._send(10, struct.pack("<II", 0, 0))
        self._send(9, struct.pack("<IIQQQQ", 0, 0, base, base + 0x2000, base + 0x1000, 0))
        self._send(13, struct.pack("<Q", 0), [call])
        self._send(12, struct.pack("<Q", 0), [kick])
        if features & 1 << 30:
            self._send(18, struct.pack("<II", 0, 1))

    def _send(self, request, body=b"", fds=()):
        message = struct.pack("<III", request, 1, len(body)) + body
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([message], rights)

    def _receive(self):
        head = self.socket.recv(12, socket.MSG_WAITALL)
        return self.socket.recv(struct.unpack("<III", head)[2], socket.MSG_WAITALL) if len(head) == 12 else b""


class Swarm:
    def __init__(self, servers):
        self.servers, self.did = servers, collections.Counter()
        self.clients = []
        for server, at_once, slowly, count in KINDS:
            self.clients += [Client(number, servers[server], at_once, slowly) for number in range(count)]
        self.tiny = [client for client in self.clients if client.slowly]
        self.vmms = [Vmm(path) for path in servers["vhost"]]
        self.turn = 0

    def open_all(self):
        for client in self.clients:
            self.did["opened" if client.open() else "refused"] += 1

    def take_turn(self):
        self.turn += 1
        for number in range(TINY_A_TURN):
            self.tiny[(self.turn * TINY_A_TURN + number) % len(self.tiny)].send_a_byte()
            self.did["bytes"] += 1
        self._reopen()
        for number in range(FLOODED_A_TURN):
            self._flood(self.turn * FLOODED_A_TURN + number)
        if self.vmms and self.turn % 10 == 0:
            self._truncate(self.vmms[self.turn // 10 % len(self.vmms)])

    def _reopen(self):
        """Open what servers have closed, a few at a turn."""
        poll, by_fd = select.poll(), {}
        for client in self.clients:
            if client.socket:
                poll.register(client.socket, select.POLLRDHUP | select.POLLERR)
                by_fd[client.socket.fileno()] = client
        for fd, _ in poll.poll(0):
            by_fd[fd].close()
            self.did["closed by a server"] += 1
        for client in [client for client in self.clients if not client.socket][:REOPENED_A_TURN]:
            self.did["opened again" if client.open() else "refused"] += 1

    def _flood(self, number):
        server, at_once, slowly, _ = KINDS[number % len(KINDS)]
        client = Client(number, self.servers[server], at_once + slowly, b"")
        client.open()
        client.close()
        self.did["handshakes"] += 1

    def _truncate(self, vmm):
        try:
            vmm.attack()
            self.did["memories truncated"] += 1
        except OSError:
            self.did["VMMs refused"] += 1


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    # The clients' own work does not count: others come first. On a busy machine it still gets a share, so that it ends.
    os.nice(19)
    swarm = Swarm(json.loads(sys.argv[1]))
    swarm.open_all()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], TURN_S)[0]:
        swarm.take_turn()
    print(json.dumps(swarm.did | {"open at the end": sum(bool(client.socket) for client in swarm.clients)}), flush=True)


if __name__ == "__main__":
    main()
