"""The test suite of the C API (tests/capi) on devices that only a guest has: NVMe namespaces, a PCI function, vDPA."""

import os
import re
import shlex

import blkio
import paths
from devices import Namespace, Nvme, Vdpa, VfioPci

SUITE = os.environ.get("CAPI_SUITE", os.path.join(paths.REPO, "target", "capi", "capi-suite"))
LEAST_PASSED = 30  # a suite that skips nearly everything has found nothing
SUITE_TIMEOUT_S = 600


def the_c_suite_passes_on_an_nvme_namespace(lab):
    guest = lab.boot_with(Nvme([Namespace(), Namespace(block_bytes=4096)]), cpus=2)
    for path in guest.devices[0].paths:
        _run_suite(guest, "nvme-io_uring", path)


def the_c_suite_passes_on_a_zoned_nvme_namespace(lab):
    guest = lab.boot_with(Nvme([Namespace(zoned=True)]), cpus=2)
    _run_suite(guest, "nvme-io_uring", guest.devices[0].paths[0])


def the_c_suite_passes_on_a_vdpa_device(lab):
    guest = lab.boot_with(Vdpa(queues=4), cpus=2)
    _run_suite(guest, "virtio-blk-vhost-vdpa", guest.devices[0].paths[0])
    _run_suite(guest, "virtio-blk-vhost-vdpa", guest.devices[0].paths[0], "--poll")


def the_c_suite_passes_on_a_pci_function(lab):
    guest = lab.boot_with(VfioPci(queues=4), cpus=2)
    _run_suite(guest, "virtio-blk-vfio-pci", guest.devices[0].paths[0])
    _run_suite(guest, "virtio-blk-vfio-pci", guest.devices[0].paths[0], "--poll")


def _run_suite(guest, driver, path, *options):
    assert os.path.exists(SUITE), f"no {SUITE}: run `make build`, or name another in the variable CAPI_SUITE"
    blkio.install(guest)
    arguments = ["--driver", driver, "--set", f"path={path}", "--scratch", "--freestone", *options]
    code, output = guest.sh(f"LD_LIBRARY_PATH={blkio.GUEST_DIR} {shlex.quote(SUITE)} {shlex.join(arguments)}",
                            timeout_s=SUITE_TIMEOUT_S, check=False)
    summary = re.search(r"^# .*: (\d+) passed, (\d+) failed, \d+ skipped$", output, re.MULTILINE)
    problems = re.findall(r"^not ok .*(?:\n# .*)?", output, re.MULTILINE)
    assert code == 0 and summary and not problems, "\n".join([*problems, output[-200:]])
    assert int(summary.group(1)) >= LEAST_PASSED, f"{summary.group(0)}:\n{output}"
