// Plots over time: reads as a solid line, writes as a dashed one, and the newest numbers in words next to them.
//
// A plot is an SVG of the size that it has on the screen; only the paths and the scale change with a sample. The numbers
// come from a `History` of the last two minutes, or from a `Day`, which has the same methods.

import { h, newId, setAttribute, setText, svg } from "./dom.js";
import { bandwidth, bytes, count, latency } from "./format.js";

const HEIGHT = 130;
const LEFT = 68; // room for the scale's numbers
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

/** The first line is solid, the second one dashed: reads and writes, unless `names` has others. */
export const IOPS = { title: "IOPS", format: count, read: 0, write: 1, steps: decimalSteps, least: 10 };
export const BANDWIDTH = { title: "Bandwidth", format: bandwidth, read: 2, write: 3, steps: binarySteps, least: 64 * 1024 };
export const LATENCY = { title: "Mean latency", format: latency, read: 4, write: 5, steps: decimalSteps, least: 1e4 };
const KINDS = [IOPS, BANDWIDTH, LATENCY];

/** The next round number: 1, 2, 5, 10, … */
function decimalSteps(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

/** The next power of two. */
function binarySteps(value) {
  return 2 ** Math.ceil(Math.log2(value));
}

/** The path of a metric. Where nothing is known the line is broken; a point alone becomes a dot. */
export function path(history, series, metric, most, box) {
  let d = "";
  let isDown = false;
  history.forEach(series, metric, (age_s, value) => {
    if (Number.isNaN(value)) {
      isDown = false;
      return;
    }
    const x = (box.right - (age_s / history.seconds) * (box.right - box.left)).toFixed(1);
    const y = (box.bottom - Math.min(value / most, 1) * (box.bottom - box.top)).toFixed(1);
    d += isDown ? `L${x} ${y}` : `M${x} ${y}h.1`;
    isDown = true;
  });
  return d;
}

/** The largest number that the plot has to show. */
export function peak(history, series, ...metrics) {
  let most = 0;
  for (const metric of metrics) history.forEach(series, metric, (_, value) => { if (value > most) most = value; });
  return most;
}

export class Plot {
  constructor(kind) {
    this.kind = kind;
    const [solid, dashed] = kind.names ?? ["read", "write"];
    this.width = 0;
    const title = newId("plot");
    this.now = { read: h("span", { class: "value" }, "–"), write: h("span", { class: "value" }, "–") };
    this.read = svg("path", { class: "line read" });
    this.write = svg("path", { class: "line write" });
    this.marks = [0, 0.5, 1].map((part) => ({ part, line: svg("line", { class: "grid" }), text: svg("text", { "text-anchor": "end" }) }));
    this.times = ["start", "middle", "end"].map((anchor) => svg("text", { "text-anchor": anchor }));
    this.events = svg("g", { class: "events" });
    this.svg = svg("svg", { role: "img", height: HEIGHT },
      this.marks.map(({ line, text }) => [line, text]), this.times, this.events, this.write, this.read);
    this.element = h("figure", { class: "plot", "aria-labelledby": title },
      h("figcaption", null, h("span", { class: "title", id: title }, kind.title),
        h("span", { class: "key" }, svg("svg", { width: 18, height: 8, "aria-hidden": "true" }, svg("path", { class: "line read", d: "M1 4H17" })), ` ${solid} `, this.now.read),
        h("span", { class: "key" }, svg("svg", { width: 18, height: 8, "aria-hidden": "true" }, svg("path", { class: "line write", d: "M1 4H17" })), ` ${dashed} `, this.now.write)),
      this.svg);
    this.resize = new ResizeObserver(([entry]) => this.layOut(Math.floor(entry.contentRect.width)));
    this.resize.observe(this.element);
  }

  layOut(width) {
    if (width === this.width || width < LEFT + 50) return;
    this.width = width;
    this.box = { left: LEFT, right: width - RIGHT, top: TOP, bottom: HEIGHT - BOTTOM };
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const { part, line, text } of this.marks) {
      const y = this.box.bottom - part * (this.box.bottom - this.box.top);
      for (const [name, value] of [["x1", LEFT], ["x2", this.box.right], ["y1", y], ["y2", y]]) line.setAttribute(name, value);
      text.setAttribute("x", LEFT - 6);
      text.setAttribute("y", y + 4);
    }
    this.times.forEach((text, i) => {
      text.setAttribute("x", this.box.left + (i / 2) * (this.box.right - this.box.left));
      text.setAttribute("y", HEIGHT - 5);
    });
    this.redraw?.();
  }

  draw(history, series, subject) {
    this.redraw = () => this.draw(history, series, subject);
    const { read, write, format, steps, least, title } = this.kind;
    const now = { read: format(history.now(series, read)), write: format(history.now(series, write)) };
    setText(this.now.read, now.read);
    setText(this.now.write, now.write);
    const [solid, dashed] = this.kind.names ?? ["reads", "writes"];
    setAttribute(this.svg, "aria-label", `${title} of ${subject} ${history.said}. Now: ${solid} ${now.read}, ${dashed} ${now.write}.`);
    this.times.forEach((text, i) => setText(text, history.ticks[i]));
    if (this.width === 0) return;
    this.mark(history);
    const most = steps(Math.max(peak(history, series, read, write), least));
    for (const { part, text } of this.marks) setText(text, part === 0 ? "0" : format(most * part));
    setAttribute(this.read, "d", path(history, series, read, most, this.box));
    setAttribute(this.write, "d", path(history, series, write, most, this.box));
  }

  /** Draws a line for each marker. Their texts stand in a list next to the plots. */
  mark(history) {
    const { left, right, top, bottom } = this.box;
    this.events.replaceChildren(...(history.markers ?? []).map(({ age_s, text }) => {
      const x = (right - (age_s / history.seconds) * (right - left)).toFixed(1);
      return svg("line", { class: "event", x1: x, x2: x, y1: top, y2: bottom }, svg("title", null, text));
    }));
  }

  /** Shows the numbers under the pointer in place of the newest ones. */
  follow(history, series) {
    const { read, write, format } = this.kind;
    this.svg.onpointermove = (event) => {
      if (!this.box) return;
      const part = (event.offsetX - this.box.left) / (this.box.right - this.box.left);
      const at = history.nearest((1 - Math.min(Math.max(part, 0), 1)) * history.seconds);
      if (!at) return;
      setText(this.now.read, `${format(at.values[read])} at ${at.time}`);
      setText(this.now.write, `${format(at.values[write])} at ${at.time}`);
    };
    this.svg.onpointerleave = () => {
      setText(this.now.read, format(history.now(series, read)));
      setText(this.now.write, format(history.now(series, write)));
    };
  }
}

