"""Stock NBD clients at a portal of `freestoned`: many exports behind one address, chosen by name."""

import contextlib
import json
import os
import random

from freestoned import Freestoned, free_port
from client import MIB


def _run(client, program, *arguments, **options):
    return client.run(program, *arguments, uses_blkio=False, **options)


@contextlib.contextmanager
def _daemon(client, options):
    """A daemon with disks of 1 to 3 MiB as exports of a portal, and the portal's address."""
    daemon = Freestoned(os.path.join(client.scratch, "daemon"))
    with contextlib.closing(daemon):
        daemon.start()
        address = f"127.0.0.1:{free_port()}"
        daemon.cli("portal", "create", "net", "--kind", "nbd", "--listen", address, *options)
        daemon.post("/v1/devices", {"name": "data", "spec": daemon.file("disk", 64 * MIB)})
        for number in (1, 2, 3):
            name = f"vm{number}"
            daemon.post("/v1/volumes", {"name": name, "backing": "data", "size_bytes": number * MIB})
            daemon.post("/v1/exports", {"name": name, "kind": "nbd", "volumes": [name], "options": {"portal": "net"}})
        yield daemon, address
        daemon.stop()


def nbdinfo_and_qemu_img_find_the_exports_of_a_portal(client):
    with _daemon(client, ()) as (daemon, address):
        listed = json.loads(_run(client, "nbdinfo", "--list", "--json", f"nbd://{address}/"))
        sizes = {entry["export-name"]: entry["export-size"] for entry in listed["exports"]}
        assert sizes == {f"vm{number}": number * MIB for number in (1, 2, 3)}, listed
        info = json.loads(_run(client, "qemu-img", "info", "--output=json", f"nbd://{address}/vm2"))
        assert info["virtual-size"] == 2 * MIB, info
        for name, reason in (("", "default export"), ("vm4", "vm4")):
            code, said = _run(client, "nbdinfo", f"nbd://{address}/{name}", check=False)
            assert code != 0 and reason in said, said
        source, back = client.path("source.img"), client.path("back.img")
        with open(source, "wb") as file:
            file.write(random.Random(1).randbytes(MIB))
        _run(client, "nbdcopy", "--flush", source, f"nbd://{address}/vm1")
        daemon.delete("/v1/exports/vm3")
        daemon.kill()
        daemon.start()
        _run(client, "nbdcopy", f"nbd://{address}/vm1", back)
        with open(back, "rb") as copy, open(source, "rb") as original:
            assert copy.read() == original.read()
        listed = json.loads(_run(client, "nbdinfo", "--list", "--json", f"nbd://{address}/"))
        assert [entry["export-name"] for entry in listed["exports"]] == ["vm1", "vm2"], listed


def a_default_export_is_for_clients_that_name_none(client):
    with _daemon(client, ("-o", "default-export=vm3")) as (_, address):
        info = json.loads(_run(client, "qemu-img", "info", "--output=json", f"nbd://{address}"))
        assert info["virtual-size"] == 3 * MIB, info


def nbdinfo_and_qemu_img_take_the_printed_uri_of_any_name_and_path(client):
    name = "50% of a&b? <#1>, ü"
    with _daemon(client, ()) as (daemon, _):
        for export, options in (("tcp", {"portal": "net"}), ("unix", {"socket": daemon.path("it's a b?.nbd")})):
            daemon.post("/v1/exports", {"name": export, "kind": "nbd", "volumes": ["vm2"], "options": {"name": name, **options}})
            argv = daemon.get(f"/v1/exports/{export}/attach")["argv"]
            (nbdinfo, uri), = argv["nbdinfo"]
            found, = json.loads(_run(client, nbdinfo, "--json", uri))["exports"]
            assert (found["export-name"], found["export-size"]) == (name, 2 * MIB), found
            (_, drive), = argv["qemu"]
            assert drive.replace(",,", ",").endswith(f",file={uri}"), drive
            assert json.loads(_run(client, "qemu-img", "info", "--output=json", uri))["virtual-size"] == 2 * MIB
