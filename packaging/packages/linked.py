"""The crates that are linked into programs or libraries of this repository, as cargo resolves them for this machine."""

import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def cargo(workspace, *arguments):
    return subprocess.run(["cargo", *arguments, "--locked"], cwd=workspace, check=True, stdout=subprocess.PIPE, text=True).stdout


def names(workspace, crates):
    """(name, version) of each package that is linked into these crates."""
    chosen = [word for crate in crates for word in ("-p", crate)]
    lines = cargo(workspace, "tree", *chosen, "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}").splitlines()
    words = [line.split() for line in lines if line]
    return {(name, version.removeprefix("v")) for name, version, *_ in words}


def packages(workspace, crates):
    """The packages that are linked into these crates, and the graph in which cargo resolves them, from `cargo metadata`."""
    metadata = json.loads(cargo(workspace, "metadata", "--format-version", "1"))
    chosen = names(workspace, crates)
    found = {package["id"]: package for package in metadata["packages"] if (package["name"], package["version"]) in chosen}
    return found, {node["id"]: node for node in metadata["resolve"]["nodes"]}


def expression(license):
    """An SPDX expression; crates of former times have a slash for OR."""
    return license.replace("/", " OR ")


def workspace_of(arguments):
    """The workspace and the crates of the arguments `[--workspace FOLDER] CRATE…`."""
    if arguments[:1] == ["--workspace"]:
        return ROOT / arguments[1], arguments[2:]
    return ROOT, arguments
