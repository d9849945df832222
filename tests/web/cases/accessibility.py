"""What assistive technology gets: names of everything that can be operated, and what axe-core finds, in both themes."""

from playwright.sync_api import expect

from web import Mouse, VIEWS

# (view, button that opens a dialog, or the menu and its item)
DIALOGS = [("#/arrays", "New array…"), ("#/arrays/data", ("slot 0", "Fail…")), ("#/arrays/data", ("data", "Delete…")), ("#/arrays/data", "Replace… slot 0"),
           ("#/volumes", "New volume…"), ("#/volumes/backup", ("backup", "Set QoS…")), ("#/volumes/backup", ("backup", "Delete…")), ("#/exports", "New export…"), ("#/devices", "New device…")]


def _open(page, opener):
    if isinstance(opener, str):
        Mouse(page).press("button", opener)
    else:
        Mouse(page).pick(*opener)


def _axe(web, scheme):
    page = web.open("degraded", scheme=scheme)
    page.wait_for_timeout(1500)
    found = []
    for view in VIEWS:
        web.go(view)
        page.wait_for_timeout(1200)
        found += [f"{view}: {violation}" for violation in web.axe()]
    assert not found, "\n".join(found)


def axe_finds_nothing_in_light_views(web):
    _axe(web, "light")


def axe_finds_nothing_in_dark_views(web):
    _axe(web, "dark")


def _axe_in_dialogs(web, scheme):
    page = web.open("degraded", scheme=scheme)
    found = []
    for view, opener in DIALOGS:
        web.go(view)
        _open(page, opener)
        expect(web.dialog()).to_be_visible()
        if "Set QoS…" not in opener:  # whose fields may all be empty
            web.dialog().locator("button[type=submit]").click()
            expect(web.dialog().locator("[aria-invalid]").first).to_be_visible()
        found += [f"{view}, {opener}: {violation}" for violation in web.axe()]
        page.keyboard.press("Escape")
        web.wait_closed()
    assert not found, "\n".join(found)


def axe_finds_nothing_in_light_dialogs(web):
    _axe_in_dialogs(web, "light")


def axe_finds_nothing_in_dark_dialogs(web):
    _axe_in_dialogs(web, "dark")


def axe_finds_nothing_in_messages(web):
    web.allow("status of 401|status of 403")
    found = []
    for scheme in ("light", "dark"):
        page = web.open("degraded", "#/arrays/data", scheme=scheme, token="only-looking")
        Mouse(page).press("button", "Pause rebuild of data, slot 2")
        expect(page.locator("main [role=alert]").filter(has_text="does not allow this")).to_be_visible()
        found += web.axe()
        page = web.open(scheme=scheme, token=None)
        expect(web.dialog()).to_be_visible()
        found += web.axe()
    assert not found, "\n".join(found)


def axe_finds_what_is_wrong(web):
    page = web.open("healthy")
    page.evaluate("() => { document.querySelector('h1').style.color = '#aaa'; document.querySelector('main').append(document.createElement('button')); }")
    found = "\n".join(web.axe())
    assert "color-contrast" in found and "button-name" in found, found


def everything_that_can_be_operated_has_a_name_of_its_own(web):
    page = web.open("degraded")
    for view in VIEWS:
        web.go(view)
        page.wait_for_timeout(300)
        controls = web.controls()
        assert len(controls) >= 8, f"{view}: {controls}"
        assert all(name for _, name in controls), f"{view}: {[role for role, name in controls if not name]} without a name"
        buttons = [name for role, name in controls if role == "button"]
        assert len(buttons) == len(set(buttons)), f"{view}: several buttons are called {[name for name in buttons if buttons.count(name) > 1]}"
    for view, opener in DIALOGS:
        web.go(view)
        _open(page, opener)
        assert all(name for _, name in web.controls()), f"{view}, {opener}: {web.controls()}"
        assert web.dialog().evaluate("dialog => document.getElementById(dialog.getAttribute('aria-labelledby')).textContent.length > 3")
        page.keyboard.press("Escape")
        web.wait_closed()


def news_is_announced(web):
    page = web.open("degraded", "#/arrays/data")
    assert page.locator("#health").get_attribute("role") == "status"
    assert page.locator("#connection").get_attribute("role") == "alert"
    assert page.locator("#exposed").get_attribute("role") == "alert"
    Mouse(page).press("button", "Pause rebuild of data, slot 2")
    expect(page.locator("main [role=status]").filter(has_text="The jobs of data are paused.")).to_be_visible()


def it_fits_a_narrow_window(web):
    page = web.open("degraded")
    page.set_viewport_size({"width": 640, "height": 800})
    for view in VIEWS:
        web.go(view)
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the window"
