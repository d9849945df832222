"""fio's libblkio engine. Debian builds fio without it: the tests run where LIBBLKIO_FIO names an fio that has it."""

import json

from client import FIO
from runner import Skipped


# Random writes with a checksum in every block, then every block read back and checked.
VERIFY = ["--rw=randwrite", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--randrepeat=1"]


def fio(client, driver, path, *options, work=VERIFY):
    """Run one job with the engine and return its result."""
    if not FIO:
        raise Skipped("LIBBLKIO_FIO names no fio that was built with its libblkio engine")
    result = client.path("fio.json")
    client.run(
        FIO, "--name=job", "--ioengine=libblkio", f"--libblkio_driver={driver}", f"--libblkio_path={path}",
        "--size=32m", "--bs=4k", "--iodepth=32", "--thread=1", "--output-format=json",
        f"--output={result}", *work, *options)
    with open(result) as file:
        job = json.load(file)["jobs"][0]
    assert job["error"] == 0, job
    return job


def fio_verifies_an_io_uring_disk(client):
    job = fio(client, "io_uring", client.image())
    assert job["write"]["total_ios"] == 8192 and job["read"]["total_ios"] == 8192, job


def fio_waits_on_the_eventfd(client):
    fio(client, "io_uring", client.image(), "--libblkio_wait_mode=eventfd")
    fio(client, "virtio-blk-vhost-user", client.serve(client.image()), "--libblkio_wait_mode=eventfd")


def fio_loops_without_waiting(client):
    fio(client, "io_uring", client.image(), "--libblkio_wait_mode=loop")
    fio(client, "virtio-blk-vhost-user", client.serve(client.image()), "--libblkio_wait_mode=loop")


def fio_uses_vectors_and_few_entries(client):
    fio(client, "io_uring", client.image(), "--libblkio_vectored", "--libblkio_num_entries=4",
        "--libblkio_pre_connect_props=direct=true")
    fio(client, "virtio-blk-vhost-user", client.serve(client.image()), "--libblkio_vectored", "--libblkio_queue_size=16")


def fio_verifies_disks_of_two_servers(client):
    for server in ("freestone", "qemu-storage-daemon"):
        job = fio(client, "virtio-blk-vhost-user", client.serve(client.image(f"{server}.img"), server))
        assert job["read"]["total_ios"] == 8192, job


def fio_uses_the_poll_queues_of_a_vhost_user_disk(client):
    """Poll queues are waited for by blocking calls and in a loop; they have no eventfd."""
    fio(client, "virtio-blk-vhost-user", client.serve(client.image()), "--hipri", "--libblkio_wait_mode=block")
    fio(client, "virtio-blk-vhost-user", client.serve(client.image("other.img")), "--hipri", "--libblkio_wait_mode=loop")


def fio_trims_and_writes_zeroes(client):
    """Each block is trimmed and then written: that every request succeeds is what fio can tell."""
    for name, options in (("trimmed.img", []), ("zeroed.img", ["--libblkio_write_zeroes_on_trim"])):
        disk = client.serve(client.image(name))
        job = fio(client, "virtio-blk-vhost-user", disk, *options, work=["--rw=randtrimwrite"])
        assert job["trim"]["total_ios"] == 8192, job
