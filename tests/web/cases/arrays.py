"""Arrays: the list, one array, and everything that can be done to it."""

import json
import re

from playwright.sync_api import expect

from web import Keyboard, Mouse, VIEWS


def the_list_says_how_each_array_is(web):
    page = web.open("degraded", "#/arrays")
    row = page.get_by_role("row").filter(has_text="data")
    expect(row).to_contain_text(re.compile(r"data✕ degraded\s*no more members may fail\s*6\s*4 of 6 live\s*16 TiB\s*2 TiB\s*3"))
    expect(row).to_contain_text("rebuild 38 %")
    assert row.get_by_role("meter", name="88 % of data used").evaluate("meter => meter.value") == 0.875
    expect(page.get_by_role("row").filter(has_text="fast")).to_contain_text(re.compile(r"✓ optimal\s*1 more member may fail"))


def an_array_that_fills_says_when_it_is_full(web):
    web.start("healthy")
    with web.mock.state.lock:
        web.mock.state.arrays["data"]["full_in_s"] = 12 * 86400
        web.mock.state.arrays["fast"]["full_in_s"] = 3600
    page = web.open(view="#/arrays")
    expect(page.get_by_role("row").filter(has=page.get_by_role("link", name="data", exact=True))).to_contain_text("full in 12 days")
    expect(page.get_by_role("row").filter(has=page.get_by_role("link", name="fast", exact=True))).to_contain_text("full in 1 hour")
    web.go("#/arrays/data")
    expect(page.locator(".facts")).to_contain_text("full in 12 days")


def _warning(page):
    return page.get_by_role("alert").filter(has_text="No redundancy left on")


def an_array_without_redundancy_is_warned_about_on_every_view(web):
    page = web.open("degraded")
    for view in VIEWS:
        web.go(view)
        expect(_warning(page)).to_have_text(re.compile(r"^No redundancy left on data until the rebuild ends \(1 h \d+ min\)\. Do not pull or fail a drive\.$"))
    # The time is not announced again and again.
    expect(_warning(page).locator("[aria-live=off]")).to_have_text(re.compile(r"^\(1 h \d+ min\)\.$"))
    web.go("#/")
    _warning(page).get_by_role("link", name="data").click()
    expect(page.get_by_role("heading", name="Array data", level=1)).to_be_focused()
    expect(page.locator(".facts")).to_contain_text("no more members may fail")
    expect(page.locator(".facts .badge.bad")).to_have_text("✕ degraded")


def the_warning_follows_the_rebuild_and_ends_with_it(web):
    page = web.open("degraded", "#/arrays")
    expect(_warning(page)).to_be_visible()
    state = web.mock.state
    with state.lock:
        state.jobs["data:rebuild:2"]["is_paused"] = True
        web.mock.emit("job", "data:rebuild:2", "changed", "paused")
    expect(_warning(page)).to_contain_text("until the rebuild ends (paused). Resume the rebuild. Do not pull or fail a drive.")
    with state.lock:
        job = state.jobs.pop("data:rebuild:2")
        web.mock.emit("job", "data:rebuild:2", "ended", "cancelled")
    expect(_warning(page)).to_contain_text("data, and no rebuild is running. Add a spare. Do not pull or fail a drive.")
    with state.lock:
        state.jobs["data:rebuild:2"] = {**job, "is_paused": False, "done_bytes": job["total_bytes"] - 1}
    expect(_warning(page)).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="data")).to_contain_text("1 more member may fail")


def arrays_that_have_or_never_had_redundancy_are_not_warned_about(web):
    web.start("healthy")
    with web.mock.state.lock:
        web.mock.state.arrays["data"]["members"][0].update(state="missing")
        web.mock.state.add_array("stripes", "0", ["/dev/sdx", "/dev/sdy"])
    page = web.open(view="#/arrays")
    expect(page.get_by_role("row").filter(has_text="stripes")).to_contain_text("no redundancy")
    expect(page.get_by_role("row").filter(has_text="data")).to_contain_text(re.compile(r"! degraded\s*1 more member may fail"))
    expect(_warning(page)).to_have_count(0)


