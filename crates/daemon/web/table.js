// Tables that change in place: a row has a key, a cell changes only with its content. The focus stays.
//
// Columns: `label`; `text(row)` or `nodes(row)`, the latter with `depends(row)` where the nodes depend on less than the
// whole row; `live(row, cell)` for what changes with each sample, called for rows in sight only; `sort(row)`, a value to
// order by; `isNumber`; `isShort`, not to be broken into lines; `isHeader`, the cell that names the row.

import { h, setText } from "./dom.js";

const ORDER = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") {
    // Unknown values come last, in either direction of a sample's numbers.
    return (Number.isNaN(a) ? -1 : a) - (Number.isNaN(b) ? -1 : b);
  }
  return ORDER.compare(String(a), String(b));
}

export class Table {
  constructor({ caption, columns, key, empty, isCaptionHidden = true }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map(); // by key: {element, cells, data, texts, isInSight}
    this.order = null; // {column, isDescending}
    this.isShown = () => true;
    this.buttons = columns.map((column) => this.headButton(column));
    this.heads = columns.map((column, i) =>
      h("th", { scope: "col", class: column.isNumber ? "number" : null }, this.buttons[i] ?? column.label));
    this.body = h("tbody");
    this.empty = h("p", { class: "muted", hidden: true }, empty);
    this.table = h("table", null,
      h("caption", { class: isCaptionHidden ? "visually-hidden" : null }, caption), h("thead", null, h("tr", null, this.heads)), this.body);
    this.element = h("div", { class: "table" }, this.table, this.empty);
    const isLive = columns.some((column) => column.live);
    this.sight = isLive ? new IntersectionObserver((entries) => this.onSight(entries), { rootMargin: "100px" }) : null;
  }

  headButton(column) {
    if (!column.sort) return null;
    return h("button", { type: "button", class: "sort", onclick: () => this.sortBy(column) }, column.label, h("span", { "aria-hidden": "true", class: "arrow" }));
  }

  /** Show these rows, and no others. */
  update(rows) {
    const gone = new Set(this.rows.keys());
    for (const data of rows) {
      const key = this.key(data);
      gone.delete(key);
      const row = this.rows.get(key) ?? this.addRow(key);
      row.data = data;
      this.columns.forEach((column, i) => this.updateCell(column, row, i));
      row.element.hidden = !this.isShown(data);
    }
    for (const key of gone) this.removeRow(key);
    this.arrange(rows);
    this.empty.hidden = rows.length > 0;
    this.table.hidden = rows.length === 0;
  }

  addRow(key) {
    const cells = this.columns.map((column) =>
      h(column.isHeader ? "th" : "td", { class: column.isNumber ? "number" : column.isShort ? "short" : null, ...(column.isHeader && { scope: "row" }) }));
    const row = { element: h("tr", null, cells), cells, data: null, texts: [], isInSight: false };
    row.element.row = row;
    this.rows.set(key, row);
    this.body.append(row.element);
    this.sight?.observe(row.element);
    return row;
  }

  removeRow(key) {
    const { element } = this.rows.get(key);
    this.sight?.unobserve(element);
    if (element.contains(document.activeElement)) this.focusBeside(element);
    element.remove();
    this.rows.delete(key);
  }

  /** The focused row disappears: its neighbour gets the focus, not the top of the page. */
  focusBeside(element) {
    const beside = element.nextElementSibling ?? element.previousElementSibling;
    (beside?.querySelector("a, button") ?? this.buttons.find((button) => button))?.focus();
  }

  updateCell(column, row, i) {
    if (column.live) return;
    const text = column.text ? column.text(row.data) : JSON.stringify(column.depends ? column.depends(row.data) : row.data);
    if (row.texts[i] === text) return;
    row.texts[i] = text;
    const cell = row.cells[i];
    if (column.text) {
      setText(cell, text);
      return;
    }
    const focused = cell.contains(document.activeElement) ? document.activeElement.textContent : null;
    cell.replaceChildren(...[column.nodes(row.data)].flat(Infinity).filter((node) => node !== null));
    if (focused !== null) {
      const candidates = [...cell.querySelectorAll("a, button:not([role=menuitem])")];
      (candidates.find((candidate) => candidate.textContent === focused) ?? candidates[0] ?? row.element.querySelector("a, button"))?.focus();
    }
  }

  arrange(rows) {
    let sorted = rows;
    if (this.order) {
      const { column, isDescending } = this.order;
      sorted = rows.toSorted((a, b) => (isDescending ? compare(column.sort(b), column.sort(a)) : compare(column.sort(a), column.sort(b))));
    }
    let next = this.body.firstElementChild;
    for (const data of sorted) {
      const { element } = this.rows.get(this.key(data));
      if (element === next) next = next.nextElementSibling;
      else this.body.insertBefore(element, next);
    }
  }

  sortBy(column) {
    const isAgain = this.order?.column === column;
    // Numbers begin with the largest, names with the first.
    this.order = { column, isDescending: isAgain ? !this.order.isDescending : Boolean(column.isNumber) };
    this.columns.forEach((other, i) => {
      if (!other.sort) return;
      const direction = other === column ? (this.order.isDescending ? "descending" : "ascending") : null;
      if (direction) this.heads[i].setAttribute("aria-sort", direction);
      else this.heads[i].removeAttribute("aria-sort");
    });
    this.arrange([...this.rows.values()].map((row) => row.data));
  }

  /** Show only the rows that `isShown` accepts. Returns how many. */
  filter(isShown) {
    this.isShown = isShown;
    let shown = 0;
    for (const row of this.rows.values()) {
      const isRowShown = isShown(row.data);
      if (row.element.hidden === isRowShown) row.element.hidden = !isRowShown;
      shown += isRowShown;
    }
    return shown;
  }

  onSight(entries) {
    for (const { target, isIntersecting } of entries) {
      target.row.isInSight = isIntersecting;
      if (isIntersecting) this.updateLive(target.row);
    }
  }

  updateLive(row) {
    this.columns.forEach((column, i) => column.live?.(row.data, row.cells[i]));
  }

  /** Show new samples. */
  sample() {
    for (const row of this.rows.values()) if (row.isInSight && !row.element.hidden) this.updateLive(row);
  }

  close() {
    this.sight?.disconnect();
  }
}

/** Names and values, updated in place. */
export class Facts {
  constructor(label, attributes = { class: "facts" }) {
    this.element = h("dl", { "aria-label": label, ...attributes });
    this.values = new Map();
  }

  /** `value` is a text or a list of nodes; `depends` says when nodes differ. */
  set(name, value, depends) {
    let entry = this.values.get(name);
    if (!entry) {
      entry = { dd: h("dd"), text: undefined };
      this.values.set(name, entry);
      this.element.append(h("div", null, h("dt", null, name), entry.dd));
    }
    const text = typeof value === "string" ? value : JSON.stringify(depends);
    if (entry.text === text) return;
    entry.text = text;
    entry.dd.replaceChildren(...[value].flat(Infinity).filter((node) => node !== null));
  }
}
