"""The page's frame: address and focus, theme, tokens and roles, hostile names, what it asks for."""

import os
import re

from playwright.sync_api import expect

from mock import ADMIN, HOSTILE, PAGE, Problem, READER
from web import Keyboard, Mouse, VIEWS


def the_address_says_which_view_and_the_focus_goes_to_its_heading(web):
    page = web.open("healthy")
    for view, title in [("Arrays", "Arrays"), ("Volumes", "Volumes"), ("Exports", "Exports"), ("Devices", "Devices"), ("Events", "Events"), ("Overview", "Overview")]:
        Keyboard(page).press("link", view)
        heading = page.get_by_role("heading", name=title, level=1)
        expect(heading).to_be_focused()
        expect(page.locator("nav [aria-current=page]")).to_have_text(view)
        expect(page).to_have_title(f"storage-1: {title} – freestoned")
    web.go("#/volumes/backup")
    expect(page.locator("nav [aria-current]")).to_have_text("Volumes")
    page.go_back()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_focused()
    page.reload()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()


def the_skip_link_comes_first_and_leads_to_the_content(web):
    page = web.open("healthy", "#/volumes")
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.reload()
    page.get_by_role("heading", level=1).wait_for()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    assert page.url.endswith("#/volumes")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="New volume…")).to_be_focused()


def landmarks_captions_and_headings_are_there(web):
    page = web.open("degraded")
    for view in VIEWS:
        web.go(view)
        for landmark in ("banner", "navigation", "main", "contentinfo"):
            assert page.get_by_role(landmark).count() == 1, f"{view}: {landmark}"
        assert page.locator("h1").count() == 1, view
        captions = page.locator("table").evaluate_all("tables => tables.map(table => table.caption?.textContent ?? '')")
        assert all(captions), f"{view}: a table without a caption"


def focus_is_visible_everywhere(web):
    page = web.open("degraded", "#/arrays/data")
    for _ in range(45):
        page.keyboard.press("Tab")
        seen = page.evaluate("""() => { const style = getComputedStyle(document.activeElement);
            return [document.activeElement.outerHTML.slice(0, 80), style.outlineStyle, parseFloat(style.outlineWidth)]; }""")
        if not seen[0].startswith("<body"):  # between the last stop and the first
            assert seen[1] != "none" and seen[2] >= 2, seen


def _colours(page):
    return page.evaluate("() => getComputedStyle(document.body).backgroundColor")


def the_theme_follows_the_system_and_the_choice_is_remembered(web):
    page = web.open("healthy", scheme="dark")
    dark = _colours(page)
    page.emulate_media(color_scheme="light")
    light = _colours(page)
    assert dark != light
    expect(page.locator("#theme")).to_have_text("Dark theme")
    Keyboard(page).press("button", "Dark theme")
    assert _colours(page) == dark
    expect(page.locator("#theme")).to_have_text("Light theme")
    page.reload()
    assert _colours(page) == dark
    page.get_by_role("button", name="Light theme").click()
    page.emulate_media(color_scheme="dark")
    assert _colours(page) == light


def the_token_leaves_the_address_and_stays_in_the_session(web):
    page = web.open("healthy")
    assert "token" not in page.url, page.url
    assert page.evaluate("sessionStorage.getItem('freestone-token')") == ADMIN
    assert page.evaluate("JSON.stringify(localStorage)").count(ADMIN) == 0
    page.reload()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def the_header_names_the_host_and_the_role_of_the_token(web):
    for token, role in ((ADMIN, "admin"), (READER, "read-only")):
        page = web.open("healthy", token=token)
        header = page.get_by_role("banner")
        expect(header).to_contain_text("storage-1")
        expect(header).to_contain_text(f"Role: {role}")
        expect(page).to_have_title("storage-1: Overview – freestoned")


def _log_out(web, hands):
    web.allow("status of 401")
    page = web.open("healthy", "#/volumes/backup")
    hands(page).press("button", "Log out")
    expect(web.dialog().get_by_label("Token")).to_be_focused()
    assert page.evaluate("sessionStorage.getItem('freestone-token')") is None
    expect(page.get_by_text("backup")).to_have_count(0)
    hands(page).write("Token", READER)
    hands(page).press("button", "Continue")
    expect(page.get_by_role("heading", name="Volume backup", level=1)).to_be_visible()
    expect(page.get_by_role("banner")).to_contain_text("Role: read-only")


def logging_out_forgets_the_token_by_mouse(web):
    _log_out(web, Mouse)


def logging_out_forgets_the_token_by_keyboard(web):
    _log_out(web, Keyboard)


def a_listener_without_tokens_has_no_log_out(web):
    web.start("healthy", tokens={})
    page = web.open(token=None)
    expect(page.get_by_role("banner")).to_contain_text("Role: admin")
    expect(page.get_by_role("button", name="Log out")).to_have_count(0)