def an_array_shows_members_by_slot(web):
    page = web.open("degraded", "#/arrays/data")
    expect(page.get_by_role("heading", name="Array data", level=1)).to_be_visible()
    members = page.get_by_role("table", name="Members of data", exact=True)
    expect(members.locator("tbody tr")).to_have_count(6)
    expect(members.locator("tbody tr").nth(4)).to_contain_text("✕ missing")
    expect(members.locator("tbody tr").nth(4)).to_contain_text("write error at 1.2 TiB: medium error")
    expect(members.locator("tbody tr").nth(2)).to_contain_text("! rebuilding/dev/sdh")
    expect(page.get_by_text("4 data + 2 parity strips of 128 KiB, blocks of 4 KiB")).to_be_visible()


def members_show_their_drives_and_the_rest_on_demand(web):
    web.start("healthy")
    with web.mock.state.lock:
        health = web.mock.state.arrays["fast"]["members"][2]["drive"]["health"]
        health.update(wear_percent=93, warnings=["reliability-degraded"])
    page = web.open(view="#/arrays/fast")
    rows = page.get_by_role("table", name="Members of fast", exact=True).locator("tbody tr")
    expect(rows.nth(0)).to_contain_text(re.compile(r"/dev/nvme0n1–Fast Disk 4T S0NX3 %41 °C"))
    expect(rows.nth(2)).to_contain_text("! at risk 93 %")
    details = page.locator("dl.details")
    expect(details).to_have_accessible_name("Slot 0")
    expect(details).to_contain_text(re.compile("UUID[0-9a-f-]{36}"))
    Keyboard(page).choose("Plots of", "2")
    expect(details).to_contain_text("spare capacity 100 % (warns below 10 %), media errors 0, warnings: reliability is degraded")
    expect(details.get_by_role("button", name="Copy S2NX")).to_be_visible()
    web.go("#/arrays/data")
    expect(page.locator("dl.details")).to_contain_text("Drive healthonly NVMe drives have a health log here")
    expect(page.get_by_role("listitem").filter(has_text="/dev/sdh")).to_contain_text("(HARD DISK 16T WX942)")


def a_device_shows_its_drive(web):
    page = web.open("healthy", "#/devices")
    expect(page.get_by_role("row").filter(has_text="scratch")).to_contain_text("Fast Disk 4T S9NX12 %47 °C")
    web.go("#/devices/scratch")
    expect(page.locator(".facts")).to_contain_text(re.compile("Serial numberS9NX.*Address0000:01:00.0Temperature47 °CWear12 %"))


def members_have_plots_and_numbers(web):
    page = web.open("degraded", "#/arrays/data")
    table = page.get_by_role("table", name=re.compile("Activity of the members of data"))
    expect(table.locator("tbody tr").nth(1)).to_contain_text(re.compile(r"/dev/sdc[\d,]+[\d.]+ MiB/s[\d.]+ µs / [\d.]+ µs"))
    plot = page.get_by_role("img", name=re.compile(r"^IOPS of slot 0 of data in the last two minutes. Now: reads [\d,]+, writes [\d,]+\.$"))
    expect(plot).to_be_visible()
    # A line needs two samples.
    expect(plot.locator("path.line.read")).to_have_attribute("d", re.compile("L"))
    expect(table.locator("tbody tr").nth(1).locator("path.line.read").first).to_have_attribute("d", re.compile("L"))
    Keyboard(page).choose("Plots of", "3")
    expect(page.get_by_role("img", name=re.compile("^Bandwidth of slot 3 of data"))).to_be_visible()


def _action(web, action):
    sent = [json.loads(body) for body in web.sent("POST", "/v1/arrays/data/actions")]
    assert sent and sent[-1] == action, f"{sent} ends with {action}"


