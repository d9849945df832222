// Events: the live list, newest first.

import { address, h, link } from "./dom.js";
import { time } from "./format.js";
import { find, state } from "./store.js";

const KINDS = ["device", "array", "volume", "group", "export", "job", "daemon"];
const MOST_ROWS = 500; // more is for the log

/** The object of an event, as a link if it has a view and still exists. */
function subject(event) {
  const list = `${event.kind}s`;
  return ["device", "array", "volume", "export"].includes(event.kind) && find(list, event.name) ? link(address(list, event.name), event.name) : event.name;
}

export function openEvents() {
  const boxes = new Map(KINDS.map((kind) => [kind, h("input", { type: "checkbox", checked: true, onchange: () => applyFilter() })]));
  const body = h("tbody");
  const empty = h("p", { class: "muted" }, "No events yet.");
  const table = h("table", null, h("caption", { class: "visually-hidden" }, "Events, the newest first"),
    h("thead", null, h("tr", null, ["Time", "Kind", "Name", "Event", "Text"].map((head) => h("th", { scope: "col" }, head)))), body);
  let newest = 0;
  let since_ns = null;

  const isShown = (kind) => boxes.get(kind)?.checked ?? true;
  const row = (event) => {
    const element = h("tr", { hidden: !isShown(event.kind) }, h("td", { class: "numbers" }, h("time", { datetime: new Date(event.at_ns / 1e6).toISOString() }, time(event.at_ns))),
      h("td", null, event.kind), h("td", null, subject(event)), h("td", null, event.what), h("td", null, event.text));
    element.kind = event.kind;
    return element;
  };
  const applyFilter = () => {
    for (const element of body.children) element.hidden = !isShown(element.kind);
  };

  return {
    title: "Events",
    element: h("div", null,
      h("fieldset", { class: "filter" }, h("legend", null, "Show events about"), KINDS.map((kind) => h("label", null, boxes.get(kind), ` ${kind}`))),
      h("div", { class: "table", role: "log", "aria-label": "Events", "aria-relevant": "additions" }, table, empty)),
    update() {
      // A restarted daemon counts its events from 1.
      if (state.eventsSince_ns !== since_ns) {
        body.replaceChildren();
        newest = 0;
        since_ns = state.eventsSince_ns;
      }
      const fresh = state.events.filter((event) => event.id > newest).slice(0, MOST_ROWS);
      body.prepend(...fresh.map(row));
      while (body.children.length > MOST_ROWS) body.lastElementChild.remove();
      newest = state.events[0]?.id ?? 0;
      empty.hidden = newest > 0;
      table.hidden = newest === 0;
    },
  };
}
