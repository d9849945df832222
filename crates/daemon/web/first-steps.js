// First steps: from the disks of the host to an export, as cards with the commands of each step.
//
// A step is done when its objects exist. Its command has the names of those before it, or of the commands before it.

import { get } from "./api.js";
import { commandLine, operands, option } from "./command.js";
import { copyableCommand } from "./copy.js";
import { explain } from "./dialog.js";
import { badge, h, newId, setText } from "./dom.js";
import { bytes, isKnown, some } from "./format.js";
import { driveName } from "./drive.js";
import { button, section } from "./parts.js";
import { bases, state } from "./store.js";
import { createArray } from "./view-arrays.js";
import { createDevice } from "./view-devices.js";
import { createExport } from "./view-exports.js";
import { createVolume } from "./volume-actions.js";

// Names in commands for objects that do not exist yet, and a size to begin with.
const DEVICE = "disk1";
const ARRAY = "data";
const VOLUME = "vm1";
const SIZE = "10G";
const KIND = "vhost-user-blk";
// The level that is proposed for so many disks: mirror, one parity, two parities.
const LEVELS = { 2: "1", 3: "5" };
const levelFor = (n) => LEVELS[n] ?? "6";

/** The use of a disk in words. */
const useOf = (disk) => [disk.read_only ? "read-only" : null, ...disk.uses.map((use) => use.text)].filter(isKnown).join("; ");

/** A step: a title, whether it is done, a sentence, a command to copy, and buttons. */
class Card {
  constructor(title, content, ...buttons) {
    this.done = h("span");
    this.text = h("p");
    this.command = h("div");
    this.buttons = buttons;
    this.title = title;
    this.element = h("li", null, h("h3", null, title, " ", this.done), this.text, content, this.command, h("div", { class: "buttons" }, buttons));
  }

  /** `args` are those of the command; without them the text says what is missing. */
  update({ isDone, isNext, text, args, isReady = true }) {
    if (isDone !== this.isDone) this.done.replaceChildren(...(isDone ? [badge("done", "good")] : []));
    this.isDone = isDone;
    if (isNext) this.element.setAttribute("aria-current", "step");
    else this.element.removeAttribute("aria-current");
    setText(this.text, text);
    for (const item of this.buttons) item.disabled = !isReady;
    const line = args && !isDone ? commandLine(args).text : "";
    if (line === this.line) return;
    this.line = line;
    this.command.replaceChildren(...(line ? copyableCommand(line, `to ${this.title.toLowerCase()}`).flat() : []));
  }
}

/** The disks of the host as checkboxes; those in use are disabled and say why. */
class DiskList {
  constructor(onChange) {
    this.onChange = onChange;
    this.chosen = new Set();
    this.list = h("ul", { class: "disks" });
    this.said = h("p", { role: "status", class: "muted" }, "Looking for disks…");
    this.alert = h("p", { role: "alert", class: "error" });
    this.element = h("fieldset", { class: "disks" }, h("legend", null, "Disks of this host"), this.list, this.said, this.alert);
  }

  /** The paths of the chosen disks, in the order of the list. */
  paths() {
    return (this.disks ?? []).map((disk) => disk.path).filter((path) => this.chosen.has(path));
  }

  async load() {
    try {
      this.show(await get("/disks"));
      setText(this.alert, "");
    } catch (error) {
      setText(this.said, "");
      setText(this.alert, explain(error));
    }
  }

  show(disks) {
    const signature = JSON.stringify(disks);
    if (signature === this.signature) return;
    this.signature = signature;
    this.disks = disks;
    const free = disks.filter((disk) => disk.is_free).map((disk) => disk.path);
    this.chosen = new Set(free.filter((path) => this.chosen.has(path)));
    const focused = this.list.contains(document.activeElement) ? document.activeElement.value : null;
    this.list.replaceChildren(...disks.map((disk) => this.item(disk)));
    if (focused !== null) [...this.list.querySelectorAll("input")].find((input) => input.value === focused)?.focus();
    setText(this.said, disks.length === 0 ? "This host shows no disks. A device may also be a file or a remote disk." : `${free.length} of ${disks.length} free.`);
    this.onChange();
  }

