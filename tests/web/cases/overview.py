"""The overview: health, jobs, and the picture."""

import re

from playwright.sync_api import expect

from mock import HOSTILE
from web import Keyboard, Mouse


def a_healthy_system_says_so(web):
    page = web.open("healthy")
    expect(page.locator("#health")).to_have_text("✓ No problems")
    expect(page.locator("main").get_by_text("No problems")).to_have_count(0)  # the header says it
    expect(page.get_by_text("No jobs.")).to_be_visible()
    expect(page).to_have_title("storage-1: Overview – freestoned")


def totals_are_a_number_and_a_second_fact_below(web):
    page = web.open("healthy")
    totals = page.get_by_label("Totals")
    for name, number, second in (("Arrays", "2", "28 TiB, 13.4 TiB free"), ("Volumes", "7", "14.7 TiB"), ("Exports", "5", "6 clients")):
        item = totals.locator("div").filter(has=page.get_by_text(name, exact=True))
        expect(item.locator(".big")).to_have_text(number)
        expect(item.locator(".second")).to_have_text(second)
        above, below = (item.locator(part).bounding_box() for part in (".big", ".second"))
        assert above["y"] + above["height"] <= below["y"] + 1 and above["height"] > below["height"], (above, below)
    for name in ("IOPS", "Bandwidth"):
        expect(totals.locator("div").filter(has=page.get_by_text(name, exact=True)).locator(".second")).to_have_text(re.compile(r"^[\d.,]+( MiB/s)? read, [\d.,]+( MiB/s)? write$"))


def problems_are_named_and_linked(web):
    page = web.open("degraded")
    expect(page.locator("#health")).to_have_text("✕ 1 array without redundancy, 1 export waiting")
    expect(page.get_by_role("link", name="Array data is degraded: slot 2 rebuilding, slot 4 missing")).to_have_attribute("href", "#/arrays/data")
    expect(page.get_by_role("link", name="Export media-ro is waiting: /run/freestone/media-ro.sock: address in use")).to_be_visible()
    expect(page).to_have_title("(!) storage-1: Overview – freestoned")


def a_failed_array_and_a_closed_device_are_worse(web):
    web.start("healthy")
    for slot in range(3):
        web.mock.state.arrays["data"]["members"][slot].update(state="missing")
    web.mock.state.devices["scratch"].update(error="no such device", capacity_bytes=None)
    page = web.open()
    expect(page.locator("#health")).to_have_text("✕ 1 array failed, 1 device not open")
    expect(page.get_by_role("link", name="Device scratch is not open: no such device")).to_be_visible()


def health_changes_when_an_event_says_so(web):
    page = web.open("healthy")
    with web.mock.state.lock:
        web.mock.state.arrays["data"]["members"][0].update(state="missing")
        web.mock.emit("array", "data", "degraded", "The array data is degraded")
    expect(page.locator("#health")).to_have_text("! 1 array degraded")


def the_picture_shows_everything_and_how_it_hangs_together(web):
    page = web.open("degraded")
    picture = page.locator("svg.map")
    for name in ["sdh, slot 2, rebuilding, member of array data", "no device, slot 4, missing, member of array data",
                 "data, RAID 6, degraded, 0 may fail, array of 6 members with 3 volumes", "scratch, 256 GiB, open, device",
                 "backup, 8 TiB, volume on data, served by bulk", "tmp, 100 GiB, volume on scratch, not served",
                 "bulk, nvme-tcp, active, export of backup and archive"]:
        node = picture.get_by_role("link", name=name, exact=True)
        expect(node).to_be_visible()
        expect(node.locator("text.name")).to_have_text(name.split(",")[0])
        expect(node.locator("text.below")).to_contain_text(name.split(",")[1].strip())
    expect(picture.get_by_role("link", name="4 members, live, members of array data", exact=True)).to_be_visible()
    # 3 + 1 members to arrays, 6 + 1 volumes to what they are on, 6 volumes to exports.
    expect(picture.locator("path.edge")).to_have_count(17)
    expect(picture.locator("path.edge.bad")).to_have_count(1)
    # A state is a sign and a word beside its colour.
    for node, word in zip(picture.locator("a.node.bad").all(), ("missing", "degraded"), strict=True):
        expect(node).to_contain_text("✕")
        expect(node).to_contain_text(word)


