// One array: its state, members, their traffic, jobs and actions.

import { remove, segment } from "./api.js";
import { flag, operands, option, size } from "./command.js";
import { copyable } from "./copy.js";
import { DayPlots } from "./day.js";
import { badge, h, links, newId, setText, someLinks } from "./dom.js";
import { driveColumns, driveName, setDrive } from "./drive.js";
import { bandwidth, bytes, count, counted, latency, parseBytes, some, time } from "./format.js";
import { Toolbar, rowActions } from "./menu.js";
import { act, button, freeDepends, freeOf, JobList, Message, section } from "./parts.js";
import { peak, Plots, sparkline } from "./plots.js";
import { arrayBadge, isExposed, redundancyText } from "./redundancy.js";
import { find, history, refreshNow, volumesOn } from "./store.js";
import { Facts, Table } from "./table.js";

const isLive = (member) => member.state === "live";
const called = (member) => `slot ${member.slot}${member.device ? ` (${member.device})` : ""}`;

/** The effect of failing a member. With several groups it is the worst case: all failures in one of them. */
function afterFailing(array, member) {
  if (!isLive(member)) return "It is not in sync: its rebuild starts again from the beginning.";
  const spare = (array.redundancy_left ?? 0) - 1;
  if (spare < 0) {
    const volumes = array.volumes.length > 0 ? ` Volumes: ${some(array.volumes)}.` : "";
    const when = array.groups > 1 ? " unless the member is of a group without a failed member" : "";
    return `The array has no redundancy left: it fails, and its data becomes unavailable${when}.${volumes}`;
  }
  const where = array.groups > 1 ? " of the same group" : "";
  return `Its content is computed from the others. ${spare === 0 ? `No further member${where} may fail` : `${counted(spare, "further member")}${where} may fail`} until it is rebuilt.`;
}

class ArrayView {
  constructor(name) {
    this.name = name;
    this.title = `Array ${name}`;
    this.message = new Message();
    this.memberMessage = new Message();
    this.toolbar = new Toolbar(name);
    this.facts = new Facts("Array");
    this.error = h("p", { class: "error", hidden: true });
    this.jobs = new JobList(name);
    this.table = this.memberTable();
    this.sparesList = h("ul", { class: "plain" });
    this.traffic = this.trafficTable();
    this.select = h("select", { id: newId("select"), onchange: () => this.chooseMember() });
    this.detail = h("div", { class: "panel" });
    this.plots = new Plots();
    this.day = new DayPlots(`arrays/${name}`, name);
    this.whole = h("option", { value: "" }, `array ${name}`);
    this.historyOf = h("select", { id: newId("select"), onchange: () => this.chooseHistory() }, this.whole);
    this.element = h("div", null, this.error, h("div", { class: "panel" }, this.facts.element), this.toolbar.element, this.message.element,
      section("Members", this.table.element, this.memberMessage.element, h("h3", null, "Spares"), this.sparesList),
      section("Jobs", this.jobs.element),
      section("Member activity", this.traffic.element, h("p", { class: "choice" }, h("label", { for: this.select.id }, "Plots of"), " ", this.select), this.plots.element, this.detail),
      section("History", h("p", { class: "choice" }, h("label", { for: this.historyOf.id }, "History of"), " ", this.historyOf), this.day.element));
  }

  get array() { return find("arrays", this.name); }

  /** The actions of the array. The likely one is to replace what is missing, and else to check what is there. */
  actions(array) {
    const spare = { label: "Add spare…", run: () => this.addSpare() };
    const scrub = { label: "Scrub…", run: () => this.scrub() };
    const likely = array.members.every(isLive) && array.spares.length > 0 ? [scrub, spare] : [spare, scrub];
    return [...likely, { label: "Re-add…", run: () => this.reAdd() }, { label: "Grow…", run: () => this.grow() },
      { label: "Remove failed…", run: () => this.removeMembers(null), isDangerous: true }, { label: "Delete…", run: () => this.delete(), isDangerous: true }];
  }

  memberTable() {
    return new Table({
      caption: `Members of ${this.name}`,
      empty: "No members.",
      key: (member) => member.slot,
      columns: [
        { label: "Slot", isHeader: true, isNumber: true, text: (member) => String(member.slot) },
        { label: "State", depends: (member) => member.state, nodes: (member) => badge(member.state) },
        { label: "Device", text: (member) => member.device ?? "–" },
        { label: "Reason", text: (member) => member.reason ?? "–" },
        ...driveColumns(),
        { label: "Actions", depends: (member) => [member.state, member.uuid, member.device], nodes: (member) => rowActions(`slot ${member.slot}`, this.memberActions(member)) },
      ],
    });
  }

