"""Volumes: the list, plots, limits, and a thousand of them."""

import json
import re
import statistics

from playwright.sync_api import expect

from web import Keyboard, Mouse

MOST_RENDER_MS = 2000
MOST_TRIES = 5
MOST_SCRIPT_MS = 50


def the_list_has_size_place_limits_and_exports(web):
    page = web.open("healthy", "#/volumes")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="backup", exact=True))
    expect(row).to_contain_text("8 TiB")
    expect(row).to_contain_text("Write IOPS 2,000/s (burst 500), Bandwidth 400 MiB/s")
    expect(row.get_by_role("link", name="data")).to_have_attribute("href", "#/arrays/data")
    expect(row.get_by_role("link", name="bulk")).to_have_attribute("href", "#/exports/bulk")
    expect(row).to_contain_text(re.compile(r"[\d.]+ MiB/s[\d.]+ µs"))


def a_volume_has_live_plots(web):
    page = web.open("healthy", "#/volumes/backup")
    for title, number in [("IOPS", r"[\d,]+"), ("Bandwidth", r"[\d.]+ MiB.s"), ("Mean latency", r"[\d.]+ µs")]:
        expect(page.get_by_role("img", name=re.compile(rf"^{title} of backup in the last two minutes\. Now: reads {number}, writes {number}\.$"))).to_be_visible()
    line = page.get_by_role("img", name=re.compile("^IOPS of backup in the last two minutes")).locator("path.line.read")
    # A line needs two samples.
    expect(line).to_have_attribute("d", re.compile("L"))
    before = line.get_attribute("d")
    page.wait_for_function("([path, before]) => path.getAttribute('d') !== before", arg=[line.element_handle(), before])
    page.get_by_text("Current values").click()
    table = page.get_by_role("table", name="Current traffic of backup")
    expect(table.get_by_role("row", name="Reads")).to_contain_text(re.compile(r"Reads[\d,]+[\d.]+ MiB/s[\d.]+ µs8 KiB"))


def rates_are_differences_of_counters(web):
    web.start("healthy")
    calls = []

    def steady(now_ns=None):
        calls.append(now_ns)
        n = len(calls)
        counters = {"reads": 1000 * n, "writes": 0, "read_bytes": 1000 * n << 12, "written_bytes": 0, "read_sum_ns": 1000 * n * 250_000, "write_sum_ns": 0, "reads_timed": 1000 * n, "writes_timed": 0, "errors": 7, "in_flight": 3, "throttled_requests": 0, "throttled_ns": 0, "group_throttled_ns": 0}
        return {"at_ns": 10**18 + n * 2 * 10**9, "volumes": {"backup": counters}, "members": {}}
    web.mock.state.samples = steady
    page = web.open(view="#/volumes/backup")
    expect(page.get_by_role("img", name="IOPS of backup in the last two minutes. Now: reads 500, writes 0.")).to_be_visible()
    expect(page.get_by_role("img", name="Bandwidth of backup in the last two minutes. Now: reads 2 MiB/s, writes 0 B/s.")).to_be_visible()
    expect(page.get_by_role("img", name="Mean latency of backup in the last two minutes. Now: reads 250 µs, writes –.")).to_be_visible()
    page.get_by_text("Current values").click()
    expect(page.get_by_text("In flight: 3. Errors in total: 7.")).to_be_visible()


def waits_for_limits_are_a_part_of_the_request_time(web):
    web.start("healthy")
    calls = []

    def steady(now_ns=None):
        calls.append(now_ns)
        n = len(calls)
        idle = {"reads": 0, "writes": 0, "read_bytes": 0, "written_bytes": 0, "read_sum_ns": 0, "write_sum_ns": 0, "reads_timed": 0, "writes_timed": 0, "errors": 0, "in_flight": 0,
                "throttled_requests": 0, "throttled_ns": 0, "group_throttled_ns": 0}
        busy = {**idle, "reads": n, "reads_timed": n, "read_sum_ns": n * 600_000, "writes": n, "writes_timed": n, "write_sum_ns": n * 400_000}
        volumes = {"backup": {**busy, "throttled_requests": n, "throttled_ns": n * 350_000}, "archive": idle, "media": busy,
                   "vm-web-1": {**busy, "throttled_requests": n, "throttled_ns": n * 4_000, "group_throttled_ns": n * 3_000}}
        return {"at_ns": 10**18 + n * 2 * 10**9, "volumes": volumes, "members": {}}
    web.mock.state.samples = steady
    page = web.open(view="#/volumes/backup")
    for volume, waits in (("backup", "35 % of the request time of the last minute"), ("archive", "–"), ("media", "none in the last minute"),
                          ("vm-web-1", "under 1 % of the request time of the last minute, mostly for the group")):
        web.go(f"#/volumes/{volume}")
        expect(page.get_by_role("term").filter(has_text="Waits for limits").locator("xpath=following-sibling::dd")).to_have_text(waits)


