"""Exports and devices: lists, what is made and deleted, and the lines to attach an export."""

import json
import re

from playwright.sync_api import expect

from web import Keyboard, Mouse


def the_list_says_what_is_served_where_and_to_whom(web):
    page = web.open("degraded", "#/exports")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="bulk", exact=True))
    for text in ["✓ active", "nvme-tcp", "backup, archive", "10.0.0.1:4420", "read-write", "3"]:
        expect(row).to_contain_text(text)
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="media-ro", exact=True))
    for text in ["! waiting", "address in use", "read-only"]:
        expect(row).to_contain_text(text)


def _places_are_copied(web, hands):
    page = web.open("healthy", "#/exports")
    for place in ("/run/freestone/vm-web-1-disk.sock", "10.0.0.1:4420", "nqn.2014-08.org.example:bulk"):
        hands(page).press("button", f"Copy {place}")
        expect(page.get_by_role("button", name=f"Copied {place}")).to_be_visible()
        expect(page.get_by_role("status").filter(has_text="Copied.").last).to_be_attached()
        assert page.evaluate("navigator.clipboard.readText()") == place
    web.go("#/exports/bulk")
    expect(page.locator(".facts").get_by_role("button", name="Copy nqn.2014-08.org.example:bulk")).to_be_visible()
    web.go("#/devices")
    hands(page).press("button", "Copy io_uring:path=/dev/nvme4n1,direct=on")
    expect(page.get_by_role("button", name="Copied io_uring:path=/dev/nvme4n1,direct=on")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "io_uring:path=/dev/nvme4n1,direct=on"


def paths_and_names_are_copied_by_mouse(web):
    _places_are_copied(web, Mouse)


def paths_and_names_are_copied_by_keyboard(web):
    _places_are_copied(web, Keyboard)


def names_do_not_break_at_a_hyphen(web):
    web.start("healthy")
    web.mock.state.add_export("a-name-with-many-hyphens-that-is-as-long-as-a-name-may-be-at-all", "nbd", ["vm-web-1"])
    page = web.open(view="#/exports")
    page.set_viewport_size({"width": 700, "height": 800})
    for name in ("a-name-with-many-hyphens-that-is-as-long-as-a-name-may-be-at-all", "vm-web-1"):
        link = page.get_by_role("link", name=name, exact=True).first
        assert link.evaluate("link => link.getClientRects().length") == 1, name
    path = page.locator("code").get_by_text("/run/freestone/vm-web-1-disk.sock", exact=True)
    assert path.evaluate("path => path.getClientRects().length") == 1


def an_export_has_rates_and_the_hosts_that_may_connect(web):
    web.start("healthy")
    state = web.mock.state
    state.exports["bulk"]["hosts"] = ["nqn.2014-08.org.example:host-1"]
    page = web.open(view="#/exports")

    def serve(_, path):
        if path == "/v1/exports":
            with state.lock:
                state.exports["bulk"]["traffic"]["reads"] += 5000
                state.exports["bulk"]["traffic"]["read_bytes"] += 5000 << 12
    web.mock.fault = serve
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="bulk", exact=True))
    expect(row.locator("td").nth(6)).to_have_text(re.compile(r"^[\d,]{3,}$"))
    other = page.get_by_role("row").filter(has=page.get_by_role("link", name="vm-db-disk", exact=True))
    expect(other.locator("td").nth(6)).to_have_text("0")
    web.go("#/exports/bulk")
    facts = page.locator(".facts")
    expect(facts).to_contain_text(re.compile(r"Bandwidth[\d.]+ MiB/s"))
    expect(facts).to_contain_text(re.compile(r"Mean latency of its volumes[\d.]+ µs"))
    expect(facts.get_by_role("button", name="Copy nqn.2014-08.org.example:host-1")).to_be_visible()
    for hosts, text in (([], "none"), (None, "any")):
        with state.lock:
            state.exports["bulk"]["hosts"] = hosts
            web.mock.emit("export", "bulk", "changed", "The hosts of bulk were changed")
        expect(facts).to_contain_text(f"Hosts that may connect{text}")


def an_export_lists_its_clients(web):
    page = web.open("healthy", "#/exports/bulk")
    rows = page.get_by_role("table", name="Clients of bulk").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text(re.compile(r"^nqn.2014-08.org.example:host-010.0.0.10:5102TLS, authenticated3 GiB1 GiB\d\d:\d\d:\d\d$"))
    expect(rows.nth(1)).to_contain_text("authenticated3 GiB")
    expect(rows.nth(2)).to_contain_text("2none3 GiB")
    with web.mock.state.lock:
        web.mock.state.exports["bulk"]["traffic"]["clients"] = 1
        web.mock.emit("export", "bulk", "disconnected", "Clients have left bulk")
    expect(rows).to_have_count(1)
    web.go("#/exports/media-ro")
    expect(page.get_by_text("No client is connected.")).to_be_visible()


def clients_that_come_are_seen(web):
    page = web.open("healthy", "#/exports/bulk")
    with web.mock.state.lock:
        web.mock.state.exports["bulk"]["traffic"]["clients"] = 77
        web.mock.emit("export", "bulk", "connected", "A client has connected to bulk")
    expect(page.locator(".facts")).to_contain_text("77 connected")