  item(disk) {
    const id = newId("disk");
    const toggle = ({ target }) => {
      if (target.checked) this.chosen.add(disk.path);
      else this.chosen.delete(disk.path);
      this.onChange();
    };
    const input = h("input", { type: "checkbox", id, value: disk.path, checked: this.chosen.has(disk.path), disabled: !disk.is_free, onchange: toggle });
    const facts = [bytes(disk.size_bytes), disk.transport, driveName(disk)].filter((fact) => isKnown(fact) && fact !== "").join(", ");
    return h("li", { class: disk.is_free ? null : "muted" }, input, " ",
      h("label", { for: id, title: disk.path }, h("strong", null, disk.name), ` ${facts}`, disk.is_free ? null : `: ${useOf(disk)}`));
  }
}

/** The cards of a daemon on which a step is missing. `message` reports what their dialogs did. */
export class FirstSteps {
  constructor(message) {
    this.isShown = false;
    this.disks = new DiskList(() => this.draw());
    const paths = () => this.disks.paths();
    this.cards = [
      new Card("Choose disks", this.disks.element, button("Look again", () => this.disks.load())),
      new Card("Create an array or device", null, button("New array…", () => createArray(message, levelFor(paths().length), paths())), button("New device…", () => createDevice(message, paths()[0]))),
      new Card("Create a volume", null, button("New volume…", () => createVolume(message, bases()[0]?.name))),
      new Card("Export the volume", null, button("New export…", () => createExport(message, state.volumes[0]?.name))),
    ];
    this.element = section("First steps", h("ol", { class: "cards" }, this.cards.map((card) => card.element)), message.element);
    this.element.hidden = true;
  }

  /** The cards appear with a daemon that exports nothing, and stay while the view is open. */
  update() {
    this.isShown ||= state.exports.length === 0;
    this.element.hidden = !this.isShown;
    if (!this.isShown) return;
    const names = JSON.stringify(bases().map((base) => base.name));
    if (names !== this.names) this.disks.load();
    this.names = names;
    this.draw();
  }

  draw() {
    const paths = this.disks.paths();
    const isMade = [bases().length > 0 || paths.length > 0, bases().length > 0, state.volumes.length > 0, state.exports.length > 0];
    const next = isMade.indexOf(false);
    const steps = [this.choice(), this.creation(paths), this.volume(paths), this.export()];
    steps.forEach((step, i) => this.cards[i].update({ isDone: isMade[i], isNext: i === next, ...step }));
  }

  choice() {
    return { text: "Tick the disks that volumes are to lie on. Their content is lost. A disk in use cannot be chosen.", args: ["disks"] };
  }

  creation(paths) {
    if (bases().length > 0) return { text: `${some(bases().map((base) => base.name))} can hold volumes.` };
    if (paths.length === 0) return { text: "Tick disks in the first step: one for a device, two for a mirror, three for one parity, four or more for two parities." };
    if (paths.length === 1) return { text: "One disk is a device. Its failure loses the data.", args: ["device", "create", operands(DEVICE, paths[0])] };
    const level = levelFor(paths.length);
    const texts = { 1: "A mirror: one of the two disks may fail.", 5: "One parity: any of the disks may fail.", 6: "Two parities: any two disks may fail." };
    return { text: texts[level], args: ["array", "create", option("level", level), operands(ARRAY, ...paths)] };
  }

  volume(paths) {
    const [base] = bases();
    const on = base?.name ?? (paths.length === 1 ? DEVICE : ARRAY);
    return { text: "A volume is a disk for a virtual machine or a host.", args: ["volume", "create", option("backing", on), option("size", SIZE), operands(VOLUME)], isReady: base !== undefined };
  }

  export() {
    const volume = state.volumes[0]?.name;
    return { text: "Clients attach to an export: vhost-user-blk for virtual machines of this host, nvme-tcp or nbd for other hosts.", isReady: volume !== undefined,
      args: ["export", "create", option("kind", KIND), option("of", volume ?? VOLUME), operands(volume ?? VOLUME)] };
  }
}
