// Dialogs: forms with labels, hints and errors next to the fields, and confirmations that name the loss.
//
// A native modal <dialog> keeps the focus inside, closes with Escape and gives the focus back.

import { ApiError } from "./api.js";
import { commandLine } from "./command.js";
import { copy } from "./copy.js";
import { h, newId } from "./dom.js";

/** The text of an error. */
export function explain(error) {
  if (error instanceof ApiError) return error.message;
  console.error(error);
  return `The page failed: ${error.message}`;
}

/** A field's input, its label, hint and error. `read` returns the value or throws what is wrong with it. */
class Field {
  constructor(field) {
    this.field = field;
    this.id = newId("field");
    this.error = h("p", { class: "error", id: `${this.id}-error`, hidden: true });
    this.input = this.makeInput();
    const hint = field.hint ? h("p", { class: "hint", id: `${this.id}-hint` }, field.hint) : null;
    if (hint) this.describe(hint.id);
    const label = h("label", { for: this.id }, field.label, field.isOptional ? h("span", { class: "muted" }, " (optional)") : null);
    this.element = field.type === "checkbox"
      ? h("div", { class: "field checkbox" }, h("div", null, this.input, " ", label), hint, this.error)
      : h("div", { class: "field" }, label, this.input, hint, this.error, this.list);
  }

  makeInput() {
    const { type, value, options, placeholder } = this.field;
    const common = { id: this.id, name: this.field.name };
    if (type === "checkbox") return h("input", { ...common, type: "checkbox", checked: value });
    if (type === "select") {
      return h("select", common, options.map((option) => h("option", { value: option.value, selected: option.value === value }, option.label)));
    }
    if (type === "lines") {
      const area = h("textarea", { ...common, rows: 4, spellcheck: "false", placeholder });
      area.value = value ?? "";
      return area;
    }
    if (options) {
      this.list = h("datalist", { id: `${this.id}-list` }, options.map((option) => h("option", { value: option })));
      common.list = this.list.id;
    }
    return h("input", { ...common, type: "text", value, autocomplete: "off", autocapitalize: "none", spellcheck: "false", placeholder });
  }

  describe(id) {
    const all = new Set((this.input.getAttribute("aria-describedby") ?? "").split(" ").filter(Boolean)).add(id);
    this.input.setAttribute("aria-describedby", [...all].join(" "));
  }

  refuse(text) {
    this.error.textContent = text;
    this.error.hidden = false;
    this.input.setAttribute("aria-invalid", "true");
    this.describe(this.error.id);
  }

  accept() {
    this.error.hidden = true;
    this.input.removeAttribute("aria-invalid");
  }

  /** The value: a boolean, a text or a list of lines, or what `parse` makes of it; undefined for an optional field left empty. */
  read() {
    const { type, label, isOptional, parse } = this.field;
    if (type === "checkbox") return this.input.checked;
    const text = this.input.value.trim();
    if (text === "") {
      if (isOptional) return undefined;
      throw new Error(`${label}: a value is required`);
    }
    const value = type === "lines" ? text.split("\n").map((line) => line.trim()).filter(Boolean) : text;
    return parse ? parse(value) : value;
  }
}

