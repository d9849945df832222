"""Disks of the kernel's virtio-blk driver by pass-through (/dev/vdac0): the driver virtio-blk-uring on kernel/virtio_blk_uring.

Both kernels of the lab run it, with checks of memory that are off by default; each suite runs on one of them in `make test`."""

import blkio
import paths
from devices import VirtioBlkUring
from lab import CHECKED_MEMORY, needs_freestone
from runner import nightly
from workload import MIB

CHECK_TIMEOUT_S = 600
# Two disks, and what differs: a physical block and discards of 4 KiB, and a logical block of 4 KiB.
DISKS = ("discard_granularity=4096", "logical_block_size=4096,physical_block_size=4096")


@nightly
@needs_freestone
def the_suites_pass_on_a_virtio_disk_of_the_first_kernel(lab):
    _suites(lab, paths.KERNEL)


@needs_freestone
def the_suites_pass_on_a_virtio_disk_of_the_newest_kernel(lab):
    _suites(lab, paths.NEW_KERNEL)


def _suites(lab, kernel):
    guest = _boot(lab, kernel, queues=2)
    for path in guest.devices[0].paths:
        for check in "suite", "direct", "fixed":
            _check(guest, check, path)


@needs_freestone
@nightly
def the_suites_pass_on_poll_queues_of_the_first_kernel(lab):
    _polled_suites(lab, paths.KERNEL)


@nightly
@needs_freestone
def the_suites_pass_on_poll_queues_of_the_newest_kernel(lab):
    _polled_suites(lab, paths.NEW_KERNEL)


def _polled_suites(lab, kernel):
    guest = _boot(lab, kernel, poll_queues=1)
    for path in guest.devices[0].paths:
        for check in "suite", "direct", "fixed":
            _check(guest, check, path, "poll")


@nightly
@needs_freestone
def the_c_suite_passes_on_a_virtio_disk_of_the_first_kernel(lab):
    return _c_suite(lab, paths.KERNEL, len(DISKS))


@needs_freestone
@nightly
def the_c_suite_passes_on_a_virtio_disk_of_the_newest_kernel(lab):
    return _c_suite(lab, paths.NEW_KERNEL, 1)


def _c_suite(lab, kernel, count):
    """On the last `count` disks: the last one has blocks of 4 KiB."""
    guest = _boot(lab, kernel, queues=2)
    return "\n".join(blkio.run_suite(lab, guest, "virtio-blk-uring", path) for path in guest.devices[0].paths[-count:])


@needs_freestone
def the_program_uses_a_virtio_disk(lab):
    guest = _boot(lab, paths.KERNEL, poll_queues=1)
    disk = guest.devices[0]
    path = disk.paths[0]
    for options in "", ",poll=on", ",fixed-buffers=on":
        device = f"virtio-blk-uring:path={path}{options}"
        output = guest.sh(f"{paths.FREESTONE} bench --device {device} --rw randall --verify --qd 16 --time 2",
                          timeout_s=CHECK_TIMEOUT_S)
        assert "verified" in output, output
    facts = _check(guest, "facts", path)
    for fact in "capacity: 67108864", "needs_flush: true", "can_poll: true", "is_read_only: false":
        assert fact in facts, f"no {fact} in {facts}"
    # What the driver writes is on the disk.
    guest.sh(f"""
        dd if=/dev/zero of={disk.blocks[0]} bs={MIB} count=1 oflag=direct status=none
        {paths.FREESTONE} bench --device virtio-blk-uring:path={path} --rw write --bs 64K --qd 4 --time 1
        echo 3 >/proc/sys/vm/drop_caches
        ! cmp -s -n {MIB} {disk.blocks[0]} /dev/zero""", timeout_s=CHECK_TIMEOUT_S)


