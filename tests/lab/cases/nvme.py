"""NVMe namespaces by pass-through (/dev/ng0n1): the driver nvme_uring on a real controller and kernel."""

import paths
from devices import Namespace, Nvme
from runner import nightly

CHECK_TIMEOUT_S = 600


def the_suite_passes_on_a_namespace(lab):
    guest = lab.boot_with(Nvme(options="mdts=5"), cpus=2)
    _check(guest, "suite", "/dev/ng0n1")


@nightly
def the_suite_passes_on_poll_queues_and_blocks_of_4096(lab):
    guest = lab.boot_with(Nvme([Namespace(block_bytes=4096)], poll_queues=1), cpus=2)
    _check(guest, "suite", "/dev/ng0n1", "poll")


def requests_from_any_memory_and_thread_reach_the_controller(lab):
    guest = lab.boot_with(Nvme([Namespace(), Namespace(block_bytes=4096)], poll_queues=1, options="mdts=5"), cpus=2)
    for path in guest.devices[0].paths:
        _check(guest, "direct", path)
        _check(guest, "direct", path, "poll")


def zones_are_reported_written_and_managed(lab):
    zoned = Namespace(zoned=True, zone_mib=2, zone_capacity_mib=1, max_open_zones=4, max_active_zones=6)
    guest = lab.boot_with(Nvme([zoned], poll_queues=1, options="mdts=5,zoned.zasl=4"), cpus=2)
    facts = _check(guest, "facts", "/dev/ng0n1")
    for fact in "zone_size: 2097152", "zones: 32", "max_open: 4", "max_active: 6", "65536", "needs_flush: true":
        assert fact in facts, f"no {fact} in {facts}"
    _check(guest, "zones", "/dev/ng0n1")
    _check(guest, "zones", "/dev/ng0n1", "poll")


def unusable_namespaces_are_refused_in_words(lab):
    guest = lab.boot_with(Nvme([Namespace(options="ms=8"), Namespace(zoned=True), Namespace()]))
    metadata, zoned, plain = guest.devices[0].paths
    for path, words in [
        (metadata, "8 bytes of metadata"),
        ("/dev/nvme0", "the path is a different device, not the character device of an NVMe namespace"),
        (plain.replace("/ng", "/nvme"), "the path is a block device"),
        ("/dev/ng0n9", "No such file"),
    ]:
        code, output = guest.sh(_program("facts", path), check=False)
        assert code != 0 and words in output, f"{path}: code {code}, {output}"
    code, output = guest.sh(_program("suite", zoned), check=False)
    assert code != 0 and "is zoned" in output and "readonly=on" in output, output
    everybody = f"chmod 666 {plain}; setpriv --reuid 65534 --clear-groups --inh-caps -all"
    code, output = guest.sh(f"{everybody} {_program('facts', plain)}", check=False)
    assert code != 0 and "CAP_SYS_ADMIN" in output, f"without the capability: code {code}, {output}"


def the_program_reads_and_writes_a_namespace(lab):
    guest = lab.boot_with(Nvme(poll_queues=1), cpus=2)
    for poll in "off", "on":
        device = f"nvme_uring:path=/dev/ng0n1,poll={poll}"
        output = guest.sh(f"{paths.FREESTONE} bench --device {device} --rw randall --verify --qd 16 --time 2",
                          timeout_s=CHECK_TIMEOUT_S)
        assert "verified" in output, output


def _program(check, path, *words):
    return " ".join((paths.DRIVER_CHECK, "nvme", check, path, *words))


def _check(guest, check, path, *words):
    return guest.sh(_program(check, path, *words), timeout_s=CHECK_TIMEOUT_S)