def _make_and_delete(web, hands):
    page = web.open("healthy", "#/exports")
    hand = hands(page)
    hand.press("button", "New export…")
    hand.write("Name", "shared")
    hand.choose("Kind", "nvme-tcp")
    hand.write("Serves", "tmp")
    hand.write("Further namespaces (optional)", "media\nvm-db")
    hand.write("Listen address (optional)", "10.0.0.2:4420")
    hand.write("Other options (optional)", "nqn=nqn.2014-08.org.example:shared")
    hand.check("Read-only")
    hand.press("button", "Create the export")
    web.wait_closed()
    assert json.loads(web.sent("POST", "/v1/exports")[-1]) == {
        "name": "shared", "kind": "nvme-tcp", "volumes": ["tmp", "media", "vm-db"], "read_only": True,
        "options": {"listen": "10.0.0.2:4420", "nqn": "nqn.2014-08.org.example:shared"}}
    hand.press("link", "Attach shared")
    expect(page.get_by_role("heading", name="Export shared")).to_be_focused()
    page.go_back()
    hand.press("button", "New export…")
    hand.write("Name", "plain")
    hand.write("Serves", "tmp")
    hand.write("Socket (optional)", "/run/plain.sock")
    hand.press("button", "Create the export")
    web.wait_closed()
    assert json.loads(web.sent("POST", "/v1/exports")[-1]) == {"name": "plain", "kind": "vhost-user-blk", "volumes": ["tmp"], "read_only": False, "options": {"socket": "/run/plain.sock"}}
    hand.pick("bulk", "Delete…")
    expect(web.dialog()).to_contain_text("3 clients lose access to backup, archive.")
    hand.press("button", "Delete the export")
    web.wait_closed()
    expect(page.get_by_role("link", name="bulk", exact=True)).to_have_count(0)
    assert web.sent("DELETE", "/v1/exports/bulk")


def exports_are_made_and_deleted_by_mouse(web):
    _make_and_delete(web, Mouse)


def exports_are_made_and_deleted_by_keyboard(web):
    _make_and_delete(web, Keyboard)


def _give_processors(web, hands):
    page = web.open("healthy", "#/exports/bulk")
    hand = hands(page)
    for tick, cores, said in (("Processor 1", [1], "1 processor"), ("Processor 0", [0, 1], "2 processors")):
        hand.press("button", "Processors…")
        hand.check(tick)
        hand.press("button", "Set processors")
        web.wait_closed()
        assert json.loads(web.sent("PATCH", "/v1/exports/bulk")[-1]) == {"cores": cores}
        expect(page.get_by_text(f"The export bulk uses {said}.")).to_be_visible()
    expect(page.locator(".facts")).to_contain_text("0, 1")


def an_export_is_given_processors_by_mouse(web):
    _give_processors(web, Mouse)


def an_export_is_given_processors_by_keyboard(web):
    _give_processors(web, Keyboard)


def _attach(web, hands):
    page = web.open("healthy", "#/exports/vm-db-disk")
    line = page.get_by_role("region", name="Command for cloud-hypervisor")
    expect(line).to_have_text("--memory size=4G,shared=on --disk vhost_user=true,socket=/run/freestone/vm-db-disk.sock")
    hands(page).press("button", "Copy the command for cloud-hypervisor")
    expect(page.get_by_text("Copied.")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == line.text_content()
    expect(page.get_by_role("region", name="Command for qemu")).to_contain_text("-device vhost-user-blk-pci")


def attach_lines_are_copied_by_mouse(web):
    _attach(web, Mouse)


def attach_lines_are_copied_by_keyboard(web):
    _attach(web, Keyboard)


def an_export_of_what_is_not_there_is_refused_in_the_dialog(web):
    web.allow("status of 404")
    page = web.open("healthy", "#/exports")
    hand = Mouse(page)
    hand.press("button", "New export…")
    hand.write("Name", "x")
    hand.write("Serves", "nowhere")
    hand.press("button", "Create the export")
    expect(web.dialog().get_by_role("alert")).to_have_text("no volume, array or device nowhere")


def _devices(web, hands):
    page = web.open("healthy", "#/devices")
    hand = hands(page)
    hand.press("button", "New device…")
    hand.write("Name", "spare-disk")
    hand.write("Specification", "/dev/nvme9n1")
    hand.press("button", "Create the device")
    web.wait_closed()
    assert json.loads(web.sent("POST", "/v1/devices")[-1]) == {"name": "spare-disk", "spec": "/dev/nvme9n1"}
    hand.press("link", "spare-disk")
    hand.pick("spare-disk", "Delete…")
    hand.write("Type “spare-disk” to confirm", "spare-disk")
    hand.press("button", "Delete the device")
    web.wait_closed()
    expect(page.get_by_role("heading", name="Devices", level=1)).to_be_focused()
    assert web.sent("DELETE", "/v1/devices/spare-disk")


def devices_are_opened_and_closed_by_mouse(web):
    _devices(web, Mouse)


def devices_are_opened_and_closed_by_keyboard(web):
    _devices(web, Keyboard)