  memberActions(member) {
    const fail = { label: "Fail…", run: () => this.fail(member), isDangerous: true };
    if (isLive(member)) return [{ label: "Replace…", run: () => this.replace(member) }, fail];
    if (member.state !== "missing") return [fail];
    if (!member.uuid) return [];
    return [{ label: "Re-add…", run: () => this.reAdd(member) }, { label: "Remove…", run: () => this.removeMembers(member), isDangerous: true }];
  }

  trafficTable() {
    const series = (member) => history.members.get(`${this.name}/${member.slot}`);
    const spark = (label, metrics, value) => ({
      label, isNumber: true,
      live: (member, cell) => sparkline(cell, history, series(member), metrics, this.peaks[metrics[0]], value(series(member))),
    });
    return new Table({
      caption: `Activity of the members of ${this.name}. Plots in a column share a scale; reads are solid, writes dashed.`,
      isCaptionHidden: false,
      empty: "No members.",
      key: (member) => member.slot,
      columns: [
        { label: "Slot", isHeader: true, isNumber: true, text: (member) => String(member.slot) },
        { label: "Device", text: (member) => member.device ?? "–" },
        spark("IOPS", [0, 1], (of) => count(history.together(of, 0))),
        spark("Bandwidth", [2, 3], (of) => bandwidth(history.together(of, 2))),
        spark("Mean latency, read / write", [4, 5], (of) => `${latency(history.now(of, 4))} / ${latency(history.now(of, 5))}`),
        { label: "In flight", isNumber: true, live: (member, cell) => setText(cell, count(series(member)?.in_flight)) },
        { label: "Errors", isNumber: true, live: (member, cell) => setText(cell, count(series(member)?.errors)) },
      ],
    });
  }

  update() {
    const array = this.array;
    if (!array) return;
    this.error.hidden = !array.error;
    setText(this.error, array.error ?? "");
    this.toolbar.update(this.actions(array));
    this.updateFacts(array);
    this.table.update(array.members);
    this.jobs.update();
    this.updateSpares(array);
    this.updateSelect(array);
    this.updateDetail();
    this.measurePeaks();
    this.traffic.update(array.members);
  }

  updateFacts(array) {
    const { facts } = this;
    facts.set("State", arrayBadge(array), [array.state, isExposed(array)]);
    facts.set("Redundancy", redundancyText(array));
    facts.set("Level", array.level ?? "–");
    facts.set("Capacity", bytes(array.capacity_bytes));
    facts.set("Free for volumes", freeOf(array), freeDepends(array));
    facts.set("Shape", shapeText(array));
    facts.set("After a crash", CONSISTENCY[array.consistency] ?? "–");
    facts.set("Scrub", scrubText(array.scrub));
    facts.set("Last scrub", array.last_scrub_ns ? time(array.last_scrub_ns) : "never");
    facts.set("Next scrub", nextScrubText(array));
    facts.set("Volumes", someLinks("volumes", array.volumes), array.volumes);
    facts.set("Exported directly", links("exports", array.exports), array.exports);
    facts.set("UUID", array.uuid);
  }

  updateSpares(array) {
    const signature = JSON.stringify(array.spares.map((spare) => [spare.device, driveName(spare.drive)]));
    if (this.sparesList.signature === signature) return;
    this.sparesList.signature = signature;
    this.sparesList.replaceChildren(...(array.spares.length === 0 ? [h("li", { class: "muted" }, "None. A failed member is not replaced automatically.")]
      : array.spares.map((spare) => h("li", null, badge("spare"), ` ${spare.device ?? "missing"} `, driveName(spare.drive) ? `(${driveName(spare.drive)}) ` : null,
        spare.device ? button("Remove…", () => this.removeSpare(spare), { of: `spare ${spare.device}` }) : null))));
  }

  updateSelect(array) {
    const signature = JSON.stringify(array.members.map(called));
    if (this.select.signature === signature) return;
    this.select.signature = signature;
    const chosen = [this.select.value, this.historyOf.value];
    const options = () => array.members.map((member) => h("option", { value: String(member.slot) }, called(member)));
    this.select.replaceChildren(...options());
    this.historyOf.replaceChildren(this.whole, ...options());
    if (chosen[0]) this.select.value = chosen[0];
    this.historyOf.value = chosen[1];
  }

