"""Our libblkio.so.1 in a guest: where it lies there, its test suite, and trixie's programs that run on it."""

import os
import re
import shlex
import subprocess

import paths
from server import QemuStorageDaemon, Server, ServerError

LIBRARY = os.environ.get("LIBBLKIO", os.path.join(paths.REPO, "target", "release", "libblkio.so"))
CLIENTS_SETUP = os.path.join(paths.REPO, "tests", "clients", "setup")
TRIXIE_BIN = os.path.join(paths.LAB, "trixie", "bin")
GUEST_DIR = "/run/blkio"  # in the guest; the library is there under its soname
SUITE_BUILD = os.path.join(paths.REPO, "tests", "capi", "build")
HEADERS = os.path.join(paths.REPO, "crates", "blkio", "include")
TEST_TIMEOUT_S = 120  # a test that takes a second here may take 20 in an emulated guest
LEAST_PASSED = 30  # a suite that skips nearly everything has found nothing
SUITE_TIMEOUT_S = 600


def install(guest):
    """Make the library under test the libblkio.so.1 of GUEST_DIR."""
    assert os.path.exists(LIBRARY), f"no library {LIBRARY}: run `make build`, or name another in the variable LIBBLKIO"
    library = shlex.quote(os.path.realpath(LIBRARY))
    guest.sh(f"mkdir -p {GUEST_DIR} && ln -sf {library} {GUEST_DIR}/libblkio.so.1")


def run_suite(lab, guest, driver, path, *options):
    """Run the test suite of the C API (tests/capi) in the guest, on a device whose content it may destroy."""
    install(guest)
    suite = os.environ.get("CAPI_SUITE") or _built_suite(lab)
    arguments = ["--driver", driver, "--set", f"path={path}", "--scratch", "--freestone",
                 "--timeout", str(TEST_TIMEOUT_S), *options]
    code, output = guest.sh(f"LD_LIBRARY_PATH={GUEST_DIR} {shlex.quote(suite)} {shlex.join(arguments)}",
                            timeout_s=SUITE_TIMEOUT_S, check=False)
    summary = re.search(r"^# .*: (\d+) passed, (\d+) failed, \d+ skipped$", output, re.MULTILINE)
    problems = re.findall(r"^not ok .*(?:\n# .*)?", output, re.MULTILINE)
    assert code == 0 and summary and not problems, "\n".join([*problems, output[-200:]])
    assert int(summary.group(1)) >= LEAST_PASSED, f"{summary.group(0)}:\n{output}"
    return summary.group(0)


def _built_suite(lab):
    """The suite, linked with the library under test; the guest sees it where it lies on the host."""
    suite = os.path.join(lab.directory, "capi-suite")
    subprocess.run([SUITE_BUILD, suite, HEADERS, LIBRARY], check=True)
    return suite


def require_trixie():
    """Make sure that trixie's programs are there; setup returns at once when they are."""
    subprocess.run([CLIENTS_SETUP], check=True)


def run_trixie(guest, program, *arguments):
    """Run one of trixie's programs in the guest on the library under test, and on no other libblkio; returns what it
    printed."""
    command = shlex.join([os.path.join(TRIXIE_BIN, program), *arguments])
    return guest.sh(f"""
        rm -f /run/ld.*
        BLKIO_DIR={GUEST_DIR} LD_DEBUG=files LD_DEBUG_OUTPUT=/run/ld {command}
        used=$(sed -n 's/.*calling init: \\(.*libblkio.so.*\\)/\\1/p' /run/ld.* | sort -u)
        [ "$used" = {GUEST_DIR}/libblkio.so.1 ] || {{ echo "ran on '$used', not on {GUEST_DIR}/libblkio.so.1"; exit 1; }}""")


class BlkioStorageDaemon(QemuStorageDaemon):
    """Trixie's qemu-storage-daemon on the library under test: a server of the lab whose disk is libblkio's."""

    name = "qemu-storage-daemon on libblkio"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        require_trixie()
        os.symlink(os.path.realpath(LIBRARY), os.path.join(self.directory, "libblkio.so.1"))

    def disk(self):
        """QEMU's options for the disk on the image."""
        return f"driver=io_uring,filename={self.image},cache.direct=on"

    def command(self):
        return [
            "env", f"BLKIO_DIR={self.directory}", os.path.join(TRIXIE_BIN, "qemu-storage-daemon"),
            "--object", "iothread,id=thread",
            "--blockdev", f"{self.disk()},node-name=disk,discard=unmap",
            "--export", f"type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={self.socket},"
            f"num-queues={self.queues},writable=on,iothread=thread",
        ]

    def check_library(self):
        """Raises unless the server has the library under test mapped, and no other libblkio."""
        with open(f"/proc/{self.process.pid}/maps") as maps:
            mapped = {line.split()[-1] for line in maps if "/libblkio" in line}
        if mapped != {os.path.realpath(LIBRARY)}:
            raise ServerError(f"{self.name} runs on {mapped or 'no libblkio'}, not on {LIBRARY}")


class BlkioOverVhostUser(BlkioStorageDaemon):
    """The same over a disk of Freestone: guest, QEMU's server, our library, Freestone's server, file."""

    def __enter__(self):
        self.below = Server(self.image, self.queues, self.log + ".below")
        self.below.__enter__()
        try:
            return super().__enter__()
        except BaseException:
            self.below.__exit__()
            raise

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.below.__exit__(*exc)

    def disk(self):
        return f"driver=virtio-blk-vhost-user,path={self.below.socket},cache.direct=on"
