// Actions of a volume, as dialogs.

import { patch, post, remove, segment } from "./api.js";
import { flag, operands, option, size } from "./command.js";
import { h } from "./dom.js";
import { bytes, editableBytes, parseBytes, some } from "./format.js";
import { limitOptions, minFields, qosField } from "./qos.js";
import { bases, refreshNow, state } from "./store.js";

const groupField = (value) => ({
  name: "group", label: "Group", value, isOptional: true, options: state.groups.map((group) => group.name), hint: "Volumes of a group share its limits.",
});

/** Where a volume may lie, as a choice. */
const place = (base) => ({ value: base.name, label: `${base.name} (${base.free_bytes === null || base.free_bytes === undefined ? "no volumes yet" : `${bytes(base.free_bytes)} free`})` });

const pathOf = (volume) => `/volumes/${segment(volume.uuid || volume.name)}`;
const loadVolumes = () => refreshNow("volumes", "arrays", "devices", "groups", "exports", "jobs");
/** Whether an answer is a job: the request takes longer. */
const isJob = (answer) => answer?.total_bytes !== undefined;

async function change(volume, what) {
  const answer = await patch(pathOf(volume), what);
  await loadVolumes();
  return answer;
}

export function createVolume(message, on) {
  return message.dialog({
    title: "New volume",
    fields: [
      { name: "name", label: "Name" },
      { name: "backing", label: "On", type: "select", value: on, options: bases().map(place) },
      { name: "size_bytes", label: "Size", parse: parseBytes, hint: "Such as 20 GiB." },
      groupField(),
      qosField({}),
      { name: "force", label: "Overwrite content of an array or device that has no volumes yet", type: "checkbox" },
    ],
    action: "Create the volume",
    command: ({ name, backing, size_bytes, qos, group, force }) => ["volume", "create", option("backing", backing), option("size", size(size_bytes)), limitOptions(qos),
      option("group", group), flag("force", force), operands(name)],
    submit: async (values) => {
      const answer = await post("/volumes", values);
      await loadVolumes();
      return isJob(answer) ? `The volume ${values.name} is being created.` : `The volume ${values.name} was created.`;
    },
  });
}

export function growVolume(message, volume) {
  return message.dialog({
    title: `Grow the volume ${volume.name}`,
    body: [h("p", null, `It has ${bytes(volume.size_bytes)}. Clients of its exports see the new size. A volume cannot shrink.`)],
    fields: [{ name: "size_bytes", label: "New size", value: editableBytes(volume.size_bytes), parse: (text) => {
      const wanted = parseBytes(text);
      if (wanted <= volume.size_bytes) throw new Error(`The new size must be more than ${bytes(volume.size_bytes)}`);
      return wanted;
    } }],
    action: "Grow",
    command: ({ size_bytes }) => ["volume", "grow", option("size", size(size_bytes)), operands(volume.name)],
    submit: async ({ size_bytes }) => {
      const answer = await change(volume, { size_bytes });
      return isJob(answer) ? `The volume ${volume.name} is growing.` : `The volume ${volume.name} has grown to ${bytes(size_bytes)}.`;
    },
  });
}

/** Resolves with the new name once there is one. */
export async function renameVolume(message, volume) {
  let renamed = null;
  await message.dialog({
    title: `Rename the volume ${volume.name}`,
    fields: [{ name: "name", label: "New name", value: volume.name }],
    action: "Rename",
    command: ({ name }) => ["volume", "rename", operands(volume.name, name)],
    submit: async ({ name }) => {
      await change(volume, { name });
      renamed = name;
      return `The volume ${volume.name} was renamed to ${name}.`;
    },
  });
  return renamed;
}

export function moveVolume(message, volume) {
  const places = bases().filter((base) => base.name !== volume.backing && (base.free_bytes === null || base.free_bytes === undefined || base.free_bytes >= volume.size_bytes));
  return message.dialog({
    title: `Move the volume ${volume.name}`,
    body: [h("p", null, `${bytes(volume.size_bytes)} on ${volume.backing} are copied. Clients can use the volume meanwhile.`)],
    fields: [
      { name: "backing", label: "To", type: "select", options: places.map(place) },
      { name: "force", label: "Overwrite content of an array or device that has no volumes yet", type: "checkbox" },
    ],
    action: "Move",
    command: ({ backing, force }) => ["volume", "move", option("to", backing), flag("force", force), operands(volume.name)],
    submit: async (values) => {
      await post(`${pathOf(volume)}/move`, values);
      await refreshNow("volumes", "jobs");
      return `The volume ${volume.name} is moving to ${values.backing}.`;
    },
  });
}

export function setQos(message, volume) {
  return message.dialog({
    title: `Limits of the volume ${volume.name}`,
    body: [h("p", null, "The limits take effect at once.")],
    fields: [qosField(volume.qos), groupField(volume.group ?? ""), ...minFields(volume.min_qos)],
    action: "Set limits",
    command: ({ qos, group, least_iops, least_bandwidth }) => ["volume", "set", limitOptions(qos), group ? option("group", group) : flag("no-group", true),
      option("min-iops", least_iops), option("min-bandwidth", size(least_bandwidth)), operands(volume.name)],
    submit: async ({ qos, group = "", least_iops, least_bandwidth }) => {
      await change(volume, { qos, group, min_qos: { requests_per_s: least_iops, bytes_per_s: least_bandwidth } });
      return `The limits of ${volume.name} are set.`;
    },
  });
}

export function deleteVolume(message, volume) {
  const exports = volume.exports.length > 0 ? ` Exports that serve it: ${some(volume.exports)}.` : "";
  return message.dialog({
    title: `Delete the volume ${volume.name}?`,
    body: [h("p", { class: "warning" }, `All data on it is lost: ${bytes(volume.size_bytes)} on ${volume.backing}.${exports}`)],
    typed: volume.name, action: "Delete the volume", isDangerous: true,
    command: () => ["volume", "delete", operands(volume.name)],
    submit: async () => {
      await remove(pathOf(volume));
      return `The volume ${volume.name} was deleted.`;
    },
  });
}
