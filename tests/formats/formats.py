"""The formats that Freestone keeps on disks and in files, as bytes: where their versions stand, and how to raise them.

docs/on-disk-formats.md describes each byte; this file shares no code with the programs."""

import hashlib
import json
import os
import re
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(os.path.dirname(HERE))
DOCUMENT = os.path.join(REPO, "docs", "on-disk-formats.md")
FIXTURES = os.path.join(HERE, "fixtures")

MEMBERS = ["a.img", "b.img", "c.img"]
POOL, IMAGE = "pool.img", "image.qcow2"
STATE, PREVIOUS_STATE = "state/state.json", "state/state.json.previous"
# Files of JSON that name paths have this instead of the directory.
DIRECTORY = "@DIRECTORY@"

KIB = 1 << 10
SUPERBLOCK_BYTES, LOG_UNIT = 12 * KIB, 4 * KIB
# The copies of a pool's table.
POOL_TABLES = (64 * KIB, 1024 * KIB, 2048 * KIB, 3072 * KIB)


def _crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _superblocks(data):
    """Where the copies of a member's superblock are."""
    end = len(data) & ~4095
    return [at for at in (4 * KIB, 16 * KIB, end - 24 * KIB, end - 12 * KIB) if data[at:at + 8] == b"FrstRaid"]


def without_superblocks(data):
    """A member, with zeroes in the place of its superblocks."""
    data = bytearray(data)
    for at in _superblocks(data):
        data[at:at + SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)
    return bytes(data)


def _u(data, at, size):
    return int.from_bytes(data[at:at + size], "little")


def _raise_field(data, at, size, checksum_at, covered):
    """Adds 1 to the number at `at`. `covered` has the first byte and the length of the part with the checksum at `checksum_at`."""
    data[at:at + size] = (_u(data, at, size) + 1).to_bytes(size, "little")
    start, length = covered
    data[checksum_at:checksum_at + 4] = bytes(4)
    data[checksum_at:checksum_at + 4] = crc32c(data[start:start + length]).to_bytes(4, "little")


def superblock_versions(data):
    return [_u(data, at + 8, 4) for at in _superblocks(data)]


def raise_superblocks(data):
    for at in _superblocks(data):
        _raise_field(data, at + 8, 4, at + 16, (at, _u(data, at + 12, 4)))


def _log_entries(data):
    """The entries of the present log of a member."""
    newest = max(_superblocks(data), key=lambda at: _u(data, at + 144, 8))
    nonce, begin, length = data[newest + 160:newest + 176], _u(data, newest + 248, 8), _u(data, newest + 256, 8)
    starts = range(begin, begin + length, LOG_UNIT)
    return [at for at in starts if data[at:at + 8] == b"FsRdLog\0" and data[at + 16:at + 32] == nonce]


def log_versions(data):
    return [_u(data, at + 8, 2) for at in _log_entries(data)]


def raise_log_entries(data):
    for at in _log_entries(data):
        data[at + 8:at + 10] = (_u(data, at + 8, 2) + 1).to_bytes(2, "little")
        data[at + 508:at + 512] = crc32c(data[at:at + 508]).to_bytes(4, "little")


def _tables(data):
    return [at for at in POOL_TABLES if data[at:at + 8] == b"FsPool\0\0"]


def pool_versions(data):
    return [_u(data, at + 8, 2) for at in _tables(data)]


def raise_pool(data):
    for at in _tables(data):
        _raise_field(data, at + 8, 2, at + 132, (at, _u(data, at + 128, 4)))


def qcow2_versions(data):
    return [struct.unpack_from(">I", data, 4)[0]] if data[:4] == b"QFI\xfb" else []


def raise_qcow2(data):
    struct.pack_into(">I", data, 4, qcow2_versions(data)[0] + 1)


def json_versions(data):
    return [json.loads(bytes(data))["version"]]


def raise_json(data):
    """Changes the number alone, not the order or form of the rest."""
    text = bytes(data).decode()
    version = re.search(r'"version": ?(\d+)', text)
    data[:] = f"{text[:version.start(1)]}{int(version[1]) + 1}{text[version.end(1):]}".encode()


class Format:
    """A format with a version number. `of` lists the files of a fixture that have it, given the fixture's directory."""

    def __init__(self, name, of, versions, raise_version):
        self.name, self.of, self.versions, self.raise_version = name, of, versions, raise_version

    def found_in(self, directory):
        """The versions that a fixture has, each once."""
        found = set()
        for path in self.of(directory):
            with open(path, "rb") as file:
                found.update(self.versions(bytearray(file.read())))
        return sorted(found)

    def raise_in(self, directory):
        """Makes the files those of a later version, with right checksums."""
        for path in self.of(directory):
            with open(path, "rb") as file:
                data = bytearray(file.read())
            before = bytes(data)
            self.raise_version(data)
            assert bytes(data) != before, f"{self.name}: {path} has no version"
            with open(path, "wb") as file:
                file.write(data)


def _paths(*names):
    return lambda directory: [path for name in names if os.path.exists(path := os.path.join(directory, name))]


def _below(folder):
    def of(directory):
        path = os.path.join(directory, folder)
        return sorted(os.path.join(path, name) for name in os.listdir(path)) if os.path.isdir(path) else []
    return of


# By the names that docs/on-disk-formats.md has for them.
FORMATS = {format.name: format for format in (
    Format("superblock", _paths(*MEMBERS), superblock_versions, raise_superblocks),
    Format("log entry", _paths(*MEMBERS), log_versions, raise_log_entries),
    Format("pool table", _paths(POOL), pool_versions, raise_pool),
    Format("qcow2 image", _paths(IMAGE), qcow2_versions, raise_qcow2),
    Format("state.json", _paths(STATE), json_versions, raise_json),
    Format("host-secrets", _below("state/host-secrets"), json_versions, raise_json),
    Format("idempotency", _below("state/idempotency"), json_versions, raise_json),
    Format("reservations", _below("state/reservations"), json_versions, raise_json),
)}


def releases():
    """The releases that have fixtures, the oldest first."""
    return sorted(os.listdir(FIXTURES), key=lambda release: [int(part) for part in release.split(".")])


def fixture(release):
    return os.path.join(FIXTURES, release, "daemon.tar.xz")


def pattern(name, size):
    """The content of a disk of a fixture: text, so that it takes little room."""
    line = f"fixture {name}\n".encode()
    return (line * (size // len(line) + 1))[:size]


def key_name(uid, key):
    """The file of an Idempotency-Key of a user."""
    caller = f"user {uid}".encode()
    of_key = hashlib.sha256(len(caller).to_bytes(8, "little") + caller + key.encode()).hexdigest()
    return f"{hashlib.sha256(caller).hexdigest()[:16]}-{of_key[:48]}"
