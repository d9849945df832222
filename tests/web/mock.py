#!/usr/bin/env python3
"""A freestoned without storage: the REST API over a state in memory, with counters and jobs that move, and the page's files.

    tests/web/mock.py --port 8080 --scenario degraded      then open http://127.0.0.1:8080/#token=secret

Only what the page needs is checked. The shapes are those of crates/api."""

import argparse
import contextlib
import http.server
import json
import math
import os
import queue
import socket
import threading
import time
import urllib.parse
import uuid

HERE = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(os.path.dirname(HERE))
PAGE = os.path.join(REPO, "crates", "daemon", "web")
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
CSP = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
ADMIN, READER = "secret", "only-looking"
GIB = 1 << 30
SLOW_BYTES = 64 << 40  # what takes long to be made
HOSTILE = "<img src=x onerror=document.title='pwned'>"


class Problem(Exception):
    """An answer that is an error."""

    def __init__(self, status, kind, detail):
        super().__init__(detail)
        self.status = status
        self.body = {"type": kind, "title": kind.replace("-", " "), "status": status, "detail": detail}


def named(kind, name):
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{kind}/{name}"))


def drive(model, serial, celsius, wear=None, **more):
    """A drive of the host; one with wear is of NVMe."""
    health = None if wear is None else {"wear_percent": wear, "spare_percent": 100, "spare_threshold_percent": 10, "media_errors": 0, "warnings": [], **more}
    return {"model": model, "serial": serial, "firmware": "1.2", "size_bytes": 4096 * GIB, "address": "0:0:1:0" if wear is None else "0000:01:00.0",
            "temperature_celsius": celsius, "health": health, "reason": "only NVMe drives have a health log here" if wear is None else None}


def disk(name, path, *uses, **more):
    """A block device of the host; free without uses, which are (kind, text)."""
    return {"name": name, "path": path, "partition_of": None, "size_bytes": 4096 * GIB, "logical_block_bytes": 512, "physical_block_bytes": 4096, "is_rotational": False,
            "transport": "nvme", "model": "Fast Disk 4T", "serial": None, "read_only": False, "is_free": not uses, "uses": [{"kind": kind, "text": text} for kind, text in uses], **more}


