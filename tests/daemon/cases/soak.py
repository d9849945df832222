"""A thousand volumes and a hundred exports: how long control calls and starts take, and what they cost."""

import functools
import os
import statistics
import time

from freestoned import MIB

VOLUMES, EXPORTS = 1000, 100
LAST = 100


class _Calls:
    """Calls of one kind: how long each took, and the daemon's processor time for one of the last, both in milliseconds."""

    def __init__(self, daemon, calls):
        self.took_ms = []
        for left, call in zip(range(len(calls), 0, -1), calls):
            if left == min(LAST, len(calls)):
                before = _processor_ms(daemon)
            began = time.monotonic()
            call()
            self.took_ms.append((time.monotonic() - began) * 1000)
        self.processor_ms = (_processor_ms(daemon) - before) / min(LAST, len(calls))


def _processor_ms(daemon):
    with open(f"/proc/{daemon.process.pid}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")


def a_thousand_volumes_are_made_found_and_removed_quickly(subject):
    daemon = subject.daemon()
    members = [daemon.file(f"m{slot}", 1 << 30) for slot in range(4)]
    daemon.post("/v1/arrays", {"name": "data", "level": "5", "members": members})
    calls = {}

    def measure(what, make_call, numbers):
        calls[what] = _Calls(daemon, [functools.partial(make_call, i) for i in numbers])
    measure("create volume", lambda i: daemon.post("/v1/volumes", {"name": f"v{i}", "backing": "data", "size_bytes": MIB}), range(VOLUMES))
    measure("create export", lambda i: daemon.post("/v1/exports", {"name": f"e{i}", "kind": "nbd", "volumes": [f"v{i}"]}), range(EXPORTS))
    measure("show volume", lambda i: daemon.get(f"/v1/volumes/v{i}"), range(0, VOLUMES, 2))
    measure("list volumes", lambda _: daemon.get("/v1/volumes"), range(20))
    measure("metrics", lambda _: daemon.get("/metrics"), range(20))
    measure("set limits", lambda i: daemon.patch(f"/v1/volumes/v{i}", {"qos": {"iops": {"per_s": 100 + i}}}), range(50))
    before = daemon.get("/v1/volumes")
    daemon.kill()
    start_s = daemon.start()
    assert daemon.get("/v1/volumes") == before and len(before) == VOLUMES
    assert all(export["state"] == "active" for export in daemon.get("/v1/exports"))
    measure("delete export", lambda i: daemon.delete(f"/v1/exports/e{i}"), range(EXPORTS))
    lines = [f"{what}: median {statistics.median(of.took_ms):.1f} ms, slowest {max(of.took_ms):.1f} ms, {of.processor_ms:.1f} ms of processor time"
             for what, of in calls.items()]
    # Other work on the machine makes calls slower, so their processor time is compared, when all volumes are there: with that of a call
    # that has one volume in its answer. Metrics have a thousand.
    assert start_s < 5, f"{start_s:.2f} s until it answered"
    cheapest_ms = max(calls["show volume"].processor_ms, 1000 / os.sysconf("SC_CLK_TCK") / LAST)
    for what, of in calls.items():
        assert of.processor_ms < 100 * cheapest_ms, f"{what}: {lines}"
    return "\n".join([f"start with {VOLUMES} volumes and {EXPORTS} exports: {start_s:.2f} s", *lines])


def a_pool_of_a_hundred_terabytes_is_there_at_once(subject):
    daemon = subject.daemon()
    # In memory, where files may be that large; it stays empty.
    disk = os.path.join("/dev/shm", f"freestone-{os.getpid()}")
    subject.ends.callback(os.unlink, disk)
    with open(disk, "wb") as file:
        file.truncate(100 << 40)
    daemon.post("/v1/devices", {"name": "data", "spec": f"io_uring:path={disk}"})
    for i in range(50):
        daemon.post("/v1/volumes", {"name": f"v{i}", "backing": "data", "size_bytes": 100 << 30})
    daemon.kill()
    start_s = daemon.start()
    # The kernel may take its time to let go of what the killed daemon had.
    daemon.wait_for("the volumes", lambda: len(daemon.get("/v1/volumes")) == 50)
    assert start_s < 5, f"{start_s:.2f} s until it answered"
    return f"start with a pool of 100 TiB: {start_s:.2f} s"
