"""What a test of the page gets: a mock daemon, a browser, and hands that work it with the mouse or with the keyboard alone.

A test is a function whose only parameter is `web`, in a file under cases/; its name is a sentence. At its end the browser
must have said nothing on the console and asked no other host for anything."""

import contextlib
import os
import re
import subprocess
import time
import urllib.parse

from playwright.sync_api import expect, sync_playwright

from mock import ADMIN, REPO, Mock

HERE = os.path.dirname(os.path.abspath(__file__))
WEB = os.environ.get("WEB_DIR", os.path.join(REPO, "target", "web"))
AXE = os.path.join(WEB, "axe", "package", "axe.min.js")
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
TIMEOUT_MS = 60_000
MOST_TABS = 250  # a page with more stops than this cannot be worked with a keyboard
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
# Every view, with what shows most.
VIEWS = ["#/", "#/arrays", "#/arrays/data", "#/volumes", "#/volumes/backup", "#/exports", "#/exports/bulk", "#/devices", "#/devices/scratch", "#/events", "#/nothing"]

expect.set_options(timeout=TIMEOUT_MS)


def prepare(_):
    subprocess.run([os.path.join(HERE, "setup")], check=True)


@contextlib.contextmanager
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"])
        try:
            yield started
        finally:
            started.close()


class Mouse:
    """Works the page with clicks."""

    def __init__(self, page):
        self.page = page

    @property
    def scope(self):
        """The dialog that is open, or the page."""
        dialog = self.page.locator("dialog[open]")
        return dialog.last if dialog.count() else self.page

    def find(self, role, name):
        return self.scope.get_by_role(role, name=name, exact=True)

    def press(self, role, name):
        self.find(role, name).click()

    def pick(self, of, action):
        """An action of the menu of `of`."""
        self.press("button", f"More actions of {of}")
        self.choose_item(self.find("menuitem", action))

    def choose_item(self, item):
        item.click()

    def write(self, label, text):
        self.scope.get_by_label(label, exact=True).fill(text)

    def choose(self, label, option):
        self.scope.get_by_label(label, exact=True).select_option(option)

    def check(self, label):
        self.scope.get_by_label(label, exact=True).check()


class Keyboard(Mouse):
    """Works the page with keys alone, and gets everywhere with Tab."""

    def reach(self, target):
        target.wait_for()
        for _ in range(MOST_TABS):
            if target.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not get to {target}")

    def press(self, role, name):
        self.reach(self.find(role, name))
        self.page.keyboard.press("Enter")

    def choose_item(self, item):
        item.wait_for()
        for _ in range(self.scope.get_by_role("menuitem").count()):
            if item.evaluate("element => element === document.activeElement"):
                self.page.keyboard.press("Enter")
                return
            self.page.keyboard.press("ArrowDown")
        raise AssertionError(f"no arrow gets to {item}")

    def write(self, label, text):
        self.reach(self.scope.get_by_label(label, exact=True))
        self.page.keyboard.press("Control+a")
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(text)

    def choose(self, label, option):
        target = self.scope.get_by_label(label, exact=True)
        self.reach(target)
        self.page.keyboard.press("Home")
        for _ in range(target.locator("option").count()):
            if target.input_value() == option:
                return
            self.page.keyboard.press("ArrowDown")
        raise AssertionError(f"{label} has no option {option}")

    def check(self, label):
        target = self.scope.get_by_label(label, exact=True)
        self.reach(target)
        if not target.is_checked():
            self.page.keyboard.press("Space")
        assert target.is_checked()


class Web:
    def __init__(self, name, _):
        self.directory = os.path.join(WEB, "out", name)
        self.name = name
        self._ends = contextlib.ExitStack()
        self._browser = None
        self.mock = None
        self.page = None
        self.complaints = []
        self.allowed = []

    def close(self):
        self._ends.close()

    def callback(self, end):
        """Call end() when the test is over."""
        self._ends.callback(end)

    def logs(self):
        """A screenshot, and what the browser said."""
        if self.page is None:
            return ""
        os.makedirs(self.directory, exist_ok=True)
        picture = os.path.join(self.directory, "page.png")
        with contextlib.suppress(Exception):
            self.page.screenshot(path=picture, timeout=5000)
        return "\n".join(["", f"picture: {picture}", *self.complaints])

    def check_end(self):
        wrong = [complaint for complaint in self.complaints if not any(re.search(pattern, complaint) for pattern in self.allowed)]
        assert not wrong, "the browser complains:\n" + "\n".join(wrong)

    def allow(self, pattern):
        """The test provokes these complaints."""
        self.allowed.append(pattern)

    def start(self, scenario="healthy", **more):
        self.mock = Mock(scenario, **more)
        self._ends.callback(self.mock.close)

    def open(self, scenario="healthy", view="#/", scheme="light", token=ADMIN):
        """A page at the view, with a mock in this scenario; the one before is left."""
        if self.mock is None:
            self.start(scenario)
        if self._browser is None:
            self._browser = self._ends.enter_context(browser())
        context = self._browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, locale="en-GB")
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=self.mock.url)
        self.page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self.on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        context.on("request", self.on_request)
        self.page.goto(self.mock.url + (f"#token={token}" if token else ""))
        if token:
            self.page.get_by_role("heading", level=1).wait_for()
            if view != "#/":
                self.go(view)
        return self.page

    def on_console(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def on_request(self, request):
        host = urllib.parse.urlsplit(request.url).netloc
        if not request.url.startswith(("data:", "blob:")) and host != urllib.parse.urlsplit(self.mock.url).netloc:
            self.complaints.append(f"request to another host: {request.url}")

    def go(self, view):
        """Go to the view by the address, and wait for it."""
        self.page.evaluate("""view => {
            if (location.hash === view) return;
            document.querySelector("h1")?.setAttribute("data-old", "");
            location.hash = view;
        }""", view)
        self.page.locator("h1:not([data-old])").wait_for()

    def dialog(self):
        return self.page.locator("dialog[open]")

    def wait_closed(self):
        expect(self.dialog()).to_have_count(0)

    def wait_until(self, is_so, seen):
        """Waits for what no locator can say; fails with what `seen` returns."""
        until = time.monotonic() + TIMEOUT_MS / 1000
        while not is_so():
            assert time.monotonic() < until, f"not in time: {seen()}"
            self.page.wait_for_timeout(50)

    def sent(self, method, path):
        """The bodies of such requests, the newest last."""
        return [body for seen_method, seen_path, body in list(self.mock.requests) if seen_method == method and urllib.parse.unquote(seen_path) == path]

    def axe(self):
        """What axe-core finds wrong with the page as it is."""
        if not self.page.evaluate("() => typeof axe === 'object'"):
            with open(AXE, encoding="utf-8") as file:
                self.page.evaluate(f"() => {{ {file.read()} }}")
        found = self.page.evaluate("rules => axe.run(document, { runOnly: { type: 'tag', values: rules }, resultTypes: ['violations'] })", RULES)
        return [f"{violation['id']}: {node['html'][:150]}: {node['failureSummary']}" for violation in found["violations"] for node in violation["nodes"]]

    def controls(self):
        """(role, name) of everything on the page that can be operated, as assistive technology gets it."""
        session = self.page.context.new_cdp_session(self.page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        session.detach()
        roles = {"button", "link", "textbox", "searchbox", "combobox", "checkbox", "listbox", "option", "radio", "menuitem", "DisclosureTriangle", "progressbar"}
        return [(node["role"]["value"], node.get("name", {}).get("value", "").strip()) for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") in roles]