def the_footer_leads_to_metrics_and_the_api_document(web):
    web.allow("status of 403")
    page = web.open("healthy")
    footer = page.get_by_role("contentinfo")
    for button, text in (("Metrics", "freestone_array_redundancy_left"), ("API document", '"openapi"')):
        with page.expect_popup() as popup:
            Keyboard(page).press("button", button)
        expect(popup.value.locator("body")).to_contain_text(text)
        popup.value.close()
        page.bring_to_front()
    expect(footer).to_contain_text("man freestoned")
    expect(footer.get_by_role("button", name="Dark theme")).to_be_visible()

    def refuse(_, path):
        if path == "/metrics":
            raise Problem(403, "forbidden", "role provisioner may not read this")
    web.mock.fault = refuse
    footer.get_by_role("button", name="Metrics").click()
    expect(footer.get_by_role("alert")).to_contain_text("role provisioner may not read this")


def _ask(web, hands):
    web.allow("status of 401")
    page = web.open("healthy", token=None)
    hand = hands(page)
    expect(web.dialog()).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(web.dialog()).to_be_visible()
    hand.write("Token", "wrong")
    hand.press("button", "Continue")
    expect(web.dialog().get_by_role("alert")).to_have_text("The daemon does not accept this token.")
    hand.write("Token", ADMIN)
    hand.press("button", "Continue")
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
    expect(web.dialog()).to_have_count(0)
    web.mock.emit("volume", "backup", "changed", "The stream is there")
    expect(page.locator("#last-event")).to_contain_text("The stream is there")


def a_401_asks_for_a_token_by_mouse(web):
    _ask(web, Mouse)


def a_401_asks_for_a_token_by_keyboard(web):
    _ask(web, Keyboard)


def a_token_that_is_withdrawn_is_asked_for_again(web):
    web.allow("status of 401")
    page = web.open("healthy", "#/volumes/backup")
    web.mock.tokens = {"another": "admin"}
    expect(web.dialog()).to_be_visible()
    Mouse(page).write("Token", "another")
    Mouse(page).press("button", "Continue")
    web.wait_closed()
    expect(page.get_by_role("heading", name="Volume backup")).to_be_visible()


def a_403_says_that_the_token_may_only_read(web):
    web.allow("status of 403")
    page = web.open("degraded", "#/arrays/data", token=READER)
    hand = Mouse(page)
    hand.press("button", "Pause rebuild of data, slot 2")
    expect(page.locator("main").get_by_role("alert").filter(has_text="The role of your token does not allow this. role read-only may not PATCH")).to_be_visible()
    hand.pick("data", "Grow…")
    hand.press("button", "Grow")
    expect(web.dialog().get_by_role("alert")).to_contain_text("The role of your token does not allow this.")


def hostile_names_are_text(web):
    page = web.open("hostile")
    page.evaluate("window.honest = document.title")
    quoted = lambda name: page.evaluate("encodeURIComponent", name)
    views = ["#/", "#/arrays", "#/volumes", "#/exports", "#/devices", "#/events"]
    views += [f"#/{kind}/{quoted(HOSTILE + kind[0])}" for kind in ("arrays", "volumes", "exports", "devices")]
    for view in views:
        web.go(view)
        page.wait_for_timeout(300)
        expect(page.locator("main")).to_contain_text("<img src=x onerror" if view != "#/" else re.compile("<img|Array <img"))
        assert page.locator("img:not([role])").count() == 0, view
        assert "pwned" != page.title(), view
        if view.count("/") == 2:
            expect(page.get_by_role("heading", level=1)).to_contain_text(HOSTILE)
    Mouse(page).pick(f"{HOSTILE}d", "Delete…")
    expect(web.dialog()).to_contain_text(HOSTILE)
    assert page.locator("img:not([role])").count() == 0


def the_files_have_nothing_that_the_policy_forbids(web):
    for name in sorted(os.listdir(PAGE)):
        with open(os.path.join(PAGE, name), encoding="utf-8") as file:
            text = file.read()
        for pattern in (r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", r"\beval\(|new Function", r"https?://(?!www\.w3\.org/)"):
            found = re.search(pattern, text)
            assert not found, f"{name}: {found.group()}"
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), name


def a_complaint_of_the_browser_fails_a_test(web):
    page = web.open("healthy")
    page.evaluate("() => document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.pwned = 1' }))")
    page.evaluate("() => fetch('http://127.0.0.2:9/').catch(() => {})")
    for pattern in ("script-src|default-src", "connect-src|another host"):
        web.wait_until(lambda: any(re.search(pattern, complaint) for complaint in web.complaints), lambda: web.complaints)
    assert page.evaluate("window.pwned") is None
    web.allow(".")
