"""The program freestone, as people use it with a daemon: what it prints, what it refuses, what it asks."""

import json
import os
import re
import subprocess

import paths
from freestoned import MIB
from paths import die_with_parent


def _array(daemon):
    members = [daemon.file(f"m{slot}", 32 * MIB) for slot in range(4)]
    return daemon.cli("array", "create", "data", "--level", "5", *members)


def tables_are_for_people(subject):
    daemon = subject.daemon()
    said = _array(daemon)
    assert re.fullmatch(r"created array data \([0-9a-f-]{36}\): level 5, 88\.1 MiB; freestoned runs it\n", said), said
    daemon.cli("volume", "create", "v1", "--array", "data", "--size", "16M", "--iops", "500:50")
    daemon.cli("volume", "create", "v2", "--backing", "data", "--size", "1M")
    daemon.cli("export", "create", "vm1", "--kind", "vhost-user-blk", "--of", "v1", "-o", "queues=2")
    assert daemon.cli("array", "list") == (
        "NAME  STATE    LEVEL      SIZE      FREE  LIVE  VOLUMES  ERROR\n"
        "data  optimal      5  88.1 MiB  65.2 MiB   4/4        2\n"), daemon.cli("array", "list")
    assert daemon.cli("volume", "list") == (
        "NAME    SIZE  BACKING  LIMITS       GROUP  EXPORTS\n"
        "v1    16 MiB  data     iops 500:50         vm1\n"
        "v2     1 MiB  data\n"), daemon.cli("volume", "list")
    assert daemon.cli("export", "list") == (
        "NAME  KIND            OF  STATE   CLIENTS  WHERE\n"
        f"vm1   vhost-user-blk  v1  active        0  vhost-user-blk: 2 queues of vm1, listens on {daemon.path('vm1.sock')}\n")
    assert daemon.cli("core", "list") == "CORE  PROCESSOR  EXPORTS\n   0  any        vm1\n"
    shown = daemon.cli("volume", "show", "v1").splitlines()
    assert [line.split()[0] for line in shown] == ["name", "uuid", "backing", "size", "extents", "limits", "exports"], shown
    assert "size        16 MiB (16777216 bytes)" in shown, shown
    events = daemon.cli("event", "list").splitlines()
    assert any(re.match(r"\d{4}-\d\d-\d\dT[\d:]+Z  volume v1  created: 16777216 bytes on data$", line) for line in events), events


def json_is_what_the_api_says(subject):
    daemon = subject.daemon()
    _array(daemon)
    made = json.loads(daemon.cli("volume", "create", "v1", "--backing", "data", "--size", "4M", "--json"))
    assert made == daemon.get("/v1/volumes/v1"), made
    for noun, path in (("volume", "volumes"), ("export", "exports"), ("device", "devices"), ("job", "jobs"), ("group", "groups")):
        assert json.loads(daemon.cli(noun, "list", "--json")) == daemon.get(f"/v1/{path}"), noun
    assert json.loads(daemon.cli("array", "list", "--json"))[0]["name"] == "data"
    uuid = made["uuid"]
    assert json.loads(daemon.cli("volume", "show", uuid, "--json")) == made


