"""qemu-storage-daemon serves disks that are libblkio's: several at a time, in threads of their own, for a long while."""

import subprocess

import paths
from client import sha256
from qmp import Qmp
from runner import Skipped

ROUNDS = 20
PARALLEL_OPTIONS = ["-m", "16", "-W"]  # qemu-img convert: requests in flight, in any order


def start(client, *arguments):
    """qemu-storage-daemon with a QMP socket. Returns the daemon and its Qmp."""
    path = client.path("qmp.sock")
    daemon = client.start("qemu-storage-daemon", *arguments, "--chardev", f"socket,id=qmp,path={path},server=on,wait=off",
                          "--monitor", "qmp", socket=path)
    return daemon, Qmp(path)


def nbd_export(client, name, node):
    """Arguments that export a node by NBD, and the URI."""
    path = client.path("nbd.sock")
    server = ["--nbd-server", f"addr.type=unix,addr.path={path},max-connections=0"]
    return [*server, "--export", f"nbd,id={name},node-name={node},name={name},writable=on"], f"nbd+unix:///{name}?socket={path}"


def copy_and_compare(client, source, uri, image):
    client.run("qemu-img", "convert", "-n", *PARALLEL_OPTIONS, "-f", "raw", "-O", "raw", source, uri, uses_blkio=False)
    client.run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri, uses_blkio=False)
    assert sha256(image) == sha256(source), "the file below the disk has other bytes than its source"


def an_io_uring_disk_is_exported_by_nbd(client):
    source, image = client.image_with_data(), client.image()
    export, uri = nbd_export(client, "disk", "disk")
    daemon, _ = start(client, "--blockdev", f"driver=io_uring,node-name=disk,filename={image},cache.direct=on", *export)
    copy_and_compare(client, source, uri, image)
    daemon.check_library()
    daemon.stop()


def a_vhost_user_disk_is_exported_by_nbd(client):
    source, image = client.image_with_data(), client.image()
    export, uri = nbd_export(client, "disk", "disk")
    disk = f"driver=virtio-blk-vhost-user,node-name=disk,path={client.serve(image)},cache.direct=on"
    daemon, _ = start(client, "--blockdev", disk, *export)
    copy_and_compare(client, source, uri, image)
    daemon.check_library()
    daemon.stop()


def two_disks_are_written_at_the_same_time(client):
    """Two block devices and two libblkio instances in one process, each in an I/O thread of its own."""
    source = client.image_with_data()
    images = [client.image("first.img"), client.image("second.img")]
    path = client.path("nbd.sock")
    arguments = ["--nbd-server", f"addr.type=unix,addr.path={path},max-connections=0"]
    disks = [f"driver=io_uring,filename={images[0]}", f"driver=virtio-blk-vhost-user,path={client.serve(images[1])}"]
    for i, disk in enumerate(disks):
        arguments += ["--object", f"iothread,id=thread{i}",
                      "--blockdev", f"{disk},node-name=disk{i},cache.direct=on",
                      "--export", f"nbd,id=disk{i},node-name=disk{i},name=disk{i},writable=on,iothread=thread{i}"]
    daemon, _ = start(client, *arguments)
    uris = [f"nbd+unix:///disk{i}?socket={path}" for i in range(2)]
    copies = [subprocess.Popen([paths.QEMU_IMG, "convert", "-n", *PARALLEL_OPTIONS, "-f", "raw", "-O", "raw", source, uri])
              for uri in uris]
    for copy in copies:
        assert copy.wait(timeout=120) == 0
    for image, uri in zip(images, uris):
        client.run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, uri, uses_blkio=False)
        assert sha256(image) == sha256(source), f"{image} has other bytes than its source"
    daemon.check_library()
    daemon.stop()


def a_vhost_user_export_in_a_thread_serves_a_client_on_the_same_library(client):
    """Both ends on the library: io_uring below the export, virtio-blk-vhost-user in the client."""
    source, image, path = client.image_with_data(), client.image(), client.path("vhost.sock")
    daemon, _ = start(
        client, "--object", "iothread,id=thread", "--blockdev", f"driver=io_uring,node-name=disk,filename={image}",
        "--export", f"vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={path},num-queues=2,writable=on,iothread=thread")
    disk = f"driver=virtio-blk-vhost-user,path={path},cache.direct=on"
    client.run("qemu-img", "convert", "-n", *PARALLEL_OPTIONS, "--target-image-opts", "-f", "raw", source, disk)
    client.run("qemu-img", "compare", "--image-opts", f"driver=file,filename={source}", disk)
    assert sha256(image) == sha256(source)
    daemon.check_library()
    daemon.stop()


def a_server_that_dies_is_an_error_and_no_hang(client):
    if client.library_name == "reference":
        raise Skipped("its requests wait for ever")
    export, uri = nbd_export(client, "disk", "disk")
    disk = f"driver=virtio-blk-vhost-user,node-name=disk,path={client.serve(client.image())},cache.direct=on"
    daemon, _ = start(client, "--blockdev", disk, *export)
    read = ["qemu-io", "-f", "raw", uri, "-c", "read 0 4k"]
    client.run(*read, uses_blkio=False)
    client.server.kill()
    code, output = client.run(*read, check=False, uses_blkio=False)
    assert code == 1 and "Input/output error" in output, f"exit code {code}: {output}"
    daemon.stop()


def disks_come_and_go_and_leave_nothing_open(client):
    image = client.image()
    socket = client.serve(client.image("served.img"))
    # The daemon loads QEMU's module, and with it the library, with the first disk.
    daemon, qmp = start(client)
    disks = [{"driver": "io_uring", "filename": image},
             {"driver": "virtio-blk-vhost-user", "path": socket, "cache": {"direct": True}}]
    counts = []
    for _ in range(ROUNDS):
        for disk in disks:
            qmp.run("blockdev-add", **{"node-name": "disk", **disk})
            qmp.run("blockdev-del", **{"node-name": "disk"})
        counts.append((daemon.open_files(), mappings(daemon)))
    assert counts[-1] == counts[1], f"(open files, mappings) after each round: {counts}"
    daemon.check_library()
    daemon.stop()


def mappings(daemon):
    """How many shared mappings the process has: rings, guest memory."""
    with open(f"/proc/{daemon.process.pid}/maps") as maps:
        return sum(1 for line in maps if line.split()[1].endswith("s"))