/** Limits as a table of inputs: six rates, each a second and at once. */
class QosField {
  constructor(field, rates) {
    this.field = field;
    this.inputs = new Map();
    this.error = h("p", { class: "error", id: newId("error"), hidden: true });
    this.rates = rates;
    const cell = (rate, part, what) => {
      const value = field.value?.[rate.name]?.[part];
      const input = h("input", { type: "text", "aria-label": `${rate.label}, ${what}`, value: value ? rate.edit(value) : "", autocomplete: "off", inputmode: rate.isBytes ? null : "numeric" });
      this.inputs.set(`${rate.name} ${part}`, input);
      return h("td", null, input);
    };
    this.element = h("fieldset", { class: "qos" }, h("legend", null, field.label),
      h("p", { class: "hint" }, "Empty: no limit. Bandwidths are bytes, such as 100 MiB. A burst is allowed at once, after a pause."),
      h("table", null, h("caption", { class: "visually-hidden" }, field.label),
        h("thead", null, h("tr", null, ["Limit", "A second", "Burst"].map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", null, rates.map((rate) => h("tr", null, h("th", { scope: "row" }, rate.label), cell(rate, "per_s", "a second"), cell(rate, "burst", "burst"))))),
      this.error);
    this.input = this.inputs.values().next().value;
  }

  refuse(text) {
    this.error.textContent = text;
    this.error.hidden = false;
    this.input.setAttribute("aria-invalid", "true");
    this.input.setAttribute("aria-describedby", this.error.id);
  }

  accept() {
    this.error.hidden = true;
    for (const input of this.inputs.values()) input.removeAttribute("aria-invalid");
  }

  read() {
    const qos = {};
    for (const rate of this.rates) {
      const parts = ["per_s", "burst"].map((part) => {
        const input = this.inputs.get(`${rate.name} ${part}`);
        this.input = input; // where the error is shown, should there be one
        return input.value.trim() === "" ? 0 : rate.parse(input.value);
      });
      if (parts[0] === 0 && parts[1] > 0) throw new Error(`${rate.label}: a burst needs a rate`);
      if (parts[0] > 0) qos[rate.name] = { per_s: parts[0], burst: parts[1] };
    }
    return qos;
  }
}

/** A button that copies the command which does the same as the dialog, and shows it. `make` returns its arguments, or null. */
class CommandCopier {
  constructor(make) {
    this.make = make;
    this.code = h("code");
    this.box = h("pre", { tabindex: 0, role: "region", "aria-label": "Command", hidden: true }, this.code);
    this.said = h("p", { class: "hint", role: "status" });
    this.button = h("button", { type: "button", class: "aside", onclick: () => this.show() }, "Copy as command");
  }

  /** The values differ from those of the command that is shown. */
  clear() {
    this.box.hidden = true;
    this.said.textContent = "";
  }

  async show() {
    const args = this.make();
    if (!args) return;
    const { text, isWithoutSecret } = commandLine(args);
    this.code.textContent = text;
    this.box.hidden = false;
    const { report } = await copy(this.code);
    this.said.textContent = `${report}${isWithoutSecret ? " Replace *** by the secret." : ""}`;
  }
}

function make(field) {
  if (field.type === "qos") return new QosField(field, field.rates);
  return new Field(field);
}

/**
 * Open a form in a dialog. `fields` are as Field takes them; `body` is shown above them; `submit` gets the values by name
 * and may throw, which is shown in the dialog. `command` gets the same and returns the arguments of `freestone` that do it.
 * `typed` is a name that must be typed first. Resolves when it is closed: true when it was submitted.
 */
export function openDialog({ title, body = [], fields = [], action, isDangerous = false, typed, command, submit }) {
  const all = typed === undefined ? fields : [...fields, {
    name: "typed", label: `Type “${typed}” to confirm`,
    parse: (text) => { if (text !== typed.trim()) throw new Error(`The text differs from “${typed}”`); },
  }];
  const made = all.map(make);
  const heading = h("h2", { id: newId("dialog") }, title);
  const alert = h("p", { class: "error", role: "alert" });
  const go = h("button", { type: "submit", class: isDangerous ? "danger" : "primary" }, action);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const copier = new CommandCopier(() => {
    const values = read(made.slice(0, fields.length)); // the command asks for its own confirmation
    return values && command(values);
  });
  const form = h("form", { novalidate: true }, body, made.map((field) => field.element), alert, copier.box, copier.said,
    h("div", { class: "buttons" }, command ? copier.button : null, cancel, go));
  const dialog = h("dialog", { "aria-labelledby": heading.id }, heading, form);

  const read = (asked = made) => {
    const values = {};
    let wrong = null;
    for (const field of asked) {
      field.accept();
      try {
        values[field.field.name] = field.read();
      } catch (error) {
        field.refuse(error.message);
        wrong ??= field;
      }
    }
    wrong?.input.focus();
    return wrong ? null : values;
  };

  form.addEventListener("input", () => copier.clear());

  return new Promise((resolve) => {
    let isDone = false;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (go.getAttribute("aria-disabled")) return;
      alert.textContent = "";
      const values = read();
      if (!values) return;
      go.setAttribute("aria-disabled", "true");
      try {
        await submit(values);
        isDone = true;
        dialog.close();
      } catch (error) {
        alert.textContent = explain(error);
      } finally {
        go.removeAttribute("aria-disabled");
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(isDone);
    });
    document.body.append(dialog);
    dialog.showModal();
    // Nothing dangerous may be one blind Enter away.
    (made[0]?.input ?? (isDangerous ? cancel : go)).focus();
  });
}

/** Ask for the API's token. Resolves with it; there is no way around. */
export function askForToken(wasRefused) {
  const id = newId("token");
  const input = h("input", { type: "password", id, autocomplete: "current-password", required: true, "aria-describedby": `${id}-hint` });
  const heading = h("h2", { id: `${id}-title` }, "Token required");
  const form = h("form", null,
    wasRefused ? h("p", { class: "error", role: "alert" }, "The daemon does not accept this token.") : null,
    h("div", { class: "field" }, h("label", { for: id }, "Token"), input,
      h("p", { class: "hint", id: `${id}-hint` }, "A token from the file of --tokens (freestoned token makes one). The page keeps it until this tab is closed.")),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Continue")));
  const dialog = h("dialog", { "aria-labelledby": heading.id, class: "token" }, heading, form);
  return new Promise((resolve) => {
    const again = () => dialog.showModal(); // Escape does not help: nothing can be shown without a token
    dialog.addEventListener("close", again);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.removeEventListener("close", again);
      dialog.close();
      dialog.remove();
      resolve(input.value.trim());
    });
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
}