  chooseHistory() {
    const slot = this.historyOf.value;
    if (slot === "") this.day.show(`arrays/${this.name}`, this.name);
    else this.day.show(`members/${this.name}/${slot}`, `slot ${slot} of ${this.name}`);
  }

  chooseMember() {
    this.updateDetail();
    this.sample();
  }

  /** The chosen member: what its row has no room for. */
  updateDetail() {
    const member = this.array?.members.find(({ slot }) => String(slot) === this.select.value);
    const signature = JSON.stringify([member?.slot, member?.uuid, member?.device]);
    if (this.detail.signature !== signature) {
      // Another device: values of the former one that it lacks must go.
      this.detail.signature = signature;
      this.details = new Facts(`Slot ${member?.slot}`, { class: "details" });
      this.detail.replaceChildren(member ? this.details.element : "");
    }
    if (!member) return;
    this.details.set("Device", member.device ? copyable(member.device) : "–", member.device);
    this.details.set("UUID", member.uuid ?? "–");
    setDrive(this.details, member.drive);
  }

  /** The largest number of all members: small plots of one column have one scale, so that the odd one out shows. */
  measurePeaks() {
    const all = (this.array?.members ?? []).map((member) => history.members.get(`${this.name}/${member.slot}`));
    this.peaks = [0, 0, 2, 2, 4, 4].map((metric) => Math.max(0, ...all.map((series) => peak(history, series, metric, metric + 1))));
  }

  sample() {
    const slot = this.select.value;
    if (slot === "") return;
    this.measurePeaks();
    this.traffic.sample();
    this.plots.draw(history, history.members.get(`${this.name}/${slot}`), `slot ${slot} of ${this.name}`);
  }

  close() {
    this.table.close();
    this.traffic.close();
    this.plots.close();
    this.day.close();
  }

  fail(member) {
    this.memberMessage.dialog({
      title: `Fail ${called(member)} of ${this.name}?`,
      body: [h("p", null, "The array no longer reads from it or writes to it."), h("p", { class: "warning" }, afterFailing(this.array, member))],
      // The failure that loses data takes more than a click.
      typed: this.array.redundancy_left === 0 ? this.name : undefined, action: "Fail the member", isDangerous: true,
      command: () => ["array", "fail", operands(this.name, String(member.slot))],
      submit: () => act(this.name, { action: "fail", members: [String(member.slot)] }),
    });
  }

  replace(member) {
    this.memberMessage.dialog({
      title: `Replace ${called(member)} of ${this.name}`,
      body: [h("p", null, "It is copied to the device, which then replaces it. The array keeps its redundancy meanwhile.")],
      fields: [{ name: "device", label: "Device", placeholder: "/dev/sdx", hint: "Its content is lost." },
        { name: "force", label: "Overwrite content of the device", type: "checkbox" }],
      action: "Replace the member",
      command: ({ device, force }) => ["array", "replace", option("with", device), flag("force", force), operands(this.name, String(member.slot))],
      submit: ({ device, force }) => act(this.name, { action: "replace", member: String(member.slot), device, force }),
    });
  }

  addSpare() {
    this.message.dialog({
      title: `Add spares to ${this.name}`,
      fields: [{ name: "devices", label: "Devices", type: "lines", placeholder: "/dev/sdx", hint: "One path or device specification a line. Their content is lost. Empty slots get a spare at once." },
        { name: "force", label: "Overwrite content of the devices", type: "checkbox" },
        { name: "global", label: "Spares for every array of the daemon", type: "checkbox" }],
      action: "Add spares",
      command: ({ devices, force, global }) => ["array", "add", flag("force", force), flag("global", global), operands(this.name, ...devices)],
      submit: (values) => act(this.name, { action: "add", ...values }),
    });
  }

  reAdd(member) {
    (member ? this.memberMessage : this.message).dialog({
      title: member ? `Re-add slot ${member.slot} of ${this.name}` : `Re-add members of ${this.name}`,
      body: [h("p", null, "Former members return to their slots. Changes since then are copied.")],
      fields: [{ name: "devices", label: "Devices", type: "lines", value: member?.device ?? "", placeholder: "/dev/sdx", hint: "One path or device specification a line." }],
      action: "Re-add",
      command: ({ devices }) => ["array", "re-add", operands(this.name, ...devices)],
      submit: (values) => act(this.name, { action: "re-add", ...values }),
    });
  }

