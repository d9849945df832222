// Actions of an object: the likely one as a button, the others in a menu (the WAI-ARIA menu button), the dangerous ones last.
//
// The menu is a popover: it lies above tables that scroll, and closes with Escape or a click elsewhere.

import { h, hidden, newId } from "./dom.js";
import { button } from "./parts.js";

/** Puts the open menu next to its button: below it, or above it near the end of the window. */
function place(list, opener) {
  const at = opener.getBoundingClientRect();
  const isLow = at.bottom > innerHeight * 0.65;
  const isRight = at.left > innerWidth / 2;
  Object.assign(list.style, {
    top: isLow ? "auto" : `${at.bottom + 2}px`, bottom: isLow ? `${innerHeight - at.top + 2}px` : "auto",
    left: isRight ? "auto" : `${at.left}px`, right: isRight ? `${document.documentElement.clientWidth - at.right}px` : "auto",
  });
}

/** A button that opens a menu of `groups`, lists of {label, run, isDangerous}; `of` names the object. */
export function menu(of, groups) {
  const id = newId("menu");
  const items = [];
  const item = ({ label, run, isDangerous }) => {
    const entry = h("button", { type: "button", role: "menuitem", tabindex: -1, class: isDangerous ? "danger" : null, onclick: () => choose(run) }, label);
    items.push(entry);
    return h("li", { role: "none" }, entry);
  };
  const filled = groups.filter((group) => group.length > 0);
  const opener = h("button", { type: "button", id: `${id}-button`, popovertarget: id, "aria-haspopup": "menu", "aria-expanded": "false" },
    "More", hidden(` actions of ${of}`), h("span", { "aria-hidden": "true" }, " ▾"));
  const list = h("ul", { id, role: "menu", popover: "auto", "aria-labelledby": opener.id },
    filled.map((group, i) => [i > 0 ? h("li", { role: "separator" }) : null, group.map(item)]));

  let first = 0; // the item that gets the focus
  const close = () => list.hidePopover();
  const open = (at) => {
    first = at;
    list.showPopover();
  };
  const choose = (run) => {
    close();
    opener.focus(); // a dialog gives the focus back to it
    run();
  };
  const move = (at) => items[(at + items.length) % items.length].focus();
  const moves = { ArrowDown: (at) => at + 1, ArrowUp: (at) => at - 1, Home: () => 0, End: () => items.length - 1 };

  list.addEventListener("beforetoggle", ({ newState }) => {
    opener.setAttribute("aria-expanded", String(newState === "open"));
    if (newState === "open") place(list, opener);
  });
  list.addEventListener("toggle", ({ newState }) => {
    if (newState !== "open") {
      first = 0;
      return;
    }
    move(first);
    addEventListener("scroll", close, { capture: true, once: true }); // it does not follow its button
  });
  opener.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    open(event.key === "ArrowDown" ? 0 : -1);
  });
  list.addEventListener("keydown", (event) => {
    const at = items.indexOf(document.activeElement);
    if (moves[event.key]) {
      event.preventDefault();
      move(moves[event.key](at));
    } else if (event.key === "Escape" || event.key === "Tab") {
      // The focus goes back to the button; Tab leads on from there.
      if (event.key === "Escape") event.preventDefault();
      close();
      opener.focus();
    } else if (event.key.length === 1) {
      const starts = (entry) => entry.textContent.toLowerCase().startsWith(event.key.toLowerCase());
      const next = items.findIndex((entry, i) => i > at && starts(entry));
      const found = next >= 0 ? next : items.findIndex(starts);
      if (found >= 0) move(found);
    }
  });
  return [opener, list];
}

/** The first action that is not dangerous as a button, the others as a menu. */
function arranged(of, all, options) {
  const [first, ...others] = all.filter((action) => !action.isDangerous);
  const dangerous = all.filter((action) => action.isDangerous);
  return [
    first ? button(first.label, first.run, options) : null,
    others.length + dangerous.length > 0 ? menu(of, [others, dangerous]) : null,
  ].flat().filter((node) => node !== null);
}

/** The actions of the view's object, {label, run, isDangerous}; the likely one first. */
export class Toolbar {
  constructor(of) {
    this.of = of;
    this.element = h("div", { class: "toolbar", role: "group", "aria-label": `Actions of ${of}` });
    this.labels = null;
  }

  update(all) {
    const labels = all.map((action) => action.label).join();
    if (labels === this.labels) return;
    this.labels = labels;
    const isFocused = this.element.contains(document.activeElement);
    this.element.replaceChildren(...arranged(this.of, all, { className: "primary" }));
    if (isFocused) this.element.querySelector("button").focus();
  }
}

/** The actions of a row's object, whose name is a part of each button's name. */
export function rowActions(of, all) {
  return h("div", { class: "buttons" }, arranged(of, all, { of }));
}
