// Arrays: the list, and the creation of one.

import { post } from "./api.js";
import { flag, operands, option, size } from "./command.js";
import { h, link, links, address } from "./dom.js";
import { bytes, counted, parseBytes, parseCount } from "./format.js";
import { button, freeDepends, freeOf, Message } from "./parts.js";
import { arrayBadge, isExposed, redundancyText } from "./redundancy.js";
import { refreshNow, state } from "./store.js";
import { Table } from "./table.js";

const choice = (value, label = value) => ({ value, label });

/** Ask for a new array; `level` and `members` are proposed. */
export function createArray(message, level = "6", members = []) {
  return message.dialog({
    title: "New array",
    body: [h("p", { class: "warning" }, "The content of the members is lost.")],
    fields: [
      { name: "name", label: "Name" },
      { name: "level", label: "Level", type: "select", value: level, options: [
        choice("1", "1 – mirror"), choice("10", "10 – striped mirrors"), choice("5", "5 – one parity"), choice("6", "6 – two parities"),
        choice("7.3", "7.3 – three parities"), choice("50", "50 – groups of 5"), choice("60", "60 – groups of 6"), choice("70", "70 – groups of 7.3"),
        choice("n+m", "n+m – any number of parities"), choice("0", "0 – no redundancy")] },
      { name: "members", label: "Members", type: "lines", value: members.join("\n"), placeholder: "/dev/sdb\n/dev/sdc", hint: "One path or device specification a line, in the order of their slots." },
      { name: "spares", label: "Spares", type: "lines", isOptional: true, hint: "One a line." },
      { name: "groups", label: "Groups", isOptional: true, parse: parseCount, hint: "For levels 10, 50, 60, 70 and n+m." },
      { name: "parities", label: "Parities", isOptional: true, parse: parseCount, hint: "For level n+m." },
      { name: "copies", label: "Copies", isOptional: true, parse: parseCount, hint: "For level 10." },
      { name: "strip_bytes", label: "Strip", isOptional: true, parse: parseBytes, hint: "Such as 64 KiB. Default: depends on the number of members." },
      { name: "consistency", label: "Consistency", type: "select", value: "", isOptional: true, options: [choice("", "default of the level"), choice("ppl"), choice("bitmap"), choice("none")] },
      { name: "force", label: "Overwrite content of the members", type: "checkbox" },
    ],
    action: "Create the array",
    command: (values) => ["array", "create", option("level", values.level), option("strip", size(values.strip_bytes)), option("consistency", values.consistency),
      ["groups", "parities", "copies"].map((name) => option(name, values[name])), (values.spares ?? []).map((spare) => option("spare", spare)),
      flag("force", values.force), operands(values.name, ...values.members)],
    submit: async (values) => {
      await post("/arrays", values);
      await refreshNow("arrays", "jobs");
      return `The array ${values.name} was created.`;
    },
  });
}

const runningJobs = (array) => state.jobs.filter((job) => job.backing === array.name);

export function openArrays() {
  const message = new Message();
  const table = new Table({
    caption: "Arrays",
    empty: "No arrays yet.",
    key: (array) => array.uuid || array.name,
    columns: [
      { label: "Name", isHeader: true, sort: (array) => array.name, depends: (array) => array.name, nodes: (array) => link(address("arrays", array.name), array.name) },
      { label: "State", sort: (array) => array.state, depends: (array) => [array.state, isExposed(array)], nodes: arrayBadge },
      { label: "Redundancy", isShort: true, sort: (array) => array.redundancy_left ?? -1, text: redundancyText },
      { label: "Level", sort: (array) => array.level ?? "", text: (array) => array.level ?? "–" },
      { label: "Members", text: (array) => `${array.members.filter((member) => member.state === "live").length} of ${array.members.length} live${array.spares.length > 0 ? `, ${counted(array.spares.length, "spare")}` : ""}` },
      { label: "Capacity", isNumber: true, sort: (array) => array.capacity_bytes, text: (array) => bytes(array.capacity_bytes) },
      { label: "Free", isNumber: true, sort: (array) => array.free_bytes ?? -1, depends: freeDepends, nodes: freeOf },
      { label: "Volumes", isNumber: true, sort: (array) => array.volumes.length, text: (array) => String(array.volumes.length) },
      { label: "Exports", depends: (array) => array.exports, nodes: (array) => links("exports", array.exports) },
      { label: "Jobs", text: (array) => runningJobs(array).map((job) => `${job.kind} ${job.total_bytes > 0 ? Math.floor((job.done_bytes / job.total_bytes) * 100) : 0} %`).join(", ") || "–" },
    ],
  });
  return {
    title: "Arrays",
    element: h("div", null, h("div", { class: "toolbar" }, button("New array…", () => createArray(message), { className: "primary" })), message.element, h("div", { class: "panel" }, table.element)),
    update() { table.update(state.arrays); },
    close() { table.close(); },
  };
}