def volumes_live_by_commands(subject):
    daemon = subject.daemon()
    _array(daemon)
    daemon.cli("volume", "create", "v1", "--backing", "data", "--size", "4M")
    assert json.loads(daemon.cli("volume", "grow", "v1", "--size", "+4M", "--json"))["size_bytes"] == 8 * MIB
    daemon.cli("volume", "rename", "v1", "root")
    daemon.cli("group", "set", "gold", "--bandwidth", "100M:200M")
    daemon.cli("volume", "set", "root", "--read-iops", "1000", "--group", "gold")
    volume = daemon.get("/v1/volumes/root")
    assert (volume["qos"], volume["group"]) == ({"read_iops": {"per_s": 1000, "burst": 0}}, "gold"), volume
    assert daemon.cli("group", "list") == (
        "NAME  LIMITS                         VOLUMES\n"
        "gold  bandwidth 104857600:209715200  root\n"), daemon.cli("group", "list")
    daemon.cli("volume", "set", "root", "--read-iops", "1000", "--min-iops", "200")
    volume = daemon.get("/v1/volumes/root")
    assert volume["min_qos"] == {"requests_per_s": 200} and volume["group"] == "gold", volume
    assert "minimum     iops 200" in daemon.cli("volume", "show", "root")
    daemon.cli("volume", "set", "root", "--no-group")
    assert daemon.get("/v1/volumes/root")["group"] is None
    assert daemon.get("/v1/volumes/root")["qos"] == volume["qos"], "who leaves a group keeps the limits"
    daemon.cli("group", "delete", "gold")
    daemon.cli("device", "create", "other", f"mem:size={64 * MIB}")
    assert "root.move  move" in daemon.cli("volume", "move", "root", "--to", "other", "--wait")
    assert daemon.get("/v1/volumes/root")["backing"] == "other"
    code, _, said = daemon.cli("volume", "move", "root", "--to", "other", check=False)
    assert (code, said) == (1, "freestone: volume root: it is on other already\n"), said
    daemon.cli("volume", "delete", "root", "--yes")
    daemon.cli("array", "delete", "data", "--yes")
    assert daemon.get("/v1/arrays") == []


def a_command_that_loses_data_names_it_and_needs_yes(subject):
    daemon = subject.daemon()
    _array(daemon)
    daemon.cli("volume", "create", "v1", "--backing", "data", "--size", "4M")
    code, out, err = daemon.cli("volume", "delete", "v1", check=False)
    assert (code, out) == (2, ""), (code, out, err)
    assert err == "freestone: volume v1 (4 MiB on data) and what is on it is lost: give --yes if that is meant\n", err
    code, out, err = daemon.cli("array", "delete", "data", check=False)
    assert code == 2 and "array data (88.1 MiB, level 5) and what is on it is lost" in err, err
    before = daemon.get("/v1/volumes")
    assert daemon.cli("volume", "delete", "v1", "--dry-run") == f"DELETE /v1/volumes/{before[0]['uuid']}\n"
    said = daemon.cli("volume", "create", "v2", "--backing", "data", "--size", "1M", "--dry-run")
    assert said.startswith("POST /v1/volumes {") and '"size_bytes":1048576' in said, said
    assert daemon.get("/v1/volumes") == before
    code, out, err = daemon.cli("volume", "show", "nope", check=False)
    assert (code, err) == (1, 'freestone: no volume "nope"\n'), err
    code, out, err = daemon.cli("volume", "list", "--socket", "/nowhere/d.sock", check=False)
    assert code == 1 and err.startswith("freestone: freestoned does not answer at /nowhere/d.sock: No such file"), err
    code, out, err = daemon.cli("array", "create", "other", "--level", "1", daemon.path("m0"), daemon.path("m1"), check=False)
    assert code == 1 and "m0" in err, err


def an_array_of_the_daemon_is_looked_after_by_the_same_commands(subject):
    daemon = subject.daemon()
    _array(daemon)
    spare = daemon.file("spare", 32 * MIB)
    daemon.cli("array", "fail", "data", "1")
    daemon.cli("array", "add", "data", spare)
    daemon.wait_for("the rebuild", lambda: daemon.get("/v1/arrays/data")["state"] == "optimal")
    daemon.cli("job", "wait")
    # The sandbox hides the files with the host's name.
    member = json.loads(daemon.cli("array", "examine", "--json", daemon.path("m0")))
    assert member["served_by"] == os.uname().nodename, member
    assert daemon.get("/v1/system")["host"] == os.uname().nodename
    assert "optimal, running" in daemon.cli("array", "show", "data")
    # What was added over the array's own socket is known after a kill, too.
    daemon.kill()
    daemon.start()
    assert daemon.get("/v1/arrays/data")["state"] == "optimal", daemon.get("/v1/arrays/data")
    assert any(event["what"] == "started" and event["name"] == "data" for event in daemon.get("/v1/events"))
    code, _, err = daemon.cli("array", "fail", "data", "9", check=False)
    assert code == 1 and err.count("array data") == 1, err
    code, _, err = daemon.cli("array", "stop", "data", check=False)
    assert code == 1 and "serves other devices too" in err, err


