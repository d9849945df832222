"""The binary interface: what the library exports, and a program that was linked with the reference."""

import os
import re
import subprocess

from client import HEADERS, HERE, REFERENCE, OURS
from runner import Skipped

# What the reference exports of Rust's runtime; ours must hide it.
RUST = re.compile(r"rust_.*|_ZN.*|_R.*")
# What ours has beyond libblkio: see "EXTENSIONS" in our man page blkio(3).
EXTENSIONS = {"blkio_connect_begin", "blkio_start_begin", "blkio_get_control_fd", "blkio_control_result", "blkio_cancel"}


def a_program_linked_with_the_reference_runs_on_a_file(client):
    assert client.run(_linked_program(client), "io_uring", client.image()).endswith("ok\n")


def a_program_linked_with_the_reference_runs_on_vhost_user_disks(client):
    program = _linked_program(client)
    for server in ("freestone", "qemu-storage-daemon"):
        socket = client.serve(client.image(f"{server}.img"), server)
        assert client.run(program, "virtio-blk-vhost-user", socket).endswith("ok\n")


def the_library_exports_the_references_functions_and_its_own_only(client):
    if client.library_name != "ours":
        raise Skipped("compares ours with the reference")
    reference = {name for name in exported(REFERENCE) if not RUST.fullmatch(name)}
    assert len(reference) >= 43, reference
    ours = exported(OURS)
    assert reference <= ours, f"missing: {sorted(reference - ours)}"
    assert ours <= reference | EXTENSIONS, f"exported without being part of the API: {sorted(ours - reference - EXTENSIONS)}"


def the_library_has_the_references_soname(client):
    assert "Library soname: [libblkio.so.1]" in readelf(client.library, "--dynamic")


def _linked_program(client):
    """The program, linked with the reference. Its C library is that of this machine, which is not younger than ours."""
    program = client.path("linked")
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", f"-I{HEADERS}", "-o", program,
                    os.path.join(HERE, "linked.c"), REFERENCE,
                    "-Wl,--allow-shlib-undefined"],  # the reference needs trixie's C library, which is there at run time
                   check=True)
    return program


def exported(library):
    """The names of the functions and objects that a library defines for others, with their version if they have one."""
    lines = (line.split() for line in readelf(library, "--dyn-syms").splitlines())
    return {words[7] for words in lines if len(words) == 8 and words[4] in ("GLOBAL", "WEAK") and words[6].isdigit()}


def readelf(library, what):
    return subprocess.run(["readelf", "--wide", what, library], check=True, capture_output=True, text=True).stdout
