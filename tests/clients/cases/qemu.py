"""QEMU's tools on its block drivers io_uring and virtio-blk-vhost-user, which are libblkio's."""

import functools
import json
import re
import shutil
import statistics

from client import MIB, allocated_bytes, assert_bytes, sha256

BENCH_RUNS = 5


def over_each_disk(scenario):
    """One test for each kind of disk: scenario(client, connect), where connect(image) makes the image a disk and
    returns QEMU's options for it."""
    for suffix, connect in CONNECTIONS.items():
        test = _test_of(scenario, connect)
        test.__name__ = test.__qualname__ = f"{scenario.__name__.lstrip('_')}_{suffix}"
        globals()[test.__name__] = test
    return scenario


def _test_of(scenario, connect):
    def test(client):
        return scenario(client, functools.partial(connect, client))

    return test


def io_uring(client, image, direct=True):
    return f"driver=io_uring,filename={image},cache.direct={'on' if direct else 'off'}"


def vhost_user(server):
    def connect(client, image):
        return f"driver=virtio-blk-vhost-user,path={client.serve(image, server)},cache.direct=on"

    return connect


CONNECTIONS = {
    "over_io_uring": io_uring,
    "over_io_uring_through_the_page_cache": functools.partial(io_uring, direct=False),
    "over_a_vhost_user_disk_of_freestone": vhost_user("freestone"),
    "over_a_vhost_user_disk_of_qemu_storage_daemon": vhost_user("qemu-storage-daemon"),
}


@over_each_disk
def _qemu_img_copies_an_image_and_finds_it_equal(client, connect):
    source, image = client.image_with_data(), client.image()
    disk = connect(image)
    client.run("qemu-img", "convert", "-n", "--target-image-opts", "-f", "raw", source, disk)
    assert "identical" in client.run("qemu-img", "compare", "--image-opts", f"driver=file,filename={source}", disk)
    back = client.path("back.qcow2")
    client.run("qemu-img", "convert", "--image-opts", disk, "-O", "qcow2", back)
    client.run("qemu-img", "compare", source, back, uses_blkio=False)
    assert sha256(image) == sha256(source), "the file below the disk has other bytes than its source"


@over_each_disk
def _qemu_img_compare_sees_one_wrong_byte(client, connect):
    source = client.image_with_data()
    image = shutil.copyfile(source, client.path("changed.img"))
    with open(image, "r+b") as file:
        file.seek(40 * MIB + 77)
        byte = file.read(1)[0]
        file.seek(40 * MIB + 77)
        file.write(bytes([byte ^ 1]))
    code, output = client.run("qemu-img", "compare", "--image-opts", f"driver=file,filename={source}",
                              connect(image), check=False)
    assert code == 1 and "mismatch" in output, f"exit code {code}: {output}"


@over_each_disk
def _qemu_io_reads_back_each_pattern_it_wrote(client, connect):
    image = client.image()
    disk = connect(image)
    # Each command checks; the file tells at the end whether it was only the tool that was pleased.
    qemu_io(client, disk,
            "write -P 0xa1 0 4M", "read -P 0xa1 0 4M",
            "write -P 0xb2 512 512", "read -P 0xa1 0 512", "read -P 0xb2 512 512", "read -P 0xa1 1024 3M",
            "writev -P 0xc3 8M 4k 64k 512 128k", "readv -P 0xc3 8M 128k 64k 4k 512",
            "write -f -P 0xd4 60M 4M", "read -P 0xd4 60M 4M",
            "aio_write -P 0xe5 16M 1M", "aio_write -P 0xe6 18M 1M", "aio_write -P 0xe7 20M 1M", "aio_flush",
            "aio_read -P 0xe5 16M 1M", "aio_read -P 0xe6 18M 1M", "aio_read -P 0xe7 20M 1M", "aio_flush",
            "flush")
    assert_bytes(image, [(0, 512, 0xa1), (512, 512, 0xb2), (1024, 4 * MIB - 1024, 0xa1), (4 * MIB, 4 * MIB, 0),
                         (8 * MIB, (4 + 64 + 128) * 1024 + 512, 0xc3), (16 * MIB, MIB, 0xe5), (18 * MIB, MIB, 0xe6),
                         (20 * MIB, MIB, 0xe7), (60 * MIB, 4 * MIB, 0xd4)])