def long_operations_are_waited_for_and_can_be_cancelled(subject):
    daemon = subject.daemon()
    daemon.post("/v1/devices", {"name": "slow", "spec": f"nbd:path={_slow_server(subject, daemon)}"})
    large = ("volume", "create", "v1", "--backing", "slow", "--size", "1G")
    assert "size        1 GiB" in daemon.cli(*large), "it was not waited for"
    grow = subprocess.Popen([paths.FREESTONE, "volume", "grow", "v1", "--size", "+2G"], env=daemon.environment(),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    daemon.wait_for("the job", lambda: daemon.cli("job", "list").startswith("JOB      KIND") and "v1.grow" in daemon.cli("job", "list"))
    code, _, err = daemon.cli("volume", "grow", "v1", "--size", "3G", check=False)
    assert code == 1 and "volume v1: job v1.grow is at work on it" in err, err
    daemon.cli("job", "cancel", "v1.grow")
    out, err = grow.communicate(timeout=60)
    # The second if it was not a job to the program yet.
    is_said = "volume v1: it is as large as before" in err or "job v1.grow was given up" in err
    assert grow.returncode == 1 and not out and is_said, (grow.returncode, out, err)
    assert daemon.get("/v1/volumes/v1")["size_bytes"] == 1024 * MIB


def _slow_server(subject, daemon):
    """The socket of a device that takes its time to make something zeroes."""
    socket, disk = os.path.join(subject.scratch, "slow.sock"), daemon.file("slow", 8192 * MIB)
    serve = subprocess.Popen(
        [paths.FREESTONE, "serve", "--device", f"io_uring:path={disk}", "--layer", "fault:op=write_zeroes,delay-us=150000",
         "--export", f"nbd:socket={socket}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)
    subject.ends.callback(serve.kill)
    daemon.wait_for("freestone serve", lambda: os.path.exists(socket))
    return socket


def an_export_says_how_it_is_attached(subject):
    daemon = subject.daemon()
    _array(daemon)
    daemon.cli("volume", "create", "v1", "--backing", "data", "--size", "4M")
    daemon.cli("export", "create", "vm1", "--kind", "vhost-user-blk", "--volume", "v1")
    for version, reconnect in (("7.2.17", "reconnect=1"), ("9.2", "reconnect-ms=100"), ("10.0.2", "reconnect-ms=100")):
        line = daemon.cli("export", "show", "vm1", "--attach", "qemu", "--qemu", version)
        assert f"path={daemon.path('vm1.sock')},{reconnect} " in line and line.count("\n") == 1, line
    code, _, err = daemon.cli("export", "show", "vm1", "--attach", "floppy", check=False)
    assert code == 2 and "nothing is known for floppy, but for cloud-hypervisor, crosvm, firecracker, libvirt-disk, libvirt-domain, proxmox, qemu, qemu-before-9.2" in err, err
    daemon.cli("export", "delete", "vm1")


def a_support_bundle_is_one_file(subject):
    daemon = subject.daemon()
    _array(daemon)
    daemon.cli("support", "collect", "-o", "support.json")
    with open(daemon.path("support.json")) as file:
        collected = json.load(file)
    assert collected["arrays"][0]["name"] == "data" and collected["system"]["version"] == collected["program"]
    assert any(line.startswith("freestone_array_state") for line in collected["metrics"])
    code, _, err = daemon.cli("support", "collect", "-o", "support.json", check=False)
    assert code == 1 and "File exists" in err, err


def shells_and_manual_readers_are_served(subject):
    daemon = subject.daemon()
    assert "_freestone" in daemon.cli("completion", "bash")
    daemon.cli("man", daemon.path("man"))
    with open(daemon.path("man/freestone-volume-create.1")) as page:
        text = page.read()
    assert "Create a volume; it reads as zeroes" in text, text[:500]
    top = daemon.cli("top", "--count", "1")
    assert top.startswith("VOLUME"), top
