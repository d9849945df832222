"""Our libblkio.so.1 in a guest: where it lies there, and trixie's programs that run on it."""

import os
import shlex
import subprocess

import paths

LIBRARY = os.environ.get("LIBBLKIO", os.path.join(paths.REPO, "target", "release", "libblkio.so"))
CLIENTS_SETUP = os.path.join(paths.REPO, "tests", "clients", "setup")
TRIXIE_BIN = os.path.join(paths.LAB, "trixie", "bin")
GUEST_DIR = "/run/blkio"  # in the guest; the library is there under its soname


def install(guest):
    """Make the library under test the libblkio.so.1 of GUEST_DIR."""
    assert os.path.exists(LIBRARY), f"no library {LIBRARY}: run `make build`, or name another in the variable LIBBLKIO"
    library = shlex.quote(os.path.realpath(LIBRARY))
    guest.sh(f"mkdir -p {GUEST_DIR} && ln -sf {library} {GUEST_DIR}/libblkio.so.1")


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