class State:
    """What the daemon has. Who uses it holds `lock`."""

    def __init__(self):
        self.lock = threading.RLock()
        self.started_ns = time.time_ns()
        self.devices, self.arrays, self.volumes, self.groups, self.exports, self.jobs = {}, {}, {}, {}, {}, {}
        self.disks = []
        self.events = []
        self.listeners = set()

    def emit(self, kind, name, what, text):
        event = {"id": len(self.events) + 1, "at_ns": time.time_ns(), "kind": kind, "name": name, "what": what, "text": text}
        self.events.append(event)
        for listener in self.listeners:
            listener.put(event)

    def add_device(self, name, spec, **more):
        self.devices[name] = {"name": name, "spec": spec, "capacity_bytes": 256 * GIB, "block_bytes": 4096, "read_only": False, "free_bytes": None, "full_in_s": None, "error": None, "drive": None, **more}

    def add_array(self, name, level, members, **more):
        parity = {"0": 0, "1": len(members) - 1, "10": 1, "5": 1, "6": 2, "7.3": 3}.get(level, 2)
        data = max(len(members) - parity, 1)
        self.arrays[name] = {
            "name": name, "uuid": named("array", name), "level": level, "consistency": "bitmap" if level.startswith("1") else "ppl", "groups": 1,
            "data": data, "parity": parity, "strip_bytes": 131072, "block_bytes": 4096, "capacity_bytes": data * 4096 * GIB, "scrub": None, "error": None,
            "members": [{"slot": slot, "uuid": named("member", f"{name}/{slot}"), "device": device, "state": "live", "reason": None, "drive": None} for slot, device in enumerate(members)],
            "spares": [], "full_in_s": None, **more}

    def add_volume(self, name, on, size, **more):
        self.volumes[name] = {"name": name, "uuid": named("volume", name), "backing": on, "size_bytes": size, "extents": 1, "qos": {}, "group": None, "min_qos": {}, "moving_to": None, **more}

    def add_export(self, name, kind, of, clients=1, **more):
        listen = kind == "nvme-tcp"
        options = {"listen": "10.0.0.1:4420", "nqn": f"nqn.2014-08.org.example:{name}"} if listen else {} if kind in ("ublk", "vduse") else {"socket": f"/run/freestone/{name}.sock"}
        traffic = {"clients": clients, "connections": clients + 2, "reads": 81234, "writes": 20111, "read_bytes": 9 * GIB, "written_bytes": 3 * GIB, "errors": 0}
        self.exports[name] = {"name": name, "kind": kind, "volumes": of, "options": options, "hosts": None, "read_only": False, "cores": [], "state": "active", "error": None,
                              "description": None, "traffic": traffic, **more}

    def add_job(self, kind, array, slot, done, **more):
        job_id = f"{array}:{kind}" + ("" if slot is None else f":{slot}")
        self.jobs[job_id] = {"id": job_id, "kind": kind, "backing": array, "volume": None, "slot": slot, "done_bytes": int(done * 4096 * GIB), "total_bytes": 4096 * GIB,
                             "bytes_per_s": 412 << 20, "eta_s": 0, "is_paused": False, "is_urgent": False, **more}
        return job_id

    # Answers: what depends on other objects is filled in.

    def volume(self, volume):
        return {**volume, "exports": [e["name"] for e in self.exports.values() if volume["name"] in e["volumes"]]}

    def device(self, device):
        return {**device, **self.holdings(device["name"])}

    def group(self, group):
        return {**group, "volumes": [v["name"] for v in self.volumes.values() if v["group"] == group["name"]]}

    def holdings(self, name):
        return {"volumes": [v["name"] for v in self.volumes.values() if v["backing"] == name], "exports": [e["name"] for e in self.exports.values() if name in e["volumes"]]}

    def array(self, array):
        out = sum(member["state"] != "live" for member in array["members"])
        state = "offline" if array["error"] else "optimal" if out == 0 else "degraded" if out <= array["parity"] else "failed"
        left = None if array["error"] else max(array["parity"] - out, 0)
        used = sum(v["size_bytes"] for v in self.volumes.values() if v["backing"] == array["name"])
        return {**array, "state": state, "redundancy_left": left, "free_bytes": array["capacity_bytes"] - used, "jobs": [self.job(j) for j in self.jobs.values() if j["backing"] == array["name"] and not j["volume"]],
                **self.holdings(array["name"])}

    def health(self):
        """The problems, as the daemon lists them."""
        problems = []

        def add(code, severity, kind, name, text):
            problems.append({"code": code, "severity": severity, "kind": kind, "object": name, "text": text, "since_ns": self.started_ns})
        for array in map(self.array, self.arrays.values()):
            name, state = array["name"], array["state"]
            if state != "optimal":
                out = ", ".join(f"slot {m['slot']} {m['state']}" for m in array["members"] if m["state"] != "live")
                add(f"array-{state}", "warning" if array["redundancy_left"] else "critical", "array", name, f"Array {name} is {state}: {array['error'] or out}")
            if array["scrub"] and not array["scrub"]["is_repairing"] and array["scrub"]["mismatched_rows"]:
                add("mismatched-rows", "warning", "array", name, f"The scrub of array {name} found {array['scrub']['mismatched_rows']} mismatched rows")
        for device in self.devices.values():
            if device["error"]:
                add("device-not-open", "critical", "device", device["name"], f"Device {device['name']} is not open: {device['error']}")
        for export in self.exports.values():
            if export["state"] != "active":
                add("export-waiting", "warning", "export", export["name"], f"Export {export['name']} is {export['state']}: {export['error']}")
        return sorted(problems, key=lambda problem: problem["severity"] == "warning")

    def clients(self, export):
        """As many clients as the export counts; those of NVMe are hosts with two queues each."""
        def client(i):
            is_network = export["kind"] in ("nbd", "nvme-tcp")
            nvme = {"host": f"nqn.2014-08.org.example:host-{i}", "controller": i + 1, "queues": 2} if export["kind"] == "nvme-tcp" else {"host": None, "controller": None, "queues": None}
            return {**nvme, "address": f"10.0.0.{i + 10}:51{i}" if is_network else None, "since_ns": self.started_ns, "is_secured": i == 0 and is_network, "is_authenticated": i < 2 and is_network,
                    "read_bytes": 3 * GIB if is_network else None, "written_bytes": GIB if is_network else None}
        return [client(i) for i in range(export["traffic"]["clients"])]

    def job(self, job):
        left = job["total_bytes"] - job["done_bytes"]
        return {**job, "bytes_per_s": 0 if job["is_paused"] else job["bytes_per_s"], "eta_s": None if job["is_paused"] else left // max(job["bytes_per_s"], 1)}

    def samples(self, now_ns=None):
        """Cumulative counters, as smooth functions of the time since the start: no two volumes are alike."""
        now_ns = now_ns or time.time_ns()
        t = (now_ns - self.started_ns) / 1e9 + 1000

        def counters(i, scale):
            # The integral of rate * (1 + waves), so that rates wander and never fall below 0.
            def total(rate, phase):
                waves = ((0.3, 0.05), (0.15, 0.23), (0.1, 0.71), (0.08, 1.9))
                return int(rate * (t - sum(height / pace * math.cos(t * pace * (1 + (i + phase) % 7 / 20) + phase + i) for height, pace in waves)))
            read_rate, write_rate = scale * (40 + 97 * i % 700), scale * (15 + 53 * i % 400)
            reads, writes = total(read_rate, 1), total(write_rate, 2)
            return {"reads": reads, "writes": writes, "read_bytes": reads * 8192, "written_bytes": writes * 12288,
                    "read_sum_ns": reads * 90_000 + total(read_rate * 60_000, 3), "write_sum_ns": writes * 120_000 + total(write_rate * 90_000, 4), "reads_timed": reads, "writes_timed": writes, "errors": 0, "in_flight": i % 5, "throttled_requests": 0, "throttled_ns": 0, "group_throttled_ns": 0}
        members = {f"{a['name']}/{m['slot']}": counters(m["slot"] + 3, 2) for a in self.arrays.values() for m in a["members"] if m["state"] != "missing"}
        return {"at_ns": now_ns, "volumes": {name: counters(i, 3) for i, name in enumerate(self.volumes)}, "members": members}

    def advance(self, seconds):
        """Jobs advance, and end."""
        for job in list(self.jobs.values()):
            if job["is_paused"]:
                continue
            job["done_bytes"] = min(job["done_bytes"] + int(job["bytes_per_s"] * seconds), job["total_bytes"])
            if job["done_bytes"] == job["total_bytes"]:
                del self.jobs[job["id"]]
                if job["volume"]:
                    self.volumes[job["volume"]].update(backing=job["backing"], moving_to=None)
                if job["slot"] is not None:
                    self.arrays[job["backing"]]["members"][job["slot"]].update(state="live", reason=None)
                self.emit("job", job["id"], "ended", f"The {job['kind']} of {job['backing']} is complete")


def healthy(state):
    state.add_array("data", "6", [f"/dev/sd{letter}" for letter in "bcdefg"])
    state.add_array("fast", "10", [f"/dev/nvme{i}n1" for i in range(4)])
    for slot, member in enumerate(state.arrays["data"]["members"]):
        member["drive"] = drive("HARD DISK 16T", f"WX{slot}42", 33 + slot)
    for slot, member in enumerate(state.arrays["fast"]["members"]):
        member["drive"] = drive("Fast Disk 4T", f"S{slot}NX", 41 + slot, wear=3 + slot)
    state.arrays["data"]["spares"] = [{"device": "/dev/sdh", "drive": drive("HARD DISK 16T", "WX942", 30)}]
    state.arrays["data"]["scrub"] = {"is_repairing": False, "is_complete": True, "stripes": 8388608, "mismatched_rows": 0, "unreadable": 0}
    state.add_device("scratch", "io_uring:path=/dev/nvme4n1,direct=on", drive=drive("Fast Disk 4T", "S9NX", 47, wear=12))
    state.groups["guests"] = {"name": "guests", "qos": {"iops": {"per_s": 50000, "burst": 0}}}
    for name, on, size in [("vm-web-1", "fast", 80), ("vm-web-2", "fast", 80), ("vm-db", "fast", 500), ("backup", "data", 8192), ("archive", "data", 4096), ("media", "data", 2048)]:
        state.add_volume(name, on, size * GIB, group="guests" if name.startswith("vm-web") else None)
    state.volumes["backup"]["qos"] = {"bandwidth": {"per_s": 400 << 20, "burst": 0}, "write_iops": {"per_s": 2000, "burst": 500}}
    state.add_volume("tmp", "scratch", 100 * GIB)
    for name in ("vm-web-1", "vm-web-2", "vm-db"):
        state.add_export(name + "-disk", "vhost-user-blk", [name])
    state.add_export("bulk", "nvme-tcp", ["backup", "archive"], clients=3)
    state.add_export("media-ro", "nbd", ["media"], clients=0, read_only=True)
    state.emit("daemon", "freestoned", "started", "The daemon was started")
    state.emit("array", "data", "started", "The array data runs, 6 of 6 members are live")
    state.emit("volume", "media", "created", "The volume media of 2 TiB was made on data")


def degraded(state):
    healthy(state)
    members = state.arrays["data"]["members"]
    members[2].update(state="rebuilding", device="/dev/sdh", reason=None, drive=state.arrays["data"]["spares"][0]["drive"])
    members[4].update(state="missing", device=None, drive=None, reason="write error at 1.2 TiB: medium error")
    state.arrays["data"]["spares"] = []
    state.add_job("rebuild", "data", 2, 0.38)
    state.add_job("check", "fast", None, 0.71, bytes_per_s=1900 << 20)
    state.exports["media-ro"].update(state="waiting", error="/run/freestone/media-ro.sock: address in use")
    state.emit("array", "data", "degraded", "The array data is degraded: slot 4 (/dev/sdf) failed with a medium error")
    state.emit("job", "data:rebuild:2", "started", "The rebuild of slot 2 of data was started on /dev/sdh")


def many(state):
    """1,000 volumes, each with an export, and a wide array."""
    state.add_array("pool", "60", [f"/dev/disk{i}" for i in range(24)])
    for i in range(1000):
        state.add_volume(f"vm-{i:04}", "pool", (10 + i % 90) * GIB)
        state.add_export(f"vm-{i:04}-disk", "vhost-user-blk", [f"vm-{i:04}"])


def hostile(state):
    """Names that are markup, everywhere."""
    state.add_device(f"{HOSTILE}d", f"io_uring:path={HOSTILE}")
    state.add_array(f"{HOSTILE}a", "5", [f"/dev/{HOSTILE}{i}" for i in range(3)])
    state.arrays[f"{HOSTILE}a"]["members"][1].update(state="missing", reason=HOSTILE)
    state.add_job("check", f"{HOSTILE}a", None, 0.2)
    state.groups[f"{HOSTILE}g"] = {"name": f"{HOSTILE}g", "qos": {}}
    state.add_volume(f"{HOSTILE}v", f"{HOSTILE}a", 10 * GIB, group=f"{HOSTILE}g")
    state.add_export(f"{HOSTILE}e", "nbd", [f"{HOSTILE}v"], error=HOSTILE, state="waiting")
    state.emit("volume", f"{HOSTILE}v", "created", f"{HOSTILE} was made")


def empty(state):
    """A host with disks, and no objects."""
    state.disks = [
        disk("sda", "/dev/disk/by-id/ata-SYSTEM_S0", ("partitions", "partition table: sda1"), transport="sata", model="SYSTEM", serial="S0"),
        disk("sda1", "/dev/disk/by-id/ata-SYSTEM_S0-part1", ("mounted", "mounted at /"), partition_of="sda", transport="sata", model="SYSTEM", serial="S0"),
        *[disk(f"nvme{i}n1", f"/dev/disk/by-id/nvme-Fast_Disk_4T_S{i}NX", serial=f"S{i}NX") for i in range(4)],
        disk("sdb", "/dev/sdb", ("unknown", "/dev/sdb: Permission denied (os error 13)"), transport="usb", model=HOSTILE, serial=HOSTILE),
        disk("vda", "/dev/vda", transport="virtio", model=None, read_only=True, is_free=False),
    ]


SCENARIOS = {function.__name__: function for function in (healthy, degraded, many, hostile, empty)}


class Api:
    """The routes: each method gets the names of the path and the body, and returns (status, answer)."""

    def __init__(self, state):
        self.state = state

    def call(self, method, path, query, body):
        parts = [urllib.parse.unquote(part) for part in path.split("/")]
        with self.state.lock:
            handler = getattr(self, f"{method.lower()}_{parts[0]}", None)
            if handler is None:
                raise Problem(404, "not-found", f"{method} /v1/{path}: there is nothing")
            more = {"after": int(query.get("after", ["0"])[0])} if parts[0] == "events" else {"query": query} if parts[0] == "history" else {}
            return handler(*parts[1:], **more, **({"body": body} if body is not None else {}))

    def find(self, what, name):
        objects = getattr(self.state, what)
        for key, value in objects.items():
            if name in (key, value.get("uuid")):
                return value
        raise Problem(404, "not-found", f"no {what[:-1]} {name}")

    def check_new(self, name):
        if not name or "/" in name:
            raise Problem(400, "invalid", f"“{name}” is no name")
        for what in ("devices", "arrays", "volumes"):
            if name in getattr(self.state, what):
                raise Problem(409, "exists", f"there is a {what[:-1]} {name} already")

    def get_system(self):
        cores = [{"number": i, "cpu": i, "exports": list(self.state.exports)[i::2]} for i in range(2)]
        return 200, {"version": "0.1.0", "host": "storage-1", "state": "ready", "start": None, "pid": 4711, "started_ns": self.state.started_ns, "user": 990, "state_dir": "/var/lib/freestone", "generation": 42, "cores": cores}

    def get_health(self):
        return 200, self.state.health()

    def get_samples(self):
        return 200, self.state.samples()

    def get_history(self, query):
        """Points of equal intervals up to now, with waves; the object's events are its markers."""
        what, _, name = query["object"][0].partition("/")
        if what == "members":
            array, _, slot = name.partition("/")
            if not any(str(member["slot"]) == slot for member in self.find("arrays", array)["members"]):
                raise Problem(404, "not-found", f"history of {name}: not found")
        else:
            self.find(what, name)
        seconds = int(query["seconds"][0])
        resolution_s = 10 if seconds <= 3600 else 240
        last_ns = time.time_ns() // (resolution_s * 10**9) * resolution_s * 10**9
        points = []
        for i in reversed(range(seconds // resolution_s)):
            at_ns = last_ns - i * resolution_s * 10**9
            reads = int(resolution_s * (900 + 500 * math.sin(at_ns / 6e11)))
            has_latency = what != "exports"
            points.append({"at_ns": at_ns, "reads": reads, "writes": reads // 3, "read_bytes": reads * 8192, "written_bytes": reads // 3 * 12288,
                           "p50_ns": 90_000 if has_latency else None, "p99_ns": 850_000 if has_latency else None})
        markers = [{key: event[key] for key in ("at_ns", "kind", "name", "what", "text")} for event in self.state.events if event["name"] == name]
        return 200, {"object": query["object"][0], "resolution_s": resolution_s, "points": points, "markers": [{**marker, "at_ns": last_ns - 600 * 10**9} for marker in markers]}

    def get_events(self, after=0):
        return 200, [event for event in self.state.events if event["id"] > after]

    def get_disks(self):
        users = {member["device"]: f"array {array['name']}" for array in self.state.arrays.values() for member in array["members"]}
        users |= {device["spec"]: f"device {device['name']}" for device in self.state.devices.values()}
        taken = [{**disk, "is_free": False, "uses": [{"kind": "freestone", "text": f"used by {users[disk['path']]}"}]} if disk["path"] in users else disk for disk in self.state.disks]
        return 200, taken

    def get_devices(self, name=None):
        if name is not None:
            return 200, self.state.device(self.find("devices", name))
        return 200, [self.state.device(device) for device in self.state.devices.values()]

    def post_devices(self, body):
        self.check_new(body["name"])
        if "missing" in body["spec"]:
            raise Problem(422, "cannot-open", f"{body['spec']}: no such file or directory")
        self.state.add_device(body["name"], body["spec"])
        self.state.emit("device", body["name"], "created", f"The device {body['name']} was opened")
        return 201, self.state.device(self.state.devices[body["name"]])

    def delete_devices(self, name):
        if self.state.holdings(name)["volumes"]:
            raise Problem(409, "in-use", f"device {name} has volumes")
        del self.state.devices[self.find("devices", name)["name"]]
        self.state.emit("device", name, "deleted", f"The device {name} was closed")
        return 204, None

    def get_arrays(self, name=None, part=None):
        if name is None:
            return 200, [self.state.array(array) for array in self.state.arrays.values()]
        array = self.state.array(self.find("arrays", name))
        return 200, array["members"] if part == "members" else array

    def post_arrays(self, name=None, part=None, *, body):
        if name is not None:
            return self.act(self.find("arrays", name), dict(body))
        self.check_new(body["name"])
        if len(body["members"]) < 2:
            raise Problem(422, "invalid", f"level {body['level']} needs more than 1 member")
        self.state.add_array(body["name"], body["level"], body["members"])
        self.state.emit("array", body["name"], "created", f"The array {body['name']} was made")
        return 201, self.state.array(self.state.arrays[body["name"]])

    def delete_arrays(self, name):
        array = self.find("arrays", name)
        holdings = self.state.holdings(name)
        if holdings["exports"] or any(self.state.volume(self.state.volumes[volume])["exports"] for volume in holdings["volumes"]):
            raise Problem(409, "in-use", f"array {name} is served")
        for volume in holdings["volumes"]:
            del self.state.volumes[volume]
        del self.state.arrays[array["name"]]
        self.state.emit("array", name, "deleted", f"The array {name} was deleted")
        return 204, None

    def act(self, array, body):
        action = body.pop("action")
        name = array["name"]
        text = getattr(self, f"act_{action.replace('-', '_')}")(array, **body)
        self.state.emit("array", name, "changed", text)
        return 200, {"text": text, "array": self.state.array(array)}

    def members(self, array, names):
        for name in names:
            found = [member for member in array["members"] if name in (str(member["slot"]), member["uuid"], member["device"])]
            if not found:
                raise Problem(404, "not-found", f"array {array['name']} has no member {name}")
            yield found[0]

    def act_fail(self, array, members):
        for member in self.members(array, members):
            member.update(state="missing", reason="failed by the operator")
        return f"Slot {', '.join(members)} of {array['name']} is out"

    def act_remove(self, array, members):
        spares = [spare for spare in array["spares"] if spare["device"] not in members]
        if len(spares) < len(array["spares"]):
            array["spares"] = spares
            return f"The spare {', '.join(members)} of {array['name']} is let go"
        chosen = [m for m in array["members"] if m["state"] == "missing"] if members == ["failed"] else list(self.members(array, members))
        for member in chosen:
            member.update(uuid=None, device=None)
        return f"{len(chosen)} members of {array['name']} are let go"

    def act_add(self, array, devices, force=False, **_):
        for device in devices:
            if "used" in device and not force:
                raise Problem(409, "not-empty", f"{device} holds an ext4 file system: force overwrites it")
            array["spares"].append({"device": device})
        return f"{', '.join(devices)} is a spare of {array['name']}"

    def act_re_add(self, array, devices):
        out = [member for member in array["members"] if member["state"] == "missing"]
        if not out:
            raise Problem(409, "invalid", f"array {array['name']} misses no member")
        out[0].update(state="rebuilding", device=devices[0], reason=None)
        self.state.add_job("partial-resync", array["name"], out[0]["slot"], 0.1)
        return f"{devices[0]} is back in slot {out[0]['slot']} of {array['name']}"

    def act_replace(self, array, member, device, force=False):
        slot = next(self.members(array, [member]))["slot"]
        if "used" in device and not force:
            raise Problem(409, "not-empty", f"{device} holds an ext4 file system: force overwrites it")
        self.state.add_job("replace", array["name"], slot, 0)
        return f"Slot {slot} of {array['name']} is copied to {device}"

    def act_grow(self, array, **_):
        array["capacity_bytes"] += 1024 * GIB
        return f"The array {array['name']} has grown"

    def act_scrub(self, array, repair=False):
        kind = "repair" if repair else "check"
        self.state.add_job(kind, array["name"], None, 0)
        array["scrub"] = {"is_repairing": repair, "is_complete": False, "stripes": 0, "mismatched_rows": 0, "unreadable": 0}
        return f"The {kind} of {array['name']} was started"

    def set_paused(self, array, is_paused):
        for job in self.state.jobs.values():
            if job["backing"] == array["name"]:
                job["is_paused"] = is_paused

    def get_volumes(self, name=None):
        if name is not None:
            return 200, self.state.volume(self.find("volumes", name))
        served = {}
        for export in self.state.exports.values():
            for name in export["volumes"]:
                served.setdefault(name, []).append(export["name"])
        return 200, [{**volume, "exports": served.get(volume["name"], [])} for volume in self.state.volumes.values()]

    def post_volumes(self, name=None, action=None, body=None):
        if action == "move":
            return self.move_volume(name, body)
        self.check_new(body["name"])
        if body["size_bytes"] > 1 << 50:
            raise Problem(409, "no-room", f"{body['backing']} has no room for {body['size_bytes']} bytes")
        if body["size_bytes"] >= SLOW_BYTES:
            return self.begin("create", body["name"], body["backing"])
        self.state.add_volume(body["name"], body["backing"], body["size_bytes"], qos=body.get("qos", {}), group=body.get("group"))
        self.state.emit("volume", body["name"], "created", f"The volume {body['name']} was made on {body['backing']}")
        return 201, self.state.volume(self.state.volumes[body["name"]])

    def begin(self, kind, volume, on):
        job = self.state.add_job(kind, on, None, 0.25, volume=volume)
        self.state.emit("job", job, "changed", "resumed")
        return 202, self.state.job(self.state.jobs[job])

    def move_volume(self, name, body):
        volume = self.find("volumes", name)
        if volume["moving_to"]:
            raise Problem(409, "in-use", f"volume {volume['name']}: it moves to {volume['moving_to']} at the moment")
        volume["moving_to"] = body["backing"]
        job = self.state.add_job("move", body["backing"], None, 0.25, volume=volume["name"])
        self.state.emit("volume", volume["name"], "moving", f"to {body['backing']}")
        return 202, self.state.job(self.state.jobs[job])

    def delete_jobs(self, job_id):
        job = self.find("jobs", job_id)
        if job["kind"] == "move":
            self.find("volumes", job["volume"])["moving_to"] = None
        del self.state.jobs[job["id"]]
        self.state.emit("job", job["id"], "ended", f"The {job['kind']} was cancelled")
        return 204, None

    def patch_volumes(self, name, body):
        volume = self.find("volumes", name)
        if "size_bytes" in body and body["size_bytes"] > 1 << 50:
            raise Problem(409, "no-room", f"{volume['backing']} has no room for {body['size_bytes']} bytes")
        if "name" in body:
            self.check_new(body["name"])
            del self.state.volumes[volume["name"]]
            for export in self.state.exports.values():
                export["volumes"] = [body["name"] if of == volume["name"] else of for of in export["volumes"]]
            self.state.volumes[body["name"]] = volume
        if body.get("size_bytes", 0) >= SLOW_BYTES:
            return self.begin("grow", volume["name"], volume["backing"])
        volume.update({key: value or None if key == "group" else value for key, value in body.items()})
        self.state.emit("volume", volume["name"], "changed", f"The volume {volume['name']} was changed")
        return 200, self.state.volume(volume)

    def delete_volumes(self, name):
        volume = self.state.volume(self.find("volumes", name))
        if volume["exports"]:
            raise Problem(409, "in-use", f"volume {volume['name']} is served by {', '.join(volume['exports'])}")
        del self.state.volumes[volume["name"]]
        self.state.emit("volume", volume["name"], "deleted", f"The volume {volume['name']} was deleted")
        return 204, None

    def get_groups(self):
        return 200, [self.state.group(group) for group in self.state.groups.values()]

    def put_groups(self, name, body):
        self.state.groups[name] = {"name": name, "qos": body}
        self.state.emit("group", name, "changed", f"The limits of group {name} are set")
        return 200, self.state.group(self.state.groups[name])

    def delete_groups(self, name):
        del self.state.groups[self.find("groups", name)["name"]]
        for volume in self.state.volumes.values():
            if volume["group"] == name:
                volume["group"] = None
        self.state.emit("group", name, "deleted", f"The group {name} was deleted")
        return 204, None

    def get_exports(self, name=None, part=None):
        if name is None:
            return 200, list(self.state.exports.values())
        export = self.find("exports", name)
        if part == "clients":
            return 200, self.state.clients(export)
        if part != "attach":
            return 200, export
        where = export["options"].get("socket") or export["options"].get("listen") or f"/dev/{name}"
        if export["kind"] == "vhost-user-blk":
            return 200, {"lines": {"qemu": f"-object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem -chardev socket,id={name},path={where} -device vhost-user-blk-pci,chardev={name}",
                                   "cloud-hypervisor": f"--memory size=4G,shared=on --disk vhost_user=true,socket={where}"}}
        if export["kind"] == "nvme-tcp":
            return 200, {"lines": {"nvme": f"nvme connect -t tcp -a 10.0.0.1 -s 4420 -n {export['options']['nqn']}"}}
        return 200, {"lines": {"nbd-client" if export["kind"] == "nbd" else "path": f"nbd-client -unix {where} /dev/nbd0" if export["kind"] == "nbd" else where}}

    def post_exports(self, body):
        if body["name"] in self.state.exports:
            raise Problem(409, "exists", f"export {body['name']} exists already")
        for name in body["volumes"]:
            if not any(name in getattr(self.state, what) for what in ("volumes", "arrays", "devices")):
                raise Problem(404, "not-found", f"no volume, array or device {name}")
        self.state.add_export(body["name"], body["kind"], body["volumes"], clients=0, read_only=body.get("read_only", False))
        self.state.exports[body["name"]]["options"].update(body.get("options", {}))
        self.state.emit("export", body["name"], "created", f"The export {body['name']} was made")
        return 201, self.state.exports[body["name"]]

    def patch_exports(self, name, body):
        export = self.find("exports", name)
        export.update(body)
        self.state.emit("export", name, "changed", f"The export {name} was changed")
        return 200, export

    def delete_exports(self, name):
        del self.state.exports[self.find("exports", name)["name"]]
        self.state.emit("export", name, "deleted", f"The export {name} was deleted")
        return 204, None

    def get_jobs(self, job_id=None):
        return 200, [self.state.job(job) for job in self.state.jobs.values()] if job_id is None else self.state.job(self.find("jobs", job_id))

    def patch_jobs(self, job_id, body):
        job = self.find("jobs", job_id)
        if "is_paused" in body:
            self.set_paused(self.state.arrays[job["backing"]], body["is_paused"])
        if body.get("max_bytes_per_s"):
            job["bytes_per_s"] = body["max_bytes_per_s"]
        self.state.emit("job", job_id, "changed", f"The jobs of {job['backing']} were changed")
        return 200, self.state.job(job)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self):
        self.server.connections.discard(self.connection)
        super().finish()

    def answer(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def handle_request(self):
        url = urllib.parse.urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        data = self.rfile.read(length)
        if url.path != "/metrics" and not url.path.startswith("/v1/"):
            return self.file(url.path)
        mock = self.server.mock
        mock.requests.append((self.command, url.path, data.decode()))
        try:
            self.authorize()
            if mock.fault:
                mock.fault(self.command, url.path)
            if url.path == "/v1/events/stream":
                return self.stream()
            if url.path == "/metrics":
                return self.answer(200, b"freestone_array_redundancy_left{array=\"data\"} 2\n", "text/plain; version=0.0.4; charset=utf-8")
            if url.path == "/v1/openapi.json":
                return self.answer(200, b'{"openapi": "3.1.0"}', "application/json")
            status, body = mock.api.call(self.command, url.path[len("/v1/"):], urllib.parse.parse_qs(url.query), json.loads(data) if data else None)
            if url.path == "/v1/system":
                body["role"] = self.role
            self.answer(status, b"" if body is None else json.dumps(body).encode(), "application/json")
        except Problem as problem:
            self.answer(problem.status, json.dumps(problem.body).encode(), "application/problem+json")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def authorize(self):
        tokens = self.server.mock.tokens
        given = self.headers.get("Authorization", "")
        role = self.role = tokens.get(given.removeprefix("Bearer ")) if tokens else "admin"
        if role is None:
            raise Problem(401, "unauthorized", "a token is needed")
        if role == "read-only" and self.command != "GET":
            raise Problem(403, "forbidden", f"role read-only may not {self.command} {self.path}")

    def file(self, path):
        name = "index.html" if path == "/" else os.path.basename(path) if path.startswith("/web/") else ""
        full = os.path.join(PAGE, name)
        if not name or not os.path.isfile(full):
            return self.answer(404, b"not found", "text/plain")
        with open(full, "rb") as file:
            self.answer(200, file.read(), TYPES[os.path.splitext(name)[1]])

    def stream(self):
        mock = self.server.mock
        listener = queue.Queue()
        with mock.state.lock:
            mock.state.listeners.add(listener)
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            while True:
                try:
                    event = listener.get(timeout=5)
                except queue.Empty:
                    self.wfile.write(b": still here\n\n")
                    self.wfile.flush()
                    continue
                if event is None:
                    return
                self.wfile.write(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
        except OSError:
            pass  # the page went
        finally:
            with mock.state.lock:
                mock.state.listeners.discard(listener)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.connections = set()

    def handle_error(self, request, address):
        pass  # pages come and go


class Mock:
    """A running mock: `state`, `requests` seen, `tokens` (token -> role; empty: none needed), `fault` (raises a Problem)."""

    def __init__(self, scenario="healthy", tokens=None, port=0):
        self.state = State()
        SCENARIOS[scenario](self.state)
        self.tokens = {ADMIN: "admin", READER: "read-only"} if tokens is None else tokens
        self.api = Api(self.state)
        self.requests = []
        self.fault = None
        self.port = port
        self.server = None
        self.is_closed = threading.Event()
        self.start()
        threading.Thread(target=self.tick, daemon=True).start()

    def start(self):
        self.server = Server(("127.0.0.1", self.port), Handler)
        self.server.mock = self
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def tick(self):
        while not self.is_closed.wait(0.5):
            with self.state.lock:
                self.state.advance(0.5)

    def emit(self, *event):
        with self.state.lock:
            self.state.emit(*event)

    def end_streams(self):
        """Every listener's connection ends."""
        with self.state.lock:
            for listener in self.state.listeners:
                listener.put(None)

    def stop(self):
        """Nothing listens any more."""
        self.server.shutdown()
        self.server.server_close()
        self.end_streams()
        for connection in list(self.server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.is_closed.set()
        self.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--scenario", choices=SCENARIOS, default="degraded")
    options = parser.parse_args()
    running = Mock(options.scenario, port=options.port)
    print(f"{running.url}#token={ADMIN}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        running.close()
