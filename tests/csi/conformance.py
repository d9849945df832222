"""csi-sanity, the conformance suite of CSI, against a driver that runs."""

import collections
import os
import subprocess
import xml.etree.ElementTree

import paths

PROGRAM = os.path.join(paths.REPO, "target", "tools", "bin", "csi-sanity")
MIB = 1 << 20
# Specs without a size make volumes of a GiB.
ROOM = 16 << 30
KINDS = {"file systems": (), "block volumes": ("-csi.testvolumeaccesstype=block",)}


def run(driver, kind, timeout_s=600):
    """Run all specs with volumes of this kind on the device `disk`; returns a line with their numbers."""
    files = {"parameters": "backing: disk\nqos.iops: '100000'\n", "mutable": "qos.bandwidth: 1G\n"}
    for name, text in files.items():
        with open(driver.path(name), "w", encoding="utf-8") as file:
            file.write(text)
    report = driver.path("report.xml")
    command = [PROGRAM, f"-csi.endpoint=unix://{driver.socket}", f"-csi.mountdir={driver.path('mounts')}",
               f"-csi.stagingdir={driver.path('staging')}", f"-csi.testvolumesize={64 * MIB}",
               f"-csi.testvolumeexpandsize={128 * MIB}", f"-csi.testvolumeparameters={driver.path('parameters')}",
               f"-csi.testvolumemutableparameters={driver.path('mutable')}", f"-ginkgo.junit-report={report}",
               "-ginkgo.no-color", *KINDS[kind]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    counts, failures = collections.Counter(), []
    for spec in xml.etree.ElementTree.parse(report).iter("testcase"):
        status = spec.get("status")
        if spec.get("name").startswith("[It]"):  # others are the suite's own
            counts[status] += 1
        if status not in ("passed", "skipped", "pending"):
            failures.append(f"{spec.get('name')}: {' '.join(spec.itertext())[:600]}")
    assert done.returncode == 0 and not failures, "\n".join(failures) or done.stdout[-3000:]
    assert counts["passed"] > 60, counts
    return f"csi-sanity, {kind}: {counts['passed']} passed, 0 failed, {counts['skipped'] + counts['pending']} skipped"
