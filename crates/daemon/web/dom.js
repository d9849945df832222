// Elements from code. Text from the daemon only ever becomes text nodes and attribute values, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element; `onclick` and the like are listeners, absent values no attributes. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Set the text if it differs: unchanged text costs no layout, and no announcement. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set the attribute if it differs. */
export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Text for screen readers only. */
export function hidden(text) {
  return h("span", { class: "visually-hidden" }, text);
}

let lastId = 0;

/** An id for `for` and `aria-…`. */
export function newId(prefix) {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

/** The sign of each look. */
export const SIGNS = { good: "✓", warn: "!", bad: "✕", idle: "–" };
const LOOKS = {
  optimal: "good", live: "good", active: "good", open: "good",
  degraded: "warn", rebuilding: "warn", waiting: "warn", paused: "warn", missing: "bad", failing: "bad",
  failed: "bad", offline: "bad", "not open": "bad", spare: "idle",
};

/** How a state looks: `good`, `warn`, `bad` or `idle`. An unknown state is not `good`. */
export function look(state) {
  return LOOKS[state] ?? "warn";
}

/** A state as sign and word: states never differ by colour alone. */
export function badge(state, looks = look(state)) {
  return h("span", { class: `badge ${looks}` }, h("span", { "aria-hidden": "true" }, SIGNS[looks]), ` ${state}`);
}

/** A link to a view. */
export function link(href, text, attributes) {
  return h("a", { href, ...attributes }, text);
}

/** Links to objects, set apart by commas; a dash for none. */
export function links(kind, names) {
  if (names.length === 0) return [h("span", { class: "muted" }, "–")];
  return names.flatMap((name, i) => [i > 0 ? ", " : null, link(address(kind, name), name)]);
}

/** The first of many objects as links, and the number of the others. */
export function someLinks(kind, names, most = 20) {
  return links(kind, names.slice(0, most)).concat(names.length > most ? ` and ${names.length - most} more` : "");
}

/** The address of an object on this page: `arrays`, `volumes`, `exports` or `devices`, and its name. */
export function address(kind, name) {
  return `#/${kind}/${encodeURIComponent(name)}`;
}
