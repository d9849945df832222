"""`freestone serve` in its sandbox: what each thread has given up, and stock clients who notice nothing of it."""

import json
import os
import time

from client import MIB, ClientError, sha256
from raid_server import RaidServer
from runner import Skipped
from server import Server, ServerError

NO_CAPABILITIES = "0" * 16


def _threads(server):
    """For each thread of the server, its /proc/…/status as a dictionary."""
    folder = f"/proc/{server.process.pid}/task"
    for thread in os.listdir(folder):
        with open(f"{folder}/{thread}/status") as status:
            yield dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)


def _assert_confined(server, capabilities=NO_CAPABILITIES):
    with open(server.log) as log:
        line, = [line for line in log if " sandbox: " in line]
    if "no landlock" in line or "no seccomp" in line:
        raise Skipped(f"this kernel cannot do it: {line}")
    threads = list(_threads(server))
    assert len(threads) > 3, threads
    for thread in threads:
        found = [thread[key] for key in ("NoNewPrivs", "Seccomp", "CapEff", "CapPrm")]
        assert found == ["1", "2", capabilities, capabilities], thread


def _run(client, program, *arguments, **options):
    return client.run(program, *arguments, uses_blkio=False, **options)


def nbd_clients_of_a_confined_server_see_it_grow_and_come_back(client):
    source, image, back = client.image_with_data(), client.image("disk.img"), client.path("back.img")
    for tcp in (False, True):
        server = client.serve_nbd(image, tcp=tcp)
        _assert_confined(server)
        _run(client, "nbdcopy", "--flush", source, server.uri)
        os.truncate(image, 128 * MIB)
        server.resized()
        _wait_for(lambda: _size(client, server) == 128 * MIB)
        server.kill()  # leaves its socket, which the next one takes over
        server.start()
        os.truncate(image, 64 * MIB)
        server.resized()
        _wait_for(lambda: _size(client, server) == 64 * MIB)
        _run(client, "nbdcopy", server.uri, back)
        assert sha256(source) == sha256(back)
        server.stop()
        assert tcp or not os.path.exists(server.socket)
        os.remove(back)


def a_disk_of_an_nbd_server_that_is_called_by_its_name_is_served_on(client):
    below = client.serve_nbd("mem:size=64M", tcp=True)
    source, back = client.image_with_data(), client.path("back.img")
    server = client.serve_nbd(f"nbd:host=localhost,port={below.port},export=disk")
    _assert_confined(server)
    _run(client, "nbdcopy", "--flush", source, server.uri)
    _run(client, "nbdcopy", server.uri, back)
    assert sha256(source) == sha256(back)
    server.stop()
    below.stop()


def a_namespace_of_an_nvme_tcp_target_that_is_called_by_its_name_is_served_on(client):
    below = client.serve_nbd("mem:size=64M", tcp=True)
    below.stop()
    nqn = "nqn.2014-08.org.example:disk"
    command = below.command()
    command[command.index("--export") + 1] = f"nvme-tcp:listen=localhost:{below.port},nqn={nqn}"
    below.command = lambda: command
    below.start()
    source, back = client.image_with_data(), client.path("back.img")
    server = client.serve_nbd(f"nvme-tcp:address=localhost:{below.port},nqn={nqn}")
    _assert_confined(server)
    _run(client, "nbdcopy", "--flush", source, server.uri)
    below.kill()
    below.start()  # without its data; the driver connects again
    _run(client, "nbdcopy", "--flush", source, server.uri)
    _run(client, "nbdcopy", server.uri, back)
    assert sha256(source) == sha256(back)
    server.stop()
    below.stop()


def members_are_taken_where_members_are_and_nowhere_else(client):
    folder = client.path("array")
    client._logs.append(os.path.join(folder, "server.log"))
    with RaidServer(folder, "5", members=3, member_mib=16) as server:
        _assert_confined(server)
        server.array("add", server.array_name, server.new_member())
        below = client.serve_nbd("mem:size=16M", tcp=True)
        server.array("add", server.array_name, f"nbd:host=localhost,port={below.port},export=disk")
        elsewhere = client.image("elsewhere.img", 16)
        try:
            server.array("add", server.array_name, elsewhere)
        except ServerError as error:
            assert "the sandbox lets members be opened in /dev, " in str(error), error
        else:
            raise AssertionError("a file that has nothing to do with the array was opened")
        for slot in "0", "1":
            server.array("fail", server.array_name, slot)
            _wait_for(lambda: server.show()["state"] == "optimal")  # a spare has taken its place
        server.array("remove", server.array_name, "failed")
        Server.stop(server)  # one of the members is gone with its server: no check


def a_server_that_shall_not_be_confined_is_not(client):
    server = client.serve_nbd("mem:size=64M")
    server.stop()
    command = server.command()
    server.command = lambda: [*command, "--sandbox", "off"]
    server.start()
    assert {thread["Seccomp"] for thread in _threads(server)} == {_of_ourselves("Seccomp")}
    assert {thread["CapEff"] for thread in _threads(server)} == {_of_ourselves("CapEff")}
    server.stop()


def _of_ourselves(key):
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith(f"{key}:"))


def _size(client, server):
    return json.loads(_run(client, "nbdinfo", "--json", server.uri))["exports"][0]["export-size"]


def _wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClientError(f"not within {timeout_s} s")
        time.sleep(0.1)