def the_path_of_a_node_is_marked_from_drives_to_clients(web):
    page = web.open("healthy")
    picture = page.locator("svg.map")
    spare = picture.get_by_role("link", name=re.compile("^1 spare"))
    expect(spare).to_be_visible()
    marked = lambda: [text.split(",")[0] for text in picture.locator("a.node.on-path").evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")]
    node = picture.get_by_role("link", name=re.compile("^backup, "))
    node.hover()
    assert marked() == ["6 members", "1 spare", "data", "backup", "bulk"], marked()
    expect(picture.locator("path.on-path")).to_have_count(4)
    page.get_by_role("heading", level=1).hover()
    assert marked() == []
    picture.get_by_role("link", name=re.compile("^vm-db-disk, ")).focus()
    assert marked() == ["4 members", "fast", "vm-db", "vm-db-disk"], marked()
    page.evaluate("document.activeElement.blur()")
    assert marked() == []


def the_picture_of_1000_volumes_stays_small(web):
    page = web.open("many")
    picture = page.locator("svg.map")
    expect(picture.get_by_role("link", name=re.compile("^1,000 volumes, [0-9.]+ TiB, together, on pool"))).to_have_attribute("href", "#/volumes?on=pool")
    expect(picture.get_by_role("link", name="1,000 exports, active, together")).to_be_visible()
    assert picture.locator("a").count() < 30


def _follow_the_picture(web, hands):
    page = web.open("degraded")
    hands(page).press("link", "backup, 8 TiB, volume on data, served by bulk")
    expect(page.get_by_role("heading", name="Volume backup", level=1)).to_be_focused()


def the_picture_is_followed_by_mouse(web):
    _follow_the_picture(web, Mouse)


def the_picture_is_followed_by_keyboard(web):
    _follow_the_picture(web, Keyboard)


def the_focus_stays_in_a_picture_that_changes(web):
    page = web.open("healthy")
    node = page.get_by_role("link", name="bulk, nvme-tcp, active, export of backup and archive", exact=True)
    node.focus()
    with web.mock.state.lock:
        web.mock.state.arrays["data"]["members"][0].update(state="missing")
        web.mock.emit("array", "data", "degraded", "The array data is degraded")
    expect(page.locator("svg.map a.node.bad")).to_have_count(1)
    expect(node).to_be_focused()


def _work_a_job(web, hands):
    page = web.open("degraded")
    hand = hands(page)
    job = page.locator("li.job", has_text="Rebuild of data, slot 2")
    expect(job).to_contain_text(re.compile(r"38\.\d % · 1\.5 TiB of 4 TiB · 412 MiB/s, 1 h 4\d min left"))
    expect(page.get_by_role("progressbar", name="Rebuild of data, slot 2")).to_be_visible()
    hand.press("button", "Pause rebuild of data, slot 2")
    expect(page.get_by_text("The jobs of data are paused.")).to_be_visible()
    expect(job).to_contain_text("paused")
    hand.press("button", "Resume rebuild of data, slot 2")
    expect(job).to_contain_text("left")
    hand.press("button", "Limit rate… rebuild of data, slot 2")
    hand.write("Maximum rate, bytes a second (optional)", "200 MiB")
    hand.press("button", "Set limits")
    web.wait_closed()
    assert web.sent("PATCH", "/v1/jobs/data:rebuild:2")[-1] == '{"max_bytes_per_s":209715200}'
    hand.press("button", "Cancel… check of fast")
    expect(web.dialog()).to_contain_text("Its progress is lost")
    hand.press("button", "Cancel the job")
    web.wait_closed()
    expect(page.locator("li.job")).to_have_count(1)


def jobs_are_worked_by_mouse(web):
    _work_a_job(web, Mouse)


def jobs_are_worked_by_keyboard(web):
    _work_a_job(web, Keyboard)


def a_job_moves_and_ends(web):
    page = web.open("degraded")
    bar = page.get_by_role("progressbar", name="Check of fast")
    before = bar.evaluate("bar => bar.value")
    page.wait_for_function("before => document.querySelectorAll('progress')[1].value > before", arg=before)
    with web.mock.state.lock:
        job = web.mock.state.jobs["data:rebuild:2"]
        job["done_bytes"] = job["total_bytes"] - 1
    expect(page.locator("li.job")).to_have_count(1)
    expect(page.locator("#last-event")).to_contain_text("The rebuild of data is complete")


def _steps(page):
    return page.get_by_role("region", name="First steps")


def _is_at(page, step):
    """The step that is to be done next."""
    expect(_steps(page).locator("[aria-current=step]").get_by_role("heading", level=3)).to_contain_text(step)


def _command(page, title):
    return _steps(page).get_by_role("region", name=f"Command to {title}")


def _first_steps(web, hands):
    page = web.open("empty")
    hand = hands(page)
    _is_at(page, "Choose disks")
    disks = [f"nvme{i}n1 4 TiB, nvme, Fast Disk 4T S{i}NX" for i in range(4)]
    paths = [f"/dev/disk/by-id/nvme-Fast_Disk_4T_S{i}NX" for i in range(4)]
    creation = _command(page, "create an array or device")
    expect(_command(page, "choose disks")).to_have_text("freestone disks")
    expect(creation).to_have_count(0)
    wanted = [f"freestone device create disk1 {paths[0]}"] + [f"freestone array create --level {level} data {' '.join(paths[:n])}" for level, n in ((1, 2), (5, 3), (6, 4))]
    for disk, command in zip(disks, wanted):
        hand.check(disk)
        expect(creation).to_have_text(command)
    expect(_command(page, "create a volume")).to_have_text("freestone volume create --backing data --size 10G vm1")
    _is_at(page, "Create an array or device")
    expect(page.get_by_role("button", name="New volume…")).to_be_disabled()
    hand.press("button", "Copy the command to create an array or device")
    expect(_steps(page).get_by_text("Copied.").first).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == wanted[3]
    assert not web.axe(), web.axe()
    hand.press("button", "New array…")
    expect(web.dialog().get_by_label("Level")).to_have_value("6")
    expect(web.dialog().get_by_label("Members", exact=True)).to_have_value("\n".join(paths))
    hand.write("Name", "fast")
    hand.press("button", "Create the array")
    web.wait_closed()
    _is_at(page, "Create a volume")
    expect(creation).to_have_count(0)
    expect(_steps(page).get_by_label(f"{disks[0]}: used by array fast")).to_be_disabled()
    hand.press("button", "New volume…")
    hand.write("Name", "web")
    hand.write("Size", "20 GiB")
    hand.press("button", "Create the volume")
    web.wait_closed()
    _is_at(page, "Export the volume")
    expect(_command(page, "export the volume")).to_have_text("freestone export create --kind vhost-user-blk --of web web")
    hand.press("button", "New export…")
    expect(web.dialog().get_by_label("Serves")).to_have_value("web")
    hand.write("Name", "web")
    hand.press("button", "Create the export")
    web.wait_closed()
    expect(_steps(page).get_by_text("✓ done")).to_have_count(4)
    assert not web.axe(), web.axe()
    # The next visit finds a system that has all of it.
    web.go("#/volumes")
    web.go("#/")
    expect(page.locator("svg.map")).to_be_visible()
    expect(_steps(page)).to_have_count(0)


def the_first_steps_are_taken_from_the_overview_by_mouse(web):
    _first_steps(web, Mouse)


def the_first_steps_are_taken_from_the_overview_by_keyboard(web):
    _first_steps(web, Keyboard)


def a_disk_in_use_cannot_be_chosen_and_says_why(web):
    page = web.open("empty")
    steps = _steps(page)
    for name in ("sda 4 TiB, sata, SYSTEM S0: partition table: sda1", "sda1 4 TiB, sata, SYSTEM S0: mounted at /", "vda 4 TiB, virtio: read-only",
                 f"sdb 4 TiB, usb, {HOSTILE} {HOSTILE}: /dev/sdb: Permission denied (os error 13)"):
        expect(steps.get_by_role("checkbox", name=name, exact=True)).to_be_disabled()
    expect(steps.get_by_text("4 of 8 free.")).to_be_visible()
    assert not web.axe(), web.axe()
    page.get_by_role("checkbox", name=re.compile("^nvme0n1 ")).check()
    with web.mock.state.lock:
        web.mock.state.disks = web.mock.state.disks[2:3]
    page.get_by_role("button", name="Look again").click()
    expect(steps.get_by_text("1 of 1 free.")).to_be_visible()
    expect(page.get_by_role("checkbox", name=re.compile("^nvme0n1 "))).to_be_checked()
    with web.mock.state.lock:
        web.mock.state.disks = []
    page.get_by_role("button", name="Look again").click()
    expect(steps.get_by_text("This host shows no disks.")).to_be_visible()
    expect(_command(page, "create an array or device")).to_have_count(0)


def an_empty_system_says_what_to_do_first(web):
    page = web.open("empty")
    expect(page.get_by_text("No objects yet.")).to_be_visible()
    assert not web.axe(), web.axe()
    for view, text in [("#/arrays", "No arrays yet."), ("#/volumes", "No volumes yet."), ("#/exports", "No exports yet."), ("#/events", "No events yet.")]:
        web.go(view)
        expect(page.get_by_text(text)).to_be_visible()
