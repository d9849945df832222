// The last hour or day of an object, as the daemon keeps it: plots with the events of the object and of those below it.

import { get } from "./api.js";
import { h, newId, setText } from "./dom.js";
import { dateAndTime, time } from "./format.js";
import { BANDWIDTH, IOPS, LATENCY, plotRow } from "./plots.js";

const RANGES = [
  { seconds: 3600, label: "1 hour", said: "in the last hour", ticks: ["1 h ago", "30 min ago", "now"] },
  { seconds: 86_400, label: "24 hours", said: "in the last 24 hours", ticks: ["24 h ago", "12 h ago", "now"] },
];
const SHORTEST_MS = 10_000; // the daemon has no new point earlier
const KINDS = [IOPS, BANDWIDTH];
const PERCENTILES = { ...LATENCY, title: "Latency", names: ["median", "99th percentile"] };
const MOST_EVENTS = 20;

/** An answer of /v1/history, with the methods of a History that has one series. */
class Day {
  constructor({ points, markers, resolution_s }, range) {
    Object.assign(this, range);
    const newest_ns = points.at(-1)?.at_ns ?? 0;
    const age = (at_ns) => (newest_ns - at_ns) / 1e9;
    const number = (value) => value ?? NaN;
    this.resolution_s = resolution_s;
    this.points = points.map((point) => ({
      age_s: age(point.at_ns), at_ns: point.at_ns,
      values: [point.reads / resolution_s, point.writes / resolution_s, point.read_bytes / resolution_s, point.written_bytes / resolution_s, number(point.p50_ns), number(point.p99_ns)],
    }));
    this.markers = markers.filter((marker) => marker.at_ns <= newest_ns).map((marker) => ({ ...marker, age_s: age(marker.at_ns) }));
  }

  now(_, metric) {
    return this.points.at(-1)?.values[metric] ?? NaN;
  }

  /** Calls `each` for the points, and with NaN where some are missing. */
  forEach(_, metric, each) {
    let before = null;
    for (const point of this.points) {
      if (before && before.age_s - point.age_s > 1.5 * this.resolution_s) each(before.age_s, NaN);
      if (point.age_s <= this.seconds) each(point.age_s, point.values[metric]);
      before = point;
    }
  }

  /** The values and the time of the point that is nearest to this age. */
  nearest(age_s) {
    let best = null;
    for (const point of this.points) {
      if (!best || Math.abs(point.age_s - age_s) < Math.abs(best.age_s - age_s)) best = point;
    }
    return best && { values: best.values, time: time(best.at_ns) };
  }
}

/** The plots of `object`, as /v1/history names it; `subject` is its name for people. Exports have no latency. */
export class DayPlots {
  constructor(object, subject, { hasLatency = true } = {}) {
    this.object = object;
    this.subject = subject;
    const { plots, element } = plotRow(hasLatency ? [...KINDS, PERCENTILES] : KINDS);
    this.plots = plots;
    const id = newId("range");
    this.select = h("select", { id, onchange: () => this.load() }, RANGES.map(({ label }, i) => h("option", { value: String(i) }, label)));
    this.message = h("p", { class: "muted", role: "status" });
    this.events = h("ul", { class: "plain" });
    this.list = h("details", { hidden: true }, h("summary", null, "Events in this time"), this.events);
    this.row = element;
    this.element = h("div", { class: "plots" }, h("p", { class: "choice" }, h("label", { for: id }, "Time"), " ", this.select), this.message, element, this.list);
    this.load();
  }

  /** Shows the plots of another object. */
  show(object, subject) {
    Object.assign(this, { object, subject });
    this.load();
  }

  /** Gets the history now, and again when there is a new point. */
  async load() {
    clearTimeout(this.timer);
    const range = RANGES[Number(this.select.value)];
    const load = this.current = {}; // an answer that comes after the next question is void
    let wait_ms = SHORTEST_MS;
    if (!document.hidden) {
      try {
        const answer = await get(`/history?object=${encodeURIComponent(this.object)}&seconds=${range.seconds}`);
        if (this.current !== load) return;
        wait_ms = Math.max(wait_ms, answer.resolution_s * 1e3);
        if (answer.points.length > 0) this.draw(new Day(answer, range));
        else this.hide(`No points in ${range.label} yet. The daemon takes one every ${answer.resolution_s / 60 >= 1 ? `${answer.resolution_s / 60} minutes` : `${answer.resolution_s} seconds`}.`);
      } catch (error) {
        if (this.current !== load) return;
        this.hide(`The history cannot be shown: ${error.message}`);
      }
    }
    this.timer = setTimeout(() => this.load(), wait_ms);
  }

  hide(text) {
    this.row.hidden = this.list.hidden = true;
    setText(this.message, text);
  }

  draw(day) {
    setText(this.message, "");
    this.row.hidden = false;
    for (const plot of this.plots) {
      plot.draw(day, null, this.subject);
      plot.follow(day, null);
    }
    const shown = day.markers.slice(-MOST_EVENTS).reverse();
    this.list.hidden = shown.length === 0;
    const signature = JSON.stringify(shown);
    if (this.events.signature === signature) return;
    this.events.signature = signature;
    this.events.replaceChildren(...shown.map(({ at_ns, text }) => h("li", null, `${dateAndTime(at_ns)}: ${text}`)));
  }

  close() {
    clearTimeout(this.timer);
    this.current = null;
    for (const plot of this.plots) plot.resize.disconnect();
  }
}