/** Plots of these kinds, and their row. */
export function plotRow(kinds) {
  const plots = kinds.map((kind) => new Plot(kind));
  return { plots, element: h("div", { class: "plot-row" }, plots.map((plot) => plot.element)) };
}

/** IOPS, bandwidth and mean latency of one series, with the newest numbers as a table. */
export class Plots {
  constructor() {
    const { plots, element } = plotRow(KINDS);
    this.plots = plots;
    this.caption = h("caption", { class: "visually-hidden" });
    this.cells = new Map();
    const heads = ["", "IOPS", "Bandwidth", "Mean latency", "Mean size"];
    const rows = ["Reads", "Writes"].map((name) => h("tr", null, h("th", { scope: "row" }, name), heads.slice(1).map((head) => {
      const cell = h("td", { class: "number" }, "–");
      this.cells.set(`${name} ${head}`, cell);
      return cell;
    })));
    this.rest = h("p", { class: "muted" });
    this.element = h("div", { class: "plots" }, element,
      h("details", null, h("summary", null, "Current values"),
        h("div", { class: "table" }, h("table", null, this.caption,
          h("thead", null, h("tr", null, heads.map((head) => (head === "" ? h("td") : h("th", { scope: "col", class: "number" }, head))))),
          h("tbody", null, rows))), this.rest));
  }

  draw(history, series, subject) {
    for (const plot of this.plots) plot.draw(history, series, subject);
    setText(this.caption, `Current traffic of ${subject}`);
    ["Reads", "Writes"].forEach((name, i) => {
      const iops = history.now(series, i);
      const rate = history.now(series, i + 2);
      setText(this.cells.get(`${name} IOPS`), count(iops));
      setText(this.cells.get(`${name} Bandwidth`), bandwidth(rate));
      setText(this.cells.get(`${name} Mean latency`), latency(history.now(series, i + 4)));
      setText(this.cells.get(`${name} Mean size`), iops > 0 ? bytes(rate / iops) : "–");
    });
    setText(this.rest, series ? `In flight: ${count(series.in_flight)}. Errors in total: ${count(series.errors)}.` : "");
  }

  close() {
    for (const plot of this.plots) plot.resize.disconnect();
  }
}

const SPARK = { left: 1, right: 119, top: 2, bottom: 22 };

/** A small plot without a scale, for a table's cell; the number is next to it. */
export function sparkline(cell, history, series, metrics, most, text) {
  if (!cell.spark) {
    const paths = metrics.map((_, i) => svg("path", { class: `line ${i === 0 ? "read" : "write"}` }));
    cell.spark = { paths, value: h("span", { class: "value" }) };
    cell.append(h("span", { class: "spark" }, cell.spark.value, svg("svg", { width: 120, height: 24, "aria-hidden": "true" }, paths)));
  }
  setText(cell.spark.value, text);
  metrics.forEach((metric, i) => setAttribute(cell.spark.paths[i], "d", path(history, series, metric, most || 1, SPARK)));
}
