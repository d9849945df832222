"""The test suite of the C API (tests/capi) on devices that only a guest has: NVMe namespaces, a PCI function, vDPA."""

import os
import re
import shlex
import subprocess

import blkio
import paths
from devices import Namespace, Nvme, Vdpa, VfioPci

BUILD = os.path.join(paths.REPO, "tests", "capi", "build")
HEADERS = os.path.join(paths.REPO, "crates", "blkio", "include")
TEST_TIMEOUT_S = 120  # a test that takes a second here may take 20 in an emulated guest
LEAST_PASSED = 30  # a suite that skips nearly everything has found nothing
SUITE_TIMEOUT_S = 600


def the_c_suite_passes_on_an_nvme_namespace(lab):
    guest = lab.boot_with(Nvme([Namespace(), Namespace(block_bytes=4096)]), cpus=2)
    for path in guest.devices[0].paths:
        _run_suite(lab, guest, "nvme-io_uring", path)


def the_c_suite_passes_on_a_zoned_nvme_namespace(lab):
    guest = lab.boot_with(Nvme([Namespace(zoned=True)]), cpus=2)
    _run_suite(lab, guest, "nvme-io_uring", guest.devices[0].paths[0])


def the_c_suite_passes_on_a_vdpa_device(lab):
    guest = lab.boot_with(Vdpa(queues=4), cpus=2)
    _run_suite(lab, guest, "virtio-blk-vhost-vdpa", guest.devices[0].paths[0])
    _run_suite(lab, guest, "virtio-blk-vhost-vdpa", guest.devices[0].paths[0], "--poll")


def the_c_suite_passes_on_a_pci_function(lab):
    guest = lab.boot_with(VfioPci(queues=4), cpus=2)
    _run_suite(lab, guest, "virtio-blk-vfio-pci", guest.devices[0].paths[0])
    _run_suite(lab, guest, "virtio-blk-vfio-pci", guest.devices[0].paths[0], "--poll")


def _run_suite(lab, guest, driver, path, *options):
    blkio.install(guest)
    suite = os.environ.get("CAPI_SUITE") or _built_suite(lab)
    arguments = ["--driver", driver, "--set", f"path={path}", "--scratch", "--freestone",
                 "--timeout", str(TEST_TIMEOUT_S), *options]
    code, output = guest.sh(f"LD_LIBRARY_PATH={blkio.GUEST_DIR} {shlex.quote(suite)} {shlex.join(arguments)}",
                            timeout_s=SUITE_TIMEOUT_S, check=False)
    summary = re.search(r"^# .*: (\d+) passed, (\d+) failed, \d+ skipped$", output, re.MULTILINE)
    problems = re.findall(r"^not ok .*(?:\n# .*)?", output, re.MULTILINE)
    assert code == 0 and summary and not problems, "\n".join([*problems, output[-200:]])
    assert int(summary.group(1)) >= LEAST_PASSED, f"{summary.group(0)}:\n{output}"


def _built_suite(lab):
    """The suite, linked with the library under test; the guest sees it where it lies on the host."""
    suite = os.path.join(lab.directory, "capi-suite")
    subprocess.run([BUILD, suite, HEADERS, blkio.LIBRARY], check=True)
    return suite
