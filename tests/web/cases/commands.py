"""The lines of the button “Copy as command”: each does what its dialog does."""

import json
import os
import re
import shlex
import subprocess

import paths
from playwright.sync_api import expect

from web import Keyboard, Mouse


def _copied(web):
    """The line that the open dialog copies."""
    Mouse(web.page).press("button", "Copy as command")
    shown = web.dialog().get_by_role("region", name="Command")
    expect(shown).to_be_visible()
    expect(web.dialog().get_by_role("status")).to_contain_text("Copied.")
    line = shown.text_content()
    assert web.page.evaluate("navigator.clipboard.readText()") == line
    return line


def _run(line, *more):
    """What the shell makes of the line, where no daemon is."""
    paths.require_freestone()
    script = line.replace("freestone", shlex.quote(paths.FREESTONE), 1)
    return subprocess.run(["sh", "-c", " ".join([script, *more])], capture_output=True, text=True, timeout=60, env={**os.environ, "FREESTONE_SOCKET": "/no-such-socket"})


def _bare(value):
    """A body without what says nothing: absent, empty and false fields."""
    if isinstance(value, dict):
        return {name: _bare(part) for name, part in value.items() if part not in (None, False, 0) and _bare(part) not in ({}, [])}
    return value


def the_command_sends_what_the_dialog_sends(web):
    page = web.open("degraded")
    hand = Mouse(page)

    def compare(confirm):
        line = _copied(web)
        done = _run(line, "--dry-run")
        assert done.returncode == 0, f"{line}: {done.stderr}"
        method, path, *body = done.stdout.strip().split(" ", 2)
        hand.press("button", confirm)
        web.wait_closed()
        sent_method, sent_path, sent_body = [request for request in web.mock.requests if request[0] != "GET"][-1]
        for volume in web.mock.state.volumes.values():
            sent_path = sent_path.replace(volume["uuid"], volume["name"])
        assert (method, path.replace("%3A", ":")) == (sent_method, sent_path.replace("%3A", ":")), line
        assert _bare(json.loads(body[0])) == _bare(json.loads(sent_body)) if body else not sent_body, f"{line}: {body} is not {sent_body}"
        return line

    def ends_with(line, confirm, view=None):
        """This one asks the daemon what is lost, even if it runs dry. The page then goes to the view, if there is one."""
        assert _copied(web) == line
        done = _run(line)
        assert done.returncode == 1 and "/no-such-socket" in done.stderr, f"{line}: {done.returncode} {done.stderr}"
        hand.press("button", confirm)
        web.wait_closed()
        if view:
            page.wait_for_function("view => location.hash === view", arg=view)

    web.go("#/volumes")
    hand.press("button", "New volume…")
    for label, text in (("Name", "fresh"), ("Size", "1536 MiB"), ("Group (optional)", "guests"), ("IOPS, a second", "500"), ("IOPS, burst", "1000"), ("Write bandwidth, a second", "100 MiB")):
        hand.write(label, text)
    hand.choose("On", "fast")
    assert compare("Create the volume") == "freestone volume create --backing fast --size 1536M --iops 500:1000 --write-bandwidth 100M --group guests fresh"
    hand.press("button", "New group…")
    hand.write("Name", "batch")
    hand.write("Read IOPS, a second", "7")
    compare("Create the group")
    hand.pick("group batch", "Delete…")
    compare("Delete the group")
    web.go("#/volumes/backup")
    hand.press("button", "Grow…")
    hand.write("New size", "9 TiB")
    compare("Grow")
    hand.pick("backup", "Set QoS…")
    hand.write("Minimum IOPS (optional)", "10")
    compare("Set limits")
    hand.pick("backup", "Rename…")
    hand.write("New name", "older")
    assert _copied(web) == "freestone volume rename backup older"
    page.keyboard.press("Escape")
    web.wait_closed()
    hand.pick("backup", "Move…")
    hand.choose("To", "fast")
    hand.check("Overwrite content of an array or device that has no volumes yet")
    compare("Move")
    web.go("#/volumes/tmp")
    hand.pick("tmp", "Delete…")
    _copied(web)  # without the name that confirms
    hand.write("Type “tmp” to confirm", "tmp")
    ends_with("freestone volume delete tmp", "Delete the volume", "#/volumes")

    web.go("#/exports")
    hand.press("button", "New export…")
    for label, text in (("Name", "shared"), ("Serves", "media"), ("Further namespaces (optional)", "archive"), ("Listen address (optional)", "[::1]:4420"),
                        ("Other options (optional)", "nqn=nqn.2014-08.org.example:it's; $(touch /tmp/x)")):
        hand.write(label, text)
    hand.choose("Kind", "nvme-tcp")
    hand.check("Read-only")
    compare("Create the export")
    hand.pick("shared", "Delete…")
    ends_with("freestone export delete shared", "Delete the export")
    web.go("#/exports/bulk")
    hand.press("button", "Processors…")
    hand.check("Processor 1")
    compare("Set processors")
    web.go("#/devices")
    hand.press("button", "New device…")
    hand.write("Name", "more")
    hand.write("Specification", "io_uring:path=/dev/a b,direct=on")
    compare("Create the device")
    web.go("#/devices/more")
    hand.pick("more", "Delete…")
    hand.write("Type “more” to confirm", "more")
    ends_with("freestone device delete more", "Delete the device", "#/devices")
    web.go("#/")
    hand.press("button", "Limit rate… rebuild of data, slot 2")
    hand.write("Maximum rate, bytes a second (optional)", "200 MiB")
    compare("Set limits")
    hand.press("button", "Cancel… check of fast")
    compare("Cancel the job")


