// Limits of volumes and groups: their names, how they read and how they are entered.

import { put, remove, segment } from "./api.js";
import { h } from "./dom.js";
import { bandwidth, count, editableBytes, parseBytes, parseCount, some } from "./format.js";
import { button } from "./parts.js";
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
    const { per_second, burst } = qos[name];
    const amount = isBytes ? bandwidth(per_second) : `${count(per_second)}/s`;
    return `${label} ${amount}${burst > 0 ? ` + ${isBytes ? bandwidth(burst).slice(0, -2) : count(burst)}` : ""}`;
  });
  return set.join(", ") || "–";
}

/** What a volume gets of its group's limits, in a line; a dash for nothing. */
export function floorText(floor) {
  const { iops, bandwidth: bytes_per_s } = floor ?? {};
  return [iops ? `IOPS ${count(iops)}/s` : null, bytes_per_s ? `Bandwidth ${bandwidth(bytes_per_s)}` : null].filter(Boolean).join(", ") || "–";
}

/** The fields of a form for that. */
export function floorFields(floor) {
  const { iops, bandwidth: bytes_per_s } = floor ?? {};
  const hint = "What it gets of its group's limits, whatever the others of the group take.";
  return [
    { name: "least_iops", label: "At least IOPS, a second", value: iops ? String(iops) : "", isOptional: true, parse: parseCount, hint },
    { name: "least_bandwidth", label: "At least bandwidth, a second", value: bytes_per_s ? editableBytes(bytes_per_s) : "", isOptional: true, parse: parseBytes, hint },
  ];
}

/** The field of a form for limits. */
export function qosField(qos, label = "QoS limits") {
  return { name: "qos", type: "qos", label, value: qos, rates: RATES };
}

function setGroup(message, group) {
  return message.dialog({
    title: group ? `Limits of group ${group.name}` : "New group",
    body: [h("p", null, "The volumes of a group share its limits. They take effect at once.")],
    fields: [...(group ? [] : [{ name: "name", label: "Name" }]), qosField(group?.qos)],
    action: group ? "Set limits" : "Make the group",
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
    body: [h("p", { class: "warning" }, group.volumes.length > 0 ? `Its limits no longer hold for ${some(group.volumes)}.` : "No volume is in it.")],
    action: "Delete the group", isDangerous: true,
    submit: async () => {
      await remove(`/groups/${segment(group.name)}`);
      await refreshNow("groups", "volumes");
      return `The group ${group.name} was deleted.`;
    },
  });
}

/** The groups as a table; what is done is said in the message. */
export function groupTable(message) {
  const current = (group) => state.groups.find((other) => other.name === group.name) ?? group;
  const table = new Table({
    caption: "Groups of volumes that share limits",
    empty: "There are no groups.",
    key: (group) => group.name,
    columns: [
      { label: "Name", isHeader: true, text: (group) => group.name },
      { label: "QoS", text: (group) => qosText(group.qos) },
      { label: "Volumes", text: (group) => some(group.volumes) || "–" },
      { label: "Actions", depends: (group) => group.name, nodes: (group) => h("div", { class: "buttons" },
        button("Set QoS…", () => setGroup(message, current(group)), { of: `of group ${group.name}` }),
        button("Delete…", () => deleteGroup(message, current(group)), { of: `group ${group.name}` })) },
    ],
  });
  return { table, create: () => setGroup(message, null) };
}