def _work_a_volume(web, hands):
    page = web.open("healthy", "#/volumes")
    hand = hands(page)
    hand.press("button", "New volume…")
    hand.write("Name", "fresh")
    hand.choose("On", "fast")
    hand.write("Size", "20 GiB")
    hand.write("IOPS, a second", "5000")
    hand.write("Write bandwidth, a second", "100 MiB")
    hand.write("Write bandwidth, burst", "1 GiB")
    hand.press("button", "Create the volume")
    web.wait_closed()
    assert json.loads(web.sent("POST", "/v1/volumes")[-1]) == {
        "name": "fresh", "backing": "fast", "size_bytes": 20 << 30, "force": False,
        "qos": {"iops": {"per_s": 5000, "burst": 0}, "write_bandwidth": {"per_s": 100 << 20, "burst": 1 << 30}}}
    expect(page.get_by_text("The volume fresh was created.")).to_be_visible()
    hand.press("link", "fresh")
    expect(page.get_by_role("heading", name="Volume fresh")).to_be_focused()
    uuid = web.mock.state.volumes["fresh"]["uuid"]
    sent = lambda: json.loads(web.sent("PATCH", f"/v1/volumes/{uuid}")[-1])

    hand.press("button", "Grow…")
    hand.write("New size", "10 GiB")
    hand.press("button", "Grow")
    expect(web.dialog()).to_contain_text("The new size must be more than 20 GiB")
    hand.write("New size", "30G")
    hand.press("button", "Grow")
    web.wait_closed()
    assert sent() == {"size_bytes": 30 << 30}
    expect(page.locator(".facts")).to_contain_text("30 GiB")

    hand.pick("fresh", "Set QoS…")
    hand.write("IOPS, a second", "")
    hand.write("Read IOPS, a second", "700")
    hand.write("Group (optional)", "guests")
    hand.write("Minimum IOPS (optional)", "100")
    hand.press("button", "Set limits")
    web.wait_closed()
    assert sent() == {"qos": {"read_iops": {"per_s": 700, "burst": 0}, "write_bandwidth": {"per_s": 100 << 20, "burst": 1 << 30}}, "group": "guests", "min_qos": {"requests_per_s": 100}}
    expect(page.locator(".facts")).to_contain_text("Read IOPS 700/s")
    expect(page.locator(".facts")).to_contain_text("IOPS 100/s")

    hand.pick("fresh", "Rename…")
    hand.write("New name", "older")
    hand.press("button", "Rename")
    expect(page.get_by_role("heading", name="Volume older", level=1)).to_be_visible()
    assert sent() == {"name": "older"}

    hand.pick("older", "Delete…")
    expect(web.dialog()).to_contain_text("All data on it is lost: 30 GiB on fast.")
    hand.write("Type “older” to confirm", "older")
    hand.press("button", "Delete the volume")
    web.wait_closed()
    expect(page.get_by_role("heading", name="Volumes", level=1)).to_be_visible()
    expect(page.get_by_role("link", name="older", exact=True)).to_have_count(0)
    assert "older" not in web.mock.state.volumes


def a_volume_lives_its_life_by_mouse(web):
    _work_a_volume(web, Mouse)


def a_volume_lives_its_life_by_keyboard(web):
    _work_a_volume(web, Keyboard)


