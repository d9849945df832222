"""nbdkit's blkio plugin makes an NBD server of a libblkio disk; qemu-img is its client."""

import os

from client import MIB, NBDKIT_PLUGIN, assert_bytes, sha256
from storage_daemon import copy_and_compare


def start(client, *arguments):
    path = client.path("nbdkit.sock")
    daemon = client.start("nbdkit", "-f", "-U", path, NBDKIT_PLUGIN, *arguments, socket=path)
    return daemon, f"nbd+unix:///?socket={path}"


def nbdkit_serves_a_file_through_io_uring(client):
    source, image = client.image_with_data(), client.image()
    daemon, uri = start(client, "io_uring", f"path={image}")
    copy_and_compare(client, source, uri, image)
    daemon.check_library()
    daemon.stop()


def nbdkit_serves_a_vhost_user_disk(client):
    source, image = client.image_with_data(), client.image()
    daemon, uri = start(client, "virtio-blk-vhost-user", f"path={client.serve(image)}")
    copy_and_compare(client, source, uri, image)
    daemon.check_library()
    daemon.stop()


def nbdkit_zeroes_trims_and_flushes(client):
    image = client.image()
    daemon, _ = start(client, "virtio-blk-vhost-user", f"path={client.serve(image)}")
    commands = ["write -P 0x77 0 8M", "write -z 1M 1M", "write -z -u 2M 1M", "discard 4M 1M", "flush", "read -P 0 1M 2M",
                "read -P 0x77 5M 3M"]
    client.run("qemu-io", "--image-opts", f"driver=nbd,server.type=unix,server.path={daemon.socket},discard=unmap",
               *(argument for command in commands for argument in ("-c", command)), uses_blkio=False)
    assert_bytes(image, [(0, MIB, 0x77), (MIB, 2 * MIB, 0), (3 * MIB, MIB, 0x77), (4 * MIB, MIB, 0), (5 * MIB, 3 * MIB, 0x77)])
    daemon.check_library()
    daemon.stop()


def nbdkit_serves_a_read_only_disk(client):
    image = client.image_with_data(size_mib=8)
    before = sha256(image)
    daemon, uri = start(client, "-r", "io_uring", f"path={image}")
    client.run("qemu-img", "compare", "-f", "raw", "-F", "raw", image, uri, uses_blkio=False)
    code, output = client.run("qemu-io", "-f", "raw", uri, "-c", "write 0 4k", check=False, uses_blkio=False)
    assert code != 0, output
    assert sha256(image) == before
    daemon.stop()


def nbdkit_prints_properties(client):
    image = client.image(size_mib=48)
    daemon, uri = start(client, "-v", "io_uring", f"path={image}", "get=capacity", "get=driver", "get=needs-mem-regions")
    client.run("qemu-img", "info", uri, uses_blkio=False)
    with open(daemon.log) as log:
        said = log.read()
    for line in (f"get capacity = {48 * MIB}", "get driver = io_uring", "get needs-mem-regions = false"):
        assert line in said, f"no line {line!r} in\n{said}"
    daemon.stop()


def nbdkit_names_a_property_that_is_refused(client):
    for setting, name in (("no-such-property=1", "no-such-property"), ("direct=perhaps", "direct")):
        daemon, uri = start(client, "io_uring", f"path={client.image()}", setting)
        code, _ = client.run("qemu-img", "info", uri, check=False, uses_blkio=False)
        with open(daemon.log) as log:
            said = log.read()
        assert code != 0 and f"error setting property: {name}=" in said, f"exit code {code}:\n{said}"
        daemon.stop()
        os.unlink(daemon.log)
        os.unlink(daemon.socket)
