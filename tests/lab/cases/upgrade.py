"""A guest on a disk of packages that are upgraded and downgraded under it: tests/packages has the packages and the daemon."""

import json
import os
import signal
import subprocess
import time

import paths
from lab import needs_freestone
from paths import die_with_parent
from runner import nightly
from vm import Disk, Guest
from workload import FIO_JSON, end_of_load, fio_verify_until_enough, kernel_errors, longest_pause_ms, requests_completed

# For the packages, and for a Debian system at the first call.
TIMEOUT_S = 1800
# Does not depend on the machine; 2 s are required on a quiet one.
LONGEST_PAUSE_MS = 60_000


def _kill(process):
    """Ends tests/packages, and with its first process the system in which its daemon runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(lab, process, what, holds):
    """Waits for tests/packages, which must not end meanwhile."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        log = os.path.join(lab.directory, "packages.log")
        assert process.poll() is None, f"tests/packages ended with {process.returncode}: {paths.tail(log)}"
        assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT_S} s: {paths.tail(log)}"
        time.sleep(0.2)


def _pauses_ms(output):
    """The longest pause of each pass of fio."""
    decoder, at = json.JSONDecoder(), output.find("{")
    while at >= 0:
        found, end = decoder.raw_decode(output, at)
        yield longest_pause_ms(found["jobs"][0])
        at = output.find("{", end)


@nightly
@needs_freestone
def a_guest_writes_and_verifies_while_packages_are_upgraded_and_downgraded(lab):
    os.makedirs(lab.directory, exist_ok=True)
    folder = lab.scratch()
    with open(os.path.join(lab.directory, "packages.log"), "wb") as log:
        process = subprocess.Popen(
            [os.path.join(paths.REPO, "tests", "packages")], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"GUEST_DIR": folder, "PACKAGES_DIR": os.path.join(lab.directory, "packages")},
            start_new_session=True, preexec_fn=die_with_parent)
    lab.callback(_kill, process)
    where = os.path.join(folder, "where")
    _wait(lab, process, "packages", lambda: os.path.exists(where) and os.path.getsize(where) > 0)
    with open(where, encoding="utf-8") as file:
        shared = file.read().strip()
    at = lambda name: os.path.join(shared, name)
    _wait(lab, process, "the disk", lambda: os.path.exists(at("served")))
    guest = lab.start(Guest([Disk(at("e4.sock"), 2)], cpus=2, directory=lab.directory))
    guest.attach_disks()
    load = guest.start("load", fio_verify_until_enough("/dev/vda", "16m", FIO_JSON))
    _wait(lab, process, "writes", lambda: requests_completed(guest) > 100)
    open(at("writing"), "w").close()
    _wait(lab, process, "the downgrade", lambda: os.path.exists(at("downgraded")))
    before = requests_completed(guest)
    _wait(lab, process, "writes after it", lambda: requests_completed(guest) > before + 100)
    end_of_load(load)
    assert kernel_errors(guest) == "", kernel_errors(guest)
    longest = max(_pauses_ms(load.wait()))
    assert longest < LONGEST_PAUSE_MS, longest
    open(at("checked"), "w").close()
    assert process.wait(timeout=TIMEOUT_S) == 0, paths.tail(os.path.join(lab.directory, "packages.log"))
    return f"no error, and a pause of at most {longest:.0f} ms (2000 are allowed on a quiet machine)"