def _work_an_array(web, hands):
    page = web.open("healthy", "#/arrays/data")
    hand = hands(page)

    def in_dialog(opener, confirm, action, *steps, menu=None):
        if menu:
            hand.pick(menu, opener)
        else:
            hand.press("button", opener)
        for step in steps:
            step()
        hand.press("button", confirm)
        web.wait_closed()
        _action(web, action)

    def says(text):
        expect(web.dialog()).to_contain_text(text)

    in_dialog("Fail…", "Fail the member", {"action": "fail", "members": ["1"]}, lambda: says("1 further member may fail until it is rebuilt"), menu="slot 1")
    expect(page.get_by_text("Slot 1 of data is out")).to_have_count(2)  # beside the table, and as the last event
    in_dialog("Re-add… slot 1", "Re-add", {"action": "re-add", "devices": ["/dev/sdc"]})
    in_dialog("Replace… slot 0", "Replace the member", {"action": "replace", "member": "0", "device": "/dev/sdx", "force": True},
              lambda: hand.write("Device", "/dev/sdx"), lambda: hand.check("Overwrite content of the device"))
    in_dialog("Add spare…", "Add spares", {"action": "add", "devices": ["/dev/sdy", "/dev/sdz"], "force": False, "global": True},
              lambda: hand.write("Devices", "/dev/sdy\n/dev/sdz"), lambda: hand.check("Spares for every array of the daemon"))
    in_dialog("Scrub…", "Scrub", {"action": "scrub", "repair": True}, lambda: hand.check("Repair: rewrite wrong strips"), menu="data")
    in_dialog("Fail…", "Fail the member", {"action": "fail", "members": ["5"]}, menu="slot 5")
    in_dialog("Remove failed…", "Remove", {"action": "remove", "members": ["failed"]}, lambda: says("slot 5 (/dev/sdg): detached."), menu="data")
    in_dialog("Remove… spare /dev/sdy", "Remove", {"action": "remove", "members": ["/dev/sdy"]})
    in_dialog("Grow…", "Grow", {"action": "grow", "member_bytes": 4 << 40},
              lambda: hand.write("Bytes of each member to use at most (optional)", "4 TiB"), menu="data")


def everything_is_done_to_an_array_by_mouse(web):
    _work_an_array(web, Mouse)


def everything_is_done_to_an_array_by_keyboard(web):
    _work_an_array(web, Keyboard)


def failing_one_member_too_many_says_what_is_lost(web):
    page = web.open("degraded", "#/arrays/data")
    Mouse(page).pick("slot 0", "Fail…")
    expect(web.dialog()).to_contain_text("it fails, and its data becomes unavailable. Volumes: backup, archive and media.")
    page.keyboard.press("Escape")
    web.wait_closed()
    expect(page.get_by_role("button", name="More actions of slot 0")).to_be_focused()
    assert not web.sent("POST", "/v1/arrays/data/actions")


def failing_a_member_without_redundancy_takes_the_name_of_the_array(web):
    page = web.open("degraded", "#/arrays/data")
    hand = Keyboard(page)
    hand.pick("slot 0", "Fail…")
    hand.press("button", "Fail the member")
    expect(web.dialog()).to_contain_text("Type “data” to confirm: a value is required")
    assert not web.sent("POST", "/v1/arrays/data/actions")
    hand.write("Type “data” to confirm", "data")
    hand.press("button", "Fail the member")
    web.wait_closed()
    assert json.loads(web.sent("POST", "/v1/arrays/data/actions")[-1]) == {"action": "fail", "members": ["0"]}


def _labels(page, menu):
    page.get_by_role("button", name=f"More actions of {menu}", exact=True).click()
    labels = page.get_by_role("menu", name=f"More actions of {menu}").locator("[role=menuitem], [role=separator]").all_text_contents()
    page.keyboard.press("Escape")
    return labels


def the_likely_action_comes_first_and_dangerous_ones_last(web):
    page = web.open("healthy", "#/arrays/data")
    toolbar = page.get_by_role("group", name="Actions of data")
    expect(toolbar.locator("button.primary")).to_have_text("Scrub…")
    assert _labels(page, "data") == ["Add spare…", "Re-add…", "Grow…", "", "Remove failed…", "Delete…"]
    assert _labels(page, "slot 0") == ["Fail…"]
    expect(page.get_by_role("button", name="Replace… slot 0")).to_be_visible()
    for name in ("Pause jobs", "Resume jobs", "Cancel jobs…"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)  # the job's row has them
    with web.mock.state.lock:
        web.mock.state.arrays["data"]["spares"] = []
        web.mock.state.arrays["data"]["members"][4].update(state="missing", device=None)
        web.mock.emit("array", "data", "degraded", "The array data is degraded")
    expect(toolbar.locator("button.primary")).to_have_text("Add spare…")
    assert _labels(page, "slot 4") == ["Remove…"]