@over_each_disk
def _qemu_io_sees_a_wrong_pattern(client, connect):
    """The proof that the checks of the other tests can fail."""
    code, output = client.run("qemu-io", "--image-opts", connect(client.image()), "-c", "read -P 1 0 4k",
                              check=False)
    assert code == 1 and "Pattern verification failed" in output, f"exit code {code}: {output}"


@over_each_disk
def _write_zeroes_and_discard_clear_what_they_name_and_no_more(client, connect):
    image = client.image()
    disk = connect(image) + ",discard=unmap"
    qemu_io(client, disk, "write -P 0x77 0 16M", "flush")
    full = allocated_bytes(image)
    qemu_io(client, disk, "write -z 1M 1M", "write -z -u 4M 2M", "discard 8M 4M", "flush",
            "read -P 0 1M 1M", "read -P 0 4M 2M")
    # The reference asks the kernel for a discard that no file system knows, and QEMU takes that for a disk without.
    discards = client.library_name == "ours" or "vhost-user" in disk
    assert_bytes(image, [(0, MIB, 0x77), (MIB, MIB, 0), (2 * MIB, 2 * MIB, 0x77), (4 * MIB, 2 * MIB, 0),
                         (6 * MIB, 2 * MIB, 0x77), (8 * MIB, 4 * MIB, 0 if discards else 0x77), (12 * MIB, 4 * MIB, 0x77)])
    freed = full - allocated_bytes(image)
    at_least = (5 if discards else 2) * MIB
    assert freed >= at_least, f"the file shrank by {freed} bytes only, {at_least} were unmapped"


@over_each_disk
def _qemu_img_info_tells_the_size(client, connect):
    image = client.image(size_mib=48)
    info = json.loads(client.run("qemu-img", "info", "--output=json", "--image-opts", connect(image)))
    assert info["virtual-size"] == 48 * MIB, info


@over_each_disk
def _a_read_only_disk_refuses_writes(client, connect):
    image = client.image_with_data(size_mib=8)
    before = sha256(image)
    disk = connect(image) + ",read-only=on"
    code, output = client.run("qemu-io", "-r", "--image-opts", disk, "-c", "read 0 4k", "-c", "write 0 4k", check=False)
    assert code != 0 and "read 4096/4096" in output, f"exit code {code}: {output}"
    assert sha256(image) == before


@over_each_disk
def _qemu_img_bench_keeps_many_requests_in_flight(client, connect):
    disk = connect(client.image())
    for options in (["-d", "1", "-c", "500"], ["-d", "300", "-c", "20000", "-s", "512"], ["-w", "-d", "64", "-c", "5000"],
                    ["-w", "-d", "16", "-c", "2000", "--flush-interval=100"]):
        output = client.run("qemu-img", "bench", *options, "-t", "none", "--image-opts", disk)
        assert "Run completed" in output, output


@over_each_disk
def _qemu_img_bench_beside_the_reference(client, connect):
    """A report; the speed of a shared machine proves nothing."""
    disk = connect(client.image())
    seconds = {library: [] for library in dict.fromkeys([client.library_name, "reference"])}
    for _ in range(BENCH_RUNS):
        for library, runs in seconds.items():
            output = client.run("qemu-img", "bench", "-c", "50000", "-d", "32", "-s", "4096", "-t", "none",
                                "--image-opts", disk, library=library)
            runs.append(float(re.search(r"Run completed in ([\d.]+) seconds", output).group(1)))
    return "50,000 reads of 4K, depth 32, median (min to max) of %d runs: " % BENCH_RUNS + "; ".join(
        f"{library} {statistics.median(runs):.3f} s ({min(runs):.3f} to {max(runs):.3f})"
        for library, runs in seconds.items())


def a_missing_file_and_a_missing_socket_are_named_in_the_error(client):
    for disk, name in ((f"driver=io_uring,filename={client.path('no.img')}", "no.img"),
                       (f"driver=virtio-blk-vhost-user,path={client.path('no.sock')},cache.direct=on", "")):
        code, output = client.run("qemu-img", "info", "--image-opts", disk, check=False)
        assert code == 1 and "No such file" in output and name in output, f"exit code {code}: {output}"


def qemu_io(client, disk, *commands):
    arguments = [argument for command in commands for argument in ("-c", command)]
    output = client.run("qemu-io", "--image-opts", disk, *arguments)
    assert "failed" not in output.lower(), output
    return output