def a_volume_moves(web):
    page = web.open("healthy", "#/volumes/backup")
    hand = Mouse(page)
    start = web.mock.state.volumes["backup"]["backing"]
    to = "fast" if start == "data" else "data"
    hand.pick("backup", "Move…")
    hand.choose("To", to)
    hand.press("button", "Move")
    web.wait_closed()
    uuid = web.mock.state.volumes["backup"]["uuid"]
    assert json.loads(web.sent("POST", f"/v1/volumes/{uuid}/move")[-1]) == {"backing": to, "force": False}
    expect(page.get_by_text(f"The volume backup is moving to {to}.")).to_be_visible()
    expect(page.locator(".facts")).to_contain_text(f"{start}, moving to {to}")
    hand.press("link", "Overview")
    expect(page.get_by_role("progressbar", name=f"Move of backup to {to}")).to_be_visible()
    hand.press("button", f"Pause move of backup to {to}")
    expect(page.get_by_text("The move of backup is paused.")).to_be_visible()
    hand.press("button", f"Limit rate… move of backup to {to}")
    hand.write("Maximum rate, bytes a second (optional)", "50 MiB")
    hand.press("button", "Set limits")
    web.wait_closed()
    expect(page.get_by_text("The move of backup is limited now.")).to_be_visible()
    hand.press("button", f"Cancel… move of backup to {to}")
    expect(web.dialog()).to_contain_text("The volume keeps its place.")
    hand.press("button", "Cancel the job")
    web.wait_closed()
    expect(page.get_by_text(f"The move of backup to {to} was cancelled.")).to_be_visible()
    expect(page.get_by_role("progressbar", name=f"Move of backup to {to}")).to_have_count(0)


def a_volume_that_takes_long_is_a_job_meanwhile(web):
    page = web.open("healthy", "#/volumes")
    hand = Mouse(page)
    hand.press("button", "New volume…")
    hand.write("Name", "large")
    hand.choose("On", "data")
    hand.write("Size", "100 TiB")
    hand.press("button", "Create the volume")
    web.wait_closed()
    expect(page.get_by_text("The volume large is being created.")).to_be_visible()
    web.go("#/volumes/backup")
    hand.press("button", "Grow…")
    hand.write("New size", "90 TiB")
    hand.press("button", "Grow")
    web.wait_closed()
    expect(page.get_by_text("The volume backup is growing.")).to_be_visible()
    hand.press("link", "Overview")
    for job, lost in (("creation of large on data", "The volume is not created."), ("growth of backup on data", "The volume keeps its size.")):
        expect(page.get_by_role("progressbar", name=job.capitalize())).to_be_visible()
        hand.press("button", f"Cancel… {job}")
        expect(web.dialog()).to_contain_text(lost)
        hand.press("button", "Cancel the job")
        web.wait_closed()
        expect(page.get_by_text(f"The {job} was cancelled.")).to_be_visible()


def a_volume_in_use_is_not_deleted_and_the_dialog_says_why(web):
    web.allow("status of 409")
    page = web.open("healthy", "#/volumes/backup")
    hand = Mouse(page)
    hand.pick("backup", "Delete…")
    expect(web.dialog()).to_contain_text("Exports that serve it: bulk.")
    hand.write("Type “backup” to confirm", "backup")
    hand.press("button", "Delete the volume")
    expect(web.dialog().get_by_role("alert")).to_have_text("volume backup is served by bulk")


def wrong_entries_are_said_beside_the_field(web):
    page = web.open("healthy", "#/volumes")
    hand = Mouse(page)
    hand.press("button", "New volume…")
    hand.write("Size", "twenty")
    hand.write("IOPS, a second", "many")
    hand.press("button", "Create the volume")
    name, size, iops = (web.dialog().get_by_label(label, exact=True) for label in ("Name", "Size", "IOPS, a second"))
    for field, text in [(name, "Name: a value is required"), (size, "“twenty” is not a size"), (iops, "“many” is not a whole number")]:
        expect(field).to_have_attribute("aria-invalid", "true")
        described = " ".join(page.locator(f"[id='{part}']").text_content() for part in field.get_attribute("aria-describedby").split())
        assert text in described, described
    expect(name).to_be_focused()
    assert not web.sent("POST", "/v1/volumes")


