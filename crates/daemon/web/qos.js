// Limits of volumes and groups: their names, how they read and how they are entered.

import { put, remove, segment } from "./api.js";
import { operands, option, size } from "./command.js";
import { h } from "./dom.js";
import { bandwidth, bytes as inBytes, count, editableBytes, parseBytes, parseCount, some } from "./format.js";
import { rowActions } from "./menu.js";
import { refreshNow, state } from "./store.js";
import { Table } from "./table.js";

const requests = { parse: parseCount, edit: String, isBytes: false };
const bytes = { parse: parseBytes, edit: editableBytes, isBytes: true };

/** The limits, as a form's field takes them. */
export const RATES = [
  { name: "iops", label: "IOPS", ...requests },
  { name: "read_iops", label: "Read IOPS", ...requests },
  { name: "write_iops", label: "Write IOPS", ...requests },
  { name: "bandwidth", label: "Bandwidth", ...bytes },
  { name: "read_bandwidth", label: "Read bandwidth", ...bytes },
  { name: "write_bandwidth", label: "Write bandwidth", ...bytes },
];

/** The limits in a line; a dash for none. */
export function qosText(qos) {
  const set = RATES.filter(({ name }) => qos[name]).map(({ name, label, isBytes }) => {
    const { per_s, burst } = qos[name];
    const amount = isBytes ? bandwidth(per_s) : `${count(per_s)}/s`;
    return `${label} ${amount}${burst > 0 ? ` (burst ${isBytes ? inBytes(burst) : count(burst)})` : ""}`;
  });
  return set.join(", ") || "–";
}

/** How much of a volume's request time was waiting for limits, as `History.limited` has it; a dash without a request. */
export function limitedText({ all, ofGroup }) {
  if (Number.isNaN(all)) return "–";
  if (all === 0) return "none in the last minute";
  const percent = Math.round(all * 100);
  const which = ofGroup === 0 ? "" : ofGroup > all / 2 ? ", mostly for the group" : ", partly for the group";
  return `${percent === 0 ? "under 1" : percent} % of the request time of the last minute${which}`;
}

/** The limits as options of the command line: `--iops 500:100`. */
export function limitOptions(qos) {
  return RATES.filter(({ name }) => qos[name]).map(({ name, isBytes }) => {
    const parts = [qos[name].per_s, qos[name].burst].filter((part) => part > 0);
    return option(name.replaceAll("_", "-"), parts.map((part) => (isBytes ? size(part) : part)).join(":"));
  });
}

/** The guaranteed minimum of a volume in its group, in a line; a dash for none. */
export function minText(min) {
  const { requests_per_s: iops, bytes_per_s } = min ?? {};
  return [iops ? `IOPS ${count(iops)}/s` : null, bytes_per_s ? `Bandwidth ${bandwidth(bytes_per_s)}` : null].filter(Boolean).join(", ") || "–";
}

/** The fields of a form for that. */
export function minFields(min) {
  const { requests_per_s: iops, bytes_per_s } = min ?? {};
  const hint = "Guaranteed share of the group's limits, regardless of its other volumes.";
  return [
    { name: "least_iops", label: "Minimum IOPS", value: iops ? String(iops) : "", isOptional: true, parse: parseCount, hint },
    { name: "least_bandwidth", label: "Minimum bandwidth, bytes a second", value: bytes_per_s ? editableBytes(bytes_per_s) : "", isOptional: true, parse: parseBytes, hint },
  ];
}

/** The field of a form for limits. */
export function qosField(qos, label = "QoS limits") {
  return { name: "qos", type: "qos", label, value: qos, rates: RATES };
}

function setGroup(message, group) {
  return message.dialog({
    title: group ? `Limits of group ${group.name}` : "New group",
    body: [h("p", null, "The volumes of a group share its limits. The limits take effect at once.")],
    fields: [...(group ? [] : [{ name: "name", label: "Name" }]), qosField(group?.qos)],
    action: group ? "Set limits" : "Create the group",
    command: ({ name = group?.name, qos }) => ["group", "set", limitOptions(qos), operands(name)],
    submit: async ({ name = group?.name, qos }) => {
      await put(`/groups/${segment(name)}`, qos);
      await refreshNow("groups");
      return `The limits of group ${name} are set.`;
    },
  });
}

function deleteGroup(message, group) {
  return message.dialog({
    title: `Delete the group ${group.name}?`,
    body: [h("p", { class: "warning" }, group.volumes.length > 0 ? `These volumes lose its limits: ${some(group.volumes)}.` : "The group has no volumes.")],
    action: "Delete the group", isDangerous: true,
    command: () => ["group", "delete", operands(group.name)],
    submit: async () => {
      await remove(`/groups/${segment(group.name)}`);
      await refreshNow("groups", "volumes");
      return `The group ${group.name} was deleted.`;
    },
  });
}

/** The groups as a table; the message reports the results of actions. */
export function groupTable(message) {
  const current = (group) => state.groups.find((other) => other.name === group.name) ?? group;
  const table = new Table({
    caption: "Groups of volumes that share limits",
    empty: "No groups.",
    key: (group) => group.name,
    columns: [
      { label: "Name", isHeader: true, text: (group) => group.name },
      { label: "QoS", text: (group) => qosText(group.qos) },
      { label: "Volumes", text: (group) => some(group.volumes) || "–" },
      { label: "Actions", depends: (group) => group.name, nodes: (group) => rowActions(`group ${group.name}`, [
        { label: "Set QoS…", run: () => setGroup(message, current(group)) }, { label: "Delete…", run: () => deleteGroup(message, current(group)), isDangerous: true }]) },
    ],
  });
  return { table, create: () => setGroup(message, null) };
}
