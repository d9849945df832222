"""csi-sanity, the conformance suite of CSI."""

import collections
import os
import subprocess
import xml.etree.ElementTree

import paths
from driver import Driver

SANITY = os.path.join(paths.REPO, "target", "tools", "bin", "csi-sanity")
MIB = 1 << 20


def _run(subject, *arguments):
    """Run the suite against a driver; returns the numbers of specs by their result."""
    daemon = subject.daemon()
    # Specs without a size make volumes of a GiB. A file is zeroed at once, an array of files perhaps too late for the suite,
    # which does not repeat a call that is aborted.
    daemon.post("/v1/devices", {"name": "disk", "spec": daemon.file("disk", 16 << 30)})
    driver = subject.driver([Driver.backend(daemon, more='backing = "disk"')])
    files = {"parameters": "backing: disk\nqos.iops: '100000'\n", "mutable": "qos.bandwidth: 1G\n"}
    for name, text in files.items():
        with open(driver.path(name), "w", encoding="utf-8") as file:
            file.write(text)
    report = driver.path("report.xml")
    command = [SANITY, f"-csi.endpoint=unix://{driver.socket}", f"-csi.mountdir={driver.path('mounts')}",
               f"-csi.stagingdir={driver.path('staging')}", f"-csi.testvolumesize={64 * MIB}",
               f"-csi.testvolumeexpandsize={128 * MIB}", f"-csi.testvolumeparameters={driver.path('parameters')}",
               f"-csi.testvolumemutableparameters={driver.path('mutable')}", f"-ginkgo.junit-report={report}",
               "-ginkgo.no-color", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    counts, failures = collections.Counter(), []
    for spec in xml.etree.ElementTree.parse(report).iter("testcase"):
        status = spec.get("status")
        if spec.get("name").startswith("[It]"):  # others are the suite's own
            counts[status] += 1
        if status not in ("passed", "skipped", "pending"):
            failures.append(f"{spec.get('name')}: {' '.join(spec.itertext())[:600]}")
    assert done.returncode == 0 and not failures, "\n".join(failures) or done.stdout[-3000:]
    assert counts["passed"] > 60, counts
    return counts


def _note(counts):
    return f"csi-sanity: {counts['passed']} passed, 0 failed, {counts['skipped'] + counts['pending']} skipped"


def csi_sanity_passes_with_file_systems(subject):
    return _note(_run(subject))


def csi_sanity_passes_with_block_volumes(subject):
    return _note(_run(subject, "-csi.testvolumeaccesstype=block"))
