"""The page on freestoned itself: what the mock does, the daemon does."""

import os
import re

import paths
from day import Day
from freestoned import MIB, free_port
from playwright.sync_api import expect
from runner import nightly

from real import Real, TOKEN
from web import Mouse, VIEWS


def _start(web, **options):
    web.mock = real = Real(**options)
    web.callback(real.close)
    return real.daemon


def an_array_a_volume_and_an_export_are_made_used_and_removed(web):
    daemon = _start(web)
    members = [daemon.file(f"disk{slot}", 128 * MIB) for slot in range(5)]
    page = web.open(token=TOKEN)
    hand = Mouse(page)
    disks = re.compile(r"^\d+ of \d+ free\.$|^This host shows no disks\.")
    expect(page.get_by_role("region", name="First steps").get_by_text(disks)).to_be_visible()
    web.go("#/arrays")
    hand.press("button", "New array…")
    hand.write("Name", "data")
    hand.choose("Level", "5")
    hand.find("textbox", "Members").fill("\n".join(members[:4]))
    hand.press("button", "Create the array")
    web.wait_closed()
    assert daemon.get("/v1/arrays/data")["state"] == "optimal"
    web.go("#/volumes")
    hand.press("button", "New volume…")
    hand.write("Name", "v1")
    hand.choose("On", "data")
    hand.write("Size", "64 MiB")
    hand.press("button", "Create the volume")
    web.wait_closed()
    assert daemon.get("/v1/volumes/v1")["size_bytes"] == 64 * MIB
    daemon.post("/v1/exports", {"name": "e1", "kind": "nbd", "volumes": ["v1"]})
    web.go("#/")
    for name in ("data", "v1", "e1"):
        expect(page.get_by_role("link", name=re.compile(rf"\b{name}\b")).first).to_be_visible()
    web.go("#/arrays/data")
    hand.pick("slot 1", "Fail…")
    web.dialog().locator("button[type=submit]").click()
    web.wait_closed()
    expect(page.get_by_text("✕ degraded").first).to_be_visible()
    expect(page.get_by_role("alert").filter(has_text="No redundancy left on data, and no rebuild is running.")).to_be_visible()
    hand.press("button", "Add spare…")
    web.dialog().get_by_role("textbox").first.fill(members[4])
    web.dialog().locator("button[type=submit]").click()
    web.wait_closed()
    daemon.wait_for("the rebuild", lambda: daemon.get("/v1/arrays/data")["state"] == "optimal")
    expect(page.get_by_text("✓ optimal").first).to_be_visible()
    web.go("#/volumes/v1")
    hand.pick("v1", "Set QoS…")
    hand.write("IOPS, a second", "500")
    web.dialog().locator("button[type=submit]").click()
    web.wait_closed()
    assert daemon.get("/v1/volumes/v1")["qos"] == {"iops": {"per_s": 500, "burst": 0}}
    web.allow("status of 409")
    hand.pick("v1", "Delete…")
    web.dialog().get_by_role("textbox").fill("v1")
    web.dialog().locator("button[type=submit]").click()
    expect(page.get_by_text("volume v1: export e1 serves it")).to_be_visible()


def every_view_shows_what_the_daemon_says(web):
    daemon = _start(web, listen=f"127.0.0.1:{free_port()}")
    members = [daemon.file(f"disk{slot}", 64 * MIB) for slot in range(4)]
    daemon.post("/v1/arrays", {"name": "data", "level": "5", "members": members})
    daemon.post("/v1/devices", {"name": "scratch", "spec": daemon.file("scratch", 32 * MIB)})
    daemon.post("/v1/volumes", {"name": "backup", "backing": "data", "size_bytes": 8 * MIB})
    daemon.post("/v1/exports", {"name": "bulk", "kind": "vhost-user-blk", "volumes": ["backup"]})
    page = web.open(token=TOKEN)
    for view in VIEWS:
        web.go(view)
        expect(page.get_by_role("alert")).to_have_count(0)
        assert not web.axe(), (view, web.axe())
    web.go("#/exports/bulk")
    expect(page.get_by_text("reconnect-ms=100").first).to_be_visible()
    # It was killed, and is there again: the page goes on by itself.
    web.allow("ERR_|Failed to load")
    web.go("#/events")
    daemon.kill()
    daemon.start()
    daemon.post("/v1/volumes", {"name": "after", "backing": "data", "size_bytes": MIB})
    expect(page.get_by_role("cell", name="after", exact=True)).to_be_visible(timeout=30_000)


# What the page says at each step of the day; the text of the view has it.
SEEN = {
    "limited": ("#/volumes/v1", "v1"),
    "rebuilding": ("#/arrays/data", "degraded"),
    "rebuilt": ("#/arrays/data", "optimal"),
    "upgraded": ("#/", "vm1"),
    "moved": ("#/volumes/v1", "fast"),
    "empty": ("#/", "No jobs."),
}


@nightly
def an_operators_day_is_seen_on_the_page(web):
    paths.require_setup()
    # The same address after a kill: the page finds the daemon again.
    daemon = _start(web, listen=f"127.0.0.1:{free_port()}")
    page = web.open(token=TOKEN)
    web.allow("ERR_|Failed to load")
    os.makedirs(web.directory, exist_ok=True)
    pictures = []

    def look(what):
        view, text = SEEN[what]
        web.go(view)
        expect(page.get_by_role("main")).to_contain_text(text, timeout=30_000)
        pictures.append(os.path.join(web.directory, f"{what}.png"))
        page.screenshot(path=pictures[-1], full_page=True)

    lines = []
    day = Day(daemon, os.path.join(web.directory, "day"), lines.append, look)
    web.callback(day.close)
    day.run()
    assert len(pictures) == len(SEEN)
    return "\n".join([*lines, *pictures])