@needs_freestone
def a_virtio_disk_that_grows_is_used_to_its_new_end(lab):
    guest = _boot(lab, paths.KERNEL)
    disk = guest.devices[0]
    job = guest.start("grow", f"{paths.DRIVER_CHECK} virtio-blk-uring grow {disk.paths[0]} {96 * MIB}")
    guest.sh("until grep -q opened /run/grow.out; do [ ! -e /run/grow.code ]; sleep 0.1; done")
    disk.resize(guest, 0, 96)
    assert "grow passed" in job.wait(CHECK_TIMEOUT_S)


@needs_freestone
def a_disk_is_served_in_the_sandbox_and_grows(lab):
    guest = _boot(lab, paths.KERNEL)
    disk = guest.devices[0]
    device = f"virtio-blk-uring:path={disk.paths[0]}"
    job = guest.start("serve", f"{paths.FREESTONE} serve --device {device} --export nbd:socket=/run/nbd.sock &"
                               " echo $! >/run/serve.pid; wait $!")
    size = f"{paths.FREESTONE} info --json --device nbd:uri=nbd+unix:///?socket=/run/nbd.sock"
    guest.sh("until [ -S /run/nbd.sock ]; do [ ! -e /run/serve.code ]; sleep 0.1; done")
    assert f"{64 * MIB}" in guest.sh(size)
    disk.resize(guest, 0, 96)
    guest.sh("kill -HUP $(cat /run/serve.pid)")
    guest.sh(f"until {size} | grep -q {96 * MIB}; do [ ! -e /run/serve.code ]; sleep 0.2; done")
    guest.sh("kill -TERM $(cat /run/serve.pid)")
    job.wait()


@needs_freestone
def unusable_paths_are_refused_in_words(lab):
    modules = lab.kernel_modules(paths.KERNEL)
    guest = lab.boot_with(VirtioBlkUring(None, disks=("", ""), read_only=(1,)), cpus=2)
    disk = guest.devices[0]
    _refused(guest, disk.paths[0], "the kernel module virtio_blk_uring, which makes the nodes of disks, is not loaded")
    disk.modules = modules
    disk.attach(guest)
    guest.sh("echo text >/run/file")
    for path, words in [
        ("/run/file", "the path is a regular file"),
        ("/dev/null", "the path is a different device"),
        (disk.blocks[0], "the path is a block device"),
        (disk.paths[1], "the disk is read-only, and is opened for writing"),
        ("/dev/vdzc0", "the parameter disks of the module"),
    ]:
        _refused(guest, path, words)
    output = guest.sh(f"{paths.FREESTONE} bench --device virtio-blk-uring:path={disk.paths[1]},readonly=on --rw randread --time 1",
                      timeout_s=CHECK_TIMEOUT_S)
    assert "randread" in output, output
    # The mode of the node is the only permission that is needed.
    user = "setpriv --reuid 65534 --clear-groups --inh-caps -all"
    bench = f"{user} {paths.FREESTONE} bench --device virtio-blk-uring:path={disk.paths[0]} --rw randrw --time 1"
    code, output = guest.sh(bench, check=False)
    assert code != 0 and "Permission denied" in output, f"code {code}, {output}"
    guest.sh(f"chmod 666 {disk.paths[0]}; {bench}", timeout_s=CHECK_TIMEOUT_S)


def _refused(guest, path, words):
    code, output = guest.sh(f"{paths.FREESTONE} info --device virtio-blk-uring:path={path}", check=False)
    assert code != 0 and words in output and path in output, f"{path}: code {code}, {output}"


def _boot(lab, kernel, **options):
    disk = VirtioBlkUring(lab.kernel_modules(kernel), DISKS, **options)
    return lab.boot_with(disk, cpus=2, kernel=kernel, kernel_arguments=CHECKED_MEMORY)


def _check(guest, check, path, *words):
    return guest.sh(" ".join((paths.DRIVER_CHECK, "virtio-blk-uring", check, path, *words)), timeout_s=CHECK_TIMEOUT_S)