def the_commands_of_arrays_are_command_lines(web):
    page = web.open("degraded", "#/arrays/data")
    hand = Mouse(page)
    new = "/no such/disk'1"

    def check(command, *steps):
        for step in steps:
            step()
        line = _copied(web)
        assert line == command, line
        # 2 would be an invalid command line. No daemon is there to be changed.
        done = _run(line)
        assert done.returncode == 1, f"{line}: {done.returncode} {done.stderr}"
        page.keyboard.press("Escape")
        web.wait_closed()

    check("freestone array fail data 0", lambda: hand.pick("slot 0", "Fail…"))
    check(r"freestone array replace --with '/no such/disk'\''1' --force data 0", lambda: hand.press("button", "Replace… slot 0"), lambda: hand.write("Device", new),
          lambda: hand.check("Overwrite content of the device"))
    check(r"freestone array add --global data '/no such/disk'\''1' /no-such-disk", lambda: hand.press("button", "Add spare…"), lambda: hand.write("Devices", f"{new}\n/no-such-disk"),
          lambda: hand.check("Spares for every array of the daemon"))
    check("freestone array re-add data /no-such-disk", lambda: hand.pick("data", "Re-add…"), lambda: hand.write("Devices", "/no-such-disk"))
    check("freestone array remove data failed", lambda: hand.pick("data", "Remove failed…"))
    check("freestone array scrub --repair data", lambda: hand.pick("data", "Scrub…"), lambda: hand.check("Repair: rewrite wrong strips"))
    check("freestone array grow --size 4T data", lambda: hand.pick("data", "Grow…"), lambda: hand.write("Bytes of each member to use at most (optional)", "4 TiB"))
    check("freestone array delete data", lambda: hand.pick("data", "Delete…"))
    web.go("#/arrays")
    check("freestone array create --level n+m --strip 64K --groups 2 --parities 2 --spare /no-such-spare -- new -odd /no/1 /no/2 /no/3 /no/4 /no/5",
          lambda: hand.press("button", "New array…"), lambda: hand.write("Name", "new"), lambda: hand.choose("Level", "n+m"), lambda: hand.write("Members", "-odd\n/no/1\n/no/2\n/no/3\n/no/4\n/no/5"),
          lambda: hand.write("Spares (optional)", "/no-such-spare"), lambda: hand.write("Groups (optional)", "2"), lambda: hand.write("Parities (optional)", "2"), lambda: hand.write("Strip (optional)", "64 KiB"))
    assert not [request for request in web.mock.requests if request[0] != "GET"]


def the_commands_of_the_first_steps_are_command_lines(web):
    page = web.open("empty")
    commands = page.get_by_role("region", name=re.compile("^Command to "))

    def check(*expected):
        expect(commands).to_have_text([re.compile(f"^freestone {command} ?") for command in expected])
        for line in commands.all_text_contents():
            # Lists and arrays' commands look for a daemon, which is not there. 2 would be an invalid command line.
            asks = line.split()[1] in ("disks", "array")
            done = _run(line, *([] if asks else ["--dry-run"]))
            assert done.returncode == (1 if asks else 0), f"{line}: {done.returncode} {done.stderr}"

    check("disks", "volume create", "export create")
    page.get_by_role("checkbox", name=re.compile("^nvme0n1 ")).check()
    check("device create", "volume create", "export create")
    page.get_by_role("checkbox", name=re.compile("^nvme1n1 ")).check()
    check("array create", "volume create", "export create")


def a_command_has_no_secret_and_needs_valid_fields(web):
    page = web.open("healthy", "#/devices")
    hand = Keyboard(page)
    hand.press("button", "New device…")
    hand.press("button", "Copy as command")
    expect(web.dialog()).to_contain_text("Name: a value is required")
    command = web.dialog().get_by_role("region", name="Command")
    expect(command).to_be_hidden()
    hand.write("Name", "remote")
    for spec, shown in (("nbd:uri=nbds://user:geheim@host/x", "nbd:uri=nbds://***@host/x"), ("nvme-tcp:dhchap-key=DHHC-1:00:geheim:", "nvme-tcp:dhchap-key=***")):
        hand.write("Specification", spec)
        hand.press("button", "Copy as command")
        expect(web.dialog().get_by_role("region", name="Command")).to_have_text(re.compile(rf"^freestone device create remote '?{re.escape(shown)}'?$"))
        expect(web.dialog().get_by_role("status")).to_have_text("Copied. Replace *** by the secret.")
        assert "geheim" not in page.evaluate("navigator.clipboard.readText()")
    hand.write("Name", "other")
    expect(command).to_be_hidden()  # it was of other values
    hand.press("button", "Copy as command")
    found = web.axe()
    assert not found, found
    assert ("button", "Copy as command") in web.controls()