def _groups(web, hands):
    page = web.open("healthy", "#/volumes")
    hand = hands(page)
    hand.press("button", "New group…")
    hand.write("Name", "batch")
    hand.write("Bandwidth, a second", "1 GiB")
    hand.press("button", "Create the group")
    web.wait_closed()
    assert json.loads(web.sent("PUT", "/v1/groups/batch")[-1]) == {"bandwidth": {"per_s": 1 << 30, "burst": 0}}
    hand.press("button", "Set QoS… group batch")
    expect(web.dialog().get_by_label("Bandwidth, a second", exact=True)).to_have_value("1 GiB")
    page.keyboard.press("Escape")
    hand.pick("group guests", "Delete…")
    expect(web.dialog()).to_contain_text("These volumes lose its limits: vm-web-1 and vm-web-2.")
    hand.press("button", "Delete the group")
    web.wait_closed()
    assert list(web.mock.state.groups) == ["batch"]


def groups_are_made_and_deleted_by_mouse(web):
    _groups(web, Mouse)


def groups_are_made_and_deleted_by_keyboard(web):
    _groups(web, Keyboard)


def the_filter_finds_volumes(web):
    page = web.open("many", "#/volumes")
    rows = page.get_by_role("table", name="Volumes", exact=True).locator("tbody tr:visible")
    expect(page.get_by_text("1,000 volumes", exact=True)).to_be_visible()
    Keyboard(page).write("Filter", "VM-012")
    expect(rows).to_have_count(10)
    expect(page.get_by_text("10 of 1,000 volumes shown")).to_be_visible()
    page.get_by_label("Filter").fill("")
    expect(rows).to_have_count(1000)


def columns_are_ordered(web):
    page = web.open("healthy", "#/volumes")
    names = lambda: page.get_by_role("table", name="Volumes", exact=True).locator("tbody th").all_text_contents()
    Keyboard(page).press("button", "Size")
    assert names()[:2] == ["backup", "archive"], names()
    expect(page.get_by_role("columnheader", name="Size")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="Name").click()
    assert names() == sorted(names()), names()


def a_row_stays_where_the_keyboard_is_while_the_list_changes(web):
    page = web.open("healthy", "#/volumes")
    anchor = page.get_by_role("table", name="Volumes", exact=True).get_by_role("link", name="media", exact=True)
    anchor.focus()
    handle = anchor.element_handle()
    with web.mock.state.lock:
        web.mock.state.volumes["media"]["size_bytes"] *= 2
        web.mock.state.volumes.pop("vm-web-1")
        web.mock.emit("volume", "media", "changed", "The volume media has grown")
    expect(page.get_by_role("row", name="media 4 TiB data")).to_be_visible()
    expect(anchor).to_be_focused()
    assert handle.evaluate("element => element.isConnected"), "the row was built anew"


def a_thousand_volumes_are_there_in_two_seconds(web):
    page = web.open("many")
    took_ms = []
    # Another program may have the processors for a moment: the page is as fast as at its best.
    while not took_ms or (min(took_ms) >= MOST_RENDER_MS and len(took_ms) < MOST_TRIES):
        took_ms.append(page.evaluate("""async () => {
            location.hash = "#/";
            while (document.querySelectorAll("tbody th").length >= 1000) await new Promise(requestAnimationFrame);
            const started = performance.now();
            location.hash = "#/volumes";
            while (document.querySelectorAll("tbody th").length < 1000) await new Promise(requestAnimationFrame);
            await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            return performance.now() - started;
        }"""))
    assert min(took_ms) < MOST_RENDER_MS, f"{took_ms} ms"
    return f"{min(took_ms):.0f} ms"


def a_sample_of_a_thousand_volumes_takes_little_scripting(web):
    page = web.open("many", "#/volumes")
    expect(page.get_by_role("table", name="Volumes", exact=True).locator("tbody tr").first).to_contain_text("MiB/s")
    # From the counters' arrival until the page has nothing left to do for them: a microtask comes after all of that.
    spent = page.evaluate("""async () => {
        const { history } = await import("/web/store.js");
        const add = history.add;
        const spent = [];
        return new Promise((done) => {
            history.add = (sample) => {
                const started = performance.now();
                queueMicrotask(() => { if (spent.push(performance.now() - started) === 7) done(spent); });
                return add.call(history, sample);
            };
        });
    }""")
    took_ms = statistics.median(spent)
    assert took_ms < MOST_SCRIPT_MS, f"{spent}"
    return f"{took_ms:.1f} ms"