def a_menu_is_worked_with_keys_and_closed_by_escape_or_a_click_elsewhere(web):
    page = web.open("healthy", "#/arrays/data")
    opener = page.get_by_role("button", name="More actions of data")
    menu = page.get_by_role("menu", name="More actions of data")
    focused = lambda name: expect(page.get_by_role("menuitem", name=name)).to_be_focused()
    Keyboard(page).reach(opener)
    expect(opener).to_have_attribute("aria-haspopup", "menu")
    expect(opener).to_have_attribute("aria-expanded", "false")
    for opens, first in (("ArrowDown", "Add spare…"), ("Enter", "Add spare…"), ("ArrowUp", "Delete…")):
        page.keyboard.press(opens)
        focused(first)
        expect(opener).to_have_attribute("aria-expanded", "true")
        page.keyboard.press("Escape")
        expect(menu).to_be_hidden()
        expect(opener).to_be_focused()
    page.keyboard.press("ArrowDown")
    focused("Add spare…")
    for key, name in (("End", "Delete…"), ("ArrowDown", "Add spare…"), ("ArrowUp", "Delete…"), ("Home", "Add spare…"), ("r", "Re-add…"), ("r", "Remove failed…"), ("g", "Grow…")):
        page.keyboard.press(key)
        focused(name)
    assert ("menuitem", "Delete…") in web.controls()
    assert not web.axe(), web.axe()
    page.keyboard.press("Tab")
    expect(menu).to_be_hidden()
    opener.click()
    expect(menu).to_be_visible()
    opener.click()
    expect(menu).to_be_hidden()
    opener.click()
    page.get_by_role("heading", level=1).click()
    expect(menu).to_be_hidden()
    assert not web.sent("POST", "/v1/arrays/data/actions")


def _make_and_delete(web, hands):
    page = web.open("healthy", "#/arrays")
    hand = hands(page)
    hand.press("button", "New array…")
    expect(web.dialog()).to_contain_text("The content of the members is lost.")
    hand.write("Name", "new")
    hand.choose("Level", "5")
    hand.write("Members", "/dev/sdk\n/dev/sdl\n/dev/sdm")
    hand.press("button", "Create the array")
    web.wait_closed()
    assert json.loads(web.sent("POST", "/v1/arrays")[-1]) == {"name": "new", "level": "5", "members": ["/dev/sdk", "/dev/sdl", "/dev/sdm"], "force": False}
    hand.press("link", "new")
    expect(page.get_by_role("heading", name="Array new")).to_be_focused()
    hand.pick("new", "Delete…")
    expect(web.dialog()).to_contain_text("All data on it is lost: 8 TiB.")
    hand.press("button", "Delete the array")
    expect(web.dialog()).to_contain_text("Type “new” to confirm: a value is required")
    hand.write("Type “new” to confirm", "nwe")
    hand.press("button", "Delete the array")
    expect(web.dialog()).to_contain_text("The text differs from “new”")
    assert not web.sent("DELETE", "/v1/arrays/new")
    hand.write("Type “new” to confirm", "new")
    hand.press("button", "Delete the array")
    web.wait_closed()
    expect(page.get_by_role("heading", name="Arrays", level=1)).to_be_focused()
    expect(page.get_by_role("link", name="new", exact=True)).to_have_count(0)


def an_array_is_made_and_deleted_by_mouse(web):
    _make_and_delete(web, Mouse)


def an_array_is_made_and_deleted_by_keyboard(web):
    _make_and_delete(web, Keyboard)


def a_problem_is_shown_in_the_dialog_that_caused_it(web):
    web.allow("status of 409")
    page = web.open("healthy", "#/arrays/data")
    hand = Mouse(page)
    hand.press("button", "Replace… slot 0")
    hand.write("Device", "/dev/used")
    hand.press("button", "Replace the member")
    expect(web.dialog().get_by_role("alert")).to_have_text("/dev/used holds an ext4 file system: force overwrites it")
    hand.check("Overwrite content of the device")
    hand.press("button", "Replace the member")
    web.wait_closed()


def an_array_that_is_deleted_elsewhere_is_said_to_be_gone(web):
    page = web.open("healthy", "#/arrays/data")
    with web.mock.state.lock:
        del web.mock.state.arrays["data"]
        web.mock.emit("array", "data", "deleted", "The array data was deleted")
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()
