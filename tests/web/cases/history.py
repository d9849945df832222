"""The history of an object: the last hour and day, events in it, and what is shown without one."""

import re

from playwright.sync_api import expect

from mock import Problem

NUMBERS = {"IOPS": r"[\d,]+", "Bandwidth": r"[\d.]+ MiB.s"}


def a_volume_shows_its_last_hour_and_day(web):
    page = web.open("healthy", "#/volumes/backup")
    for title, number in NUMBERS.items():
        plot = page.get_by_role("img", name=re.compile(rf"^{title} of backup in the last hour\. Now: reads {number}, writes {number}\.$"))
        expect(plot).to_be_visible()
        expect(plot.locator("path.line.read")).to_have_attribute("d", re.compile("L"))
        expect(plot).to_contain_text("1 h ago30 min agonow")
    expect(page.get_by_role("img", name="Latency of backup in the last hour. Now: median 90 µs, 99th percentile 850 µs.")).to_be_visible()
    page.get_by_label("Time", exact=True).select_option("24 hours")
    day = page.get_by_role("img", name=re.compile(r"^IOPS of backup in the last 24 hours\."))
    expect(day).to_contain_text("24 h ago12 h agonow")
    expect(page.get_by_role("img", name=re.compile("in the last hour"))).to_have_count(0)


def a_member_shows_its_last_hour_and_day(web):
    page = web.open("healthy", "#/arrays/data")
    page.get_by_label("History of").select_option(label="slot 2 (/dev/sdd)")
    expect(page.get_by_role("img", name=re.compile(r"^IOPS of slot 2 of data in the last hour\. Now: reads [\d,]+, writes [\d,]+\.$"))).to_be_visible()
    page.get_by_label("Time", exact=True).select_option("24 hours")
    expect(page.get_by_role("img", name=re.compile(r"^Latency of slot 2 of data in the last 24 hours\."))).to_be_visible()
    page.get_by_label("History of").select_option("array data")
    expect(page.get_by_role("img", name=re.compile(r"^IOPS of data in the last 24 hours\."))).to_be_visible()


def events_are_lines_in_the_plots_and_a_list(web):
    page = web.open("healthy", "#/arrays/data")
    plot = page.get_by_role("img", name=re.compile(r"^IOPS of data in the last hour\."))
    expect(plot.locator("line.event title")).to_have_text("The array data runs, 6 of 6 members are live")
    page.get_by_text("Events in this time").click()
    expect(page.get_by_role("listitem").filter(has_text="The array data runs, 6 of 6 members are live")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d: The array"))


def the_pointer_reads_a_value_and_its_time(web):
    page = web.open("healthy", "#/volumes/backup")
    plot = page.get_by_role("img", name=re.compile(r"^IOPS of backup in the last hour\."))
    plot.scroll_into_view_if_needed()
    figure = page.locator("figure").filter(has=plot)
    plot.hover()
    expect(figure.locator(".value").first).to_have_text(re.compile(r"^[\d,]+ at (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d$"))
    page.mouse.move(0, 0)
    expect(figure.locator(".value").first).to_have_text(re.compile(r"^[\d,]+$"))


def an_export_has_requests_and_bytes(web):
    page = web.open("healthy", "#/exports/bulk")
    for title, number in NUMBERS.items():
        expect(page.get_by_role("img", name=re.compile(rf"^{title} of bulk in the last hour\. Now: reads {number}, writes {number}\.$"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Latency"))).to_have_count(0)


def a_gap_breaks_the_line(web):
    web.start("healthy")
    at_s = 1_800_000_000
    point = {"reads": 100, "writes": 0, "read_bytes": 0, "written_bytes": 0, "p50_ns": None, "p99_ns": None}
    points = [{**point, "at_ns": (at_s + second) * 10**9} for second in (0, 10, 600, 610)]
    answer = {"object": "volumes/backup", "resolution_s": 10, "points": points, "markers": []}
    web.mock.api.get_history = lambda query: (200, answer)
    page = web.open(view="#/volumes/backup")
    line = page.get_by_role("img", name="IOPS of backup in the last hour. Now: reads 10, writes 0.").locator("path.line.read")
    expect(line).to_have_attribute("d", re.compile(r"^M[^ML]+L[^ML]+M[^ML]+L[^ML]+$"))


def an_object_without_points_says_so(web):
    web.start("healthy")
    web.mock.api.get_history = lambda query: (200, {"object": query["object"][0], "resolution_s": 10, "points": [], "markers": []})
    page = web.open(view="#/volumes/backup")
    expect(page.get_by_text("No points in 1 hour yet. The daemon takes one every 10 seconds.")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("in the last hour"))).to_have_count(0)


def an_answer_that_fails_is_reported_and_asked_for_again(web):
    web.start("healthy")
    web.allow("status of 503")

    def refuse(query):
        raise Problem(503, "busy", "the daemon is busy")
    answers = web.mock.api.get_history
    web.mock.api.get_history = refuse
    page = web.open(view="#/volumes/backup")
    expect(page.get_by_text("The history cannot be shown: the daemon is busy")).to_be_visible()
    web.mock.api.get_history = answers
    expect(page.get_by_role("img", name=re.compile("^IOPS of backup in the last hour"))).to_be_visible()