  removeMembers(member) {
    const out = this.array.members.filter((other) => other.state === "missing" && other.uuid);
    const names = member ? called(member) : some(out.map(called));
    (member ? this.memberMessage : this.message).dialog({
      title: member ? `Remove ${names} of ${this.name}?` : `Remove all failed members of ${this.name}?`,
      body: [h("p", { class: "warning" }, names ? `${names}: detached. A re-add copies only the changes since the failure.` : "No member has failed.")],
      action: "Remove", isDangerous: true,
      command: () => ["array", "remove", operands(this.name, member ? String(member.slot) : "failed")],
      submit: () => act(this.name, { action: "remove", members: [member ? String(member.slot) : "failed"] }),
    });
  }

  removeSpare(spare) {
    this.memberMessage.dialog({
      title: `Remove the spare ${spare.device} of ${this.name}?`,
      body: [h("p", null, "It no longer waits for a member to fail.")],
      action: "Remove", isDangerous: true,
      command: () => ["array", "remove", operands(this.name, spare.device)],
      submit: () => act(this.name, { action: "remove", members: [spare.device] }),
    });
  }

  scrub() {
    this.message.dialog({
      title: `Scrub ${this.name}`,
      body: [h("p", null, "The scrub compares parity or copies with the data, while clients use the array.")],
      fields: [{ name: "repair", label: "Repair: rewrite wrong strips", type: "checkbox" }],
      action: "Scrub",
      command: ({ repair }) => ["array", "scrub", flag("repair", repair), operands(this.name)],
      submit: ({ repair }) => act(this.name, { action: "scrub", repair }),
    });
  }

  grow() {
    this.message.dialog({
      title: `Grow ${this.name}`,
      body: [h("p", null, "The array uses the added room of its members. An array cannot shrink.")],
      fields: [{ name: "member_bytes", label: "Bytes of each member to use at most", isOptional: true, parse: parseBytes, hint: "Such as 4 TiB. Default: all of the smallest member." }],
      action: "Grow",
      command: ({ member_bytes }) => ["array", "grow", option("size", size(member_bytes)), operands(this.name)],
      submit: (values) => act(this.name, { action: "grow", ...values }),
    });
  }

  async delete() {
    const array = this.array;
    const volumes = volumesOn(this.name).map((volume) => volume.name);
    const isDone = await this.message.dialog({
      title: `Delete the array ${this.name}?`,
      body: [h("p", { class: "warning" }, `All data on it is lost: ${bytes(array.capacity_bytes)}${volumes.length > 0 ? `, with ${counted(volumes.length, "volume")}: ${some(volumes)}` : ""}.`)],
      typed: this.name, action: "Delete the array", isDangerous: true,
      command: () => ["array", "delete", operands(this.name)],
      submit: async () => {
        await remove(`/arrays/${segment(this.name)}`);
        return "";
      },
    });
    if (!isDone) return;
    location.hash = "#/arrays";
    await refreshNow("arrays", "devices", "jobs");
  }
}

// The policies, by their effect.
const CONSISTENCY = {
  ppl: "partial parity log (ppl): no data is lost", bitmap: "write-intent bitmap: marked regions are resynced", none: "none: all of it is resynced, if there is redundancy",
};

/** `2 groups of 4 data + 2 parity strips of 128 KiB, blocks of 4 KiB`. */
function shapeText(array) {
  const groups = array.groups > 1 ? `${array.groups} groups of ` : "";
  const spare = array.parity === 0 ? "" : array.level?.startsWith("1") ? ` + ${array.parity} mirrored` : ` + ${array.parity} parity`;
  return `${groups}${array.data} data${spare} strips of ${bytes(array.strip_bytes)}, blocks of ${bytes(array.block_bytes)}`;
}

function scrubText(scrub) {
  if (!scrub) return "not since the start";
  const what = scrub.is_repairing ? "repair" : "check";
  return `${what} ${scrub.is_complete ? "complete" : "not complete"}: ${counted(scrub.stripes, "stripe")} compared, ${count(scrub.mismatched_rows)} mismatched rows, ${count(scrub.unreadable)} unreadable`;
}

function nextScrubText(array) {
  if (!array.scrub_period_s) return "not scheduled";
  if (array.is_scheduled_scrub) return "under way";
  return array.next_scrub_ns ? time(array.next_scrub_ns) : "–";
}

/** The view of an array; nothing if there is none of this name. */
export function openArray(name) {
  return find("arrays", name) ? new ArrayView(name) : null;
}
