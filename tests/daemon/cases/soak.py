"""A thousand volumes and a hundred exports: how long control calls and starts take, and what they cost."""

import os
import statistics
import time

from freestoned import MIB

VOLUMES, EXPORTS = 1000, 100


def _ms(work):
    began = time.monotonic()
    work()
    return (time.monotonic() - began) * 1000


def a_thousand_volumes_are_made_found_and_removed_quickly(subject):
    daemon = subject.daemon()
    members = [daemon.file(f"m{slot}", 1 << 30) for slot in range(4)]
    daemon.post("/v1/arrays", {"name": "data", "level": "5", "members": members})
    made = [_ms(lambda i=i: daemon.post("/v1/volumes", {"name": f"v{i}", "backing": "data", "size_bytes": MIB}))
            for i in range(VOLUMES)]
    exported = [_ms(lambda i=i: daemon.post("/v1/exports", {"name": f"e{i}", "kind": "nbd", "volumes": [f"v{i}"]}))
                for i in range(EXPORTS)]
    shown = [_ms(lambda i=i: daemon.get(f"/v1/volumes/v{i}")) for i in range(0, VOLUMES, 10)]
    listed = [_ms(lambda: daemon.get("/v1/volumes")) for _ in range(20)]
    scraped = [_ms(lambda: daemon.get("/metrics")) for _ in range(20)]
    limited = [_ms(lambda i=i: daemon.patch(f"/v1/volumes/v{i}", {"qos": {"iops": {"per_s": 100 + i}}}))
               for i in range(50)]
    before = daemon.get("/v1/volumes")
    daemon.kill()
    start_s = daemon.start()
    assert daemon.get("/v1/volumes") == before and len(before) == VOLUMES
    assert all(export["state"] == "active" for export in daemon.get("/v1/exports"))
    removed = [_ms(lambda i=i: daemon.delete(f"/v1/exports/e{i}")) for i in range(EXPORTS)]
    calls = {"create volume": made, "create export": exported, "show volume": shown, "list volumes": listed,
             "metrics": scraped, "set limits": limited, "delete export": removed}
    # Other work on the machine only makes a call slower, so the quickest of the last calls is checked, when all volumes are there.
    # The others are compared with the cheapest, which has one volume in its answer; metrics have a thousand, and take 50 times as long.
    assert start_s < 5, f"{start_s:.2f} s until it answered"
    quickest = {what: min(times[-20:]) for what, times in calls.items()}
    assert quickest["show volume"] < 100, quickest
    for what, took in quickest.items():
        assert took < 400 * quickest["show volume"], f"{what}: {quickest}"
    lines = [f"{what}: median {statistics.median(times):.1f} ms, slowest {max(times):.1f} ms" for what, times in calls.items()]
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
