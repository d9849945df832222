"""Events: the live list, and a stream that is lost and comes back."""

import json
import time

from playwright.sync_api import expect

from mock import Problem
from web import Keyboard, Mouse


def _rows(page):
    return page.get_by_role("log").locator("tbody tr:visible")


def the_list_is_live_and_newest_first(web):
    page = web.open("healthy", "#/events")
    expect(_rows(page)).to_have_count(3)
    web.mock.emit("volume", "backup", "changed", "The volume backup was changed")
    expect(_rows(page).first).to_contain_text("The volume backup was changed")
    expect(_rows(page).first.get_by_role("link", name="backup")).to_have_attribute("href", "#/volumes/backup")
    expect(page.locator("#last-event")).to_contain_text("The volume backup was changed")
    assert page.locator("#last-event").get_attribute("aria-live") == "off"  # the log says it already
    web.go("#/")
    web.mock.emit("volume", "backup", "changed", "Once more")
    expect(page.locator("#last-event")).to_contain_text("Once more")
    assert page.locator("#last-event").get_attribute("aria-live") == "polite"


def _filter(web, hands):
    page = web.open("healthy", "#/events")
    hand = hands(page)
    expect(_rows(page)).to_have_count(3)
    box = page.get_by_label("array", exact=True)
    if hands is Keyboard:
        hand.reach(box)
        page.keyboard.press("Space")
    else:
        box.uncheck()
    expect(_rows(page)).to_have_count(2)
    web.mock.emit("array", "data", "changed", "Not to be seen")
    web.mock.emit("volume", "backup", "changed", "To be seen")
    expect(_rows(page)).to_have_count(3)
    expect(page.get_by_role("log")).not_to_contain_text("Not to be seen", use_inner_text=True)
    hand.check("array")
    expect(_rows(page)).to_have_count(5)


def kinds_are_filtered_by_mouse(web):
    _filter(web, Mouse)


def kinds_are_filtered_by_keyboard(web):
    _filter(web, Keyboard)


def a_lost_stream_comes_back_with_what_was_missed(web):
    page = web.open("healthy", "#/events")
    expect(_rows(page)).to_have_count(3)
    with web.mock.state.lock:
        # No page hears this one: the page must ask for it.
        listeners, web.mock.state.listeners = web.mock.state.listeners, set()
        web.mock.emit("volume", "backup", "changed", "Missed")
        web.mock.state.listeners = listeners
    web.mock.end_streams()
    expect(_rows(page).first).to_contain_text("Missed")
    expect(page.locator("#connection")).to_be_hidden()
    web.mock.emit("volume", "backup", "changed", "Heard again")
    expect(_rows(page).first).to_contain_text("Heard again")
    assert len(web.sent("GET", "/v1/events/stream")) == 2


def a_daemon_that_is_gone_is_said_to_be_and_found_again(web):
    web.allow("ERR_|Failed to load resource")
    page = web.open("healthy", "#/events")
    expect(_rows(page)).to_have_count(3)
    failures = []
    page.on("requestfailed", lambda request: failures.append(time.monotonic()) if request.url.endswith("/stream") else None)
    web.mock.stop()
    expect(page.get_by_role("alert").filter(has_text="The daemon is unreachable. The page may be out of date. Reconnecting…")).to_be_visible()
    web.wait_until(lambda: len(failures) >= 4, lambda: failures)
    gaps = [after - before for before, after in zip(failures, failures[1:])]
    assert len(gaps) >= 2 and gaps[-1] > 1.3 * gaps[0], f"the pauses do not grow: {gaps}"
    with web.mock.state.lock:
        # A daemon that was started anew counts from 1.
        web.mock.state.started_ns += 10**9
        web.mock.state.events.clear()
        web.mock.emit("daemon", "freestoned", "started", "The daemon was started again")
    web.mock.start()
    expect(page.locator("#connection")).to_be_hidden()
    expect(_rows(page)).to_have_count(1)
    expect(_rows(page).first).to_contain_text("The daemon was started again")
    web.mock.emit("volume", "backup", "changed", "Heard again")
    expect(_rows(page).first).to_contain_text("Heard again")


def a_stream_that_stays_away_is_said_to_be_lost(web):
    web.allow("status of 503")
    page = web.open("healthy", "#/events")

    def away(_, path):
        if path.endswith("/stream"):
            raise Problem(503, "busy", "too many listeners")
    web.mock.fault = away
    web.mock.end_streams()
    banner = page.get_by_role("alert").filter(has_text="The stream of events is interrupted.")
    expect(banner).to_be_visible()
    web.mock.fault = None
    expect(banner).to_have_count(0)


def a_message_in_pieces_is_one_event(web):
    page = web.open("healthy", "#/events")
    result = page.evaluate("""async () => {
        const { readStream } = await import("/web/api.js");
        const bytes = new TextEncoder().encode(": hello\\r\\n\\r\\nid: 7\\r\\ndata: {\\"a\\":\\r\\ndata: \\"ü\\"}\\r\\n\\r\\nid: 8\\ndata: 2\\n\\n");
        const seen = [];
        const body = new ReadableStream({ start(out) { for (const byte of bytes) out.enqueue(new Uint8Array([byte])); out.close(); } });
        await readStream(body, (data) => seen.push(data));
        return seen;
    }""")
    assert result == ['{"a":\n"ü"}', "2"], json.dumps(result)


def many_events_stay_bounded(web):
    page = web.open("healthy", "#/events")
    with web.mock.state.lock:
        for number in range(1200):
            web.mock.emit("volume", "backup", "changed", f"Change {number}")
    expect(_rows(page).first).to_contain_text("Change 1199")
    assert page.get_by_role("log").locator("tbody tr").count() <= 500
