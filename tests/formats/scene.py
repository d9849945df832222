"""The objects of the fixtures that tests/formats/make makes."""

import os
import tarfile

import formats

VOLUME_BYTES, DATA_BYTES = 1 << 20, 256 << 10
# Exports over NBD, and the objects that they serve.
DISKS = {"e1": "v1", "e2": "v2", "e3": "image"}
RESERVED, SECRET = "e4", "e5"
SUBSYSTEMS = {RESERVED: "nqn.2014-08.org.example:e4", SECRET: "nqn.2014-08.org.example:e5"}
HOST, HOST_ID = "nqn.2014-08.org.example:host", bytes(range(1, 17))
RESERVATION_KEY = 0x1234
DEFAULT_EXPORT = "e1"
KEY = "the-key-of-the-fixture"
KEYED_VOLUME = {"name": "v1", "backing": "data", "size_bytes": VOLUME_BYTES, "labels": {"a": "b"}}


def address(daemon):
    """Where the portal of NVMe/TCP listens."""
    return daemon.get("/v1/portals/p")["addresses"][0]


def unpack(release, directory):
    """Puts the fixture of a release into a directory."""
    with tarfile.open(formats.fixture(release)) as tar:
        for member in tar:
            path = os.path.join(directory, member.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            content = tar.extractfile(member).read()
            if path.endswith((".json", ".json.previous")):
                content = content.replace(formats.DIRECTORY.encode(), directory.encode())
            with open(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(content)
