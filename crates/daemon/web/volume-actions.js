// What can be done to a volume, as dialogs.

import { patch, post, remove, segment } from "./api.js";
import { h } from "./dom.js";
import { bytes, editableBytes, parseBytes, some } from "./format.js";
import { floorFields, qosField } from "./qos.js";
import { bases, refreshNow, state } from "./store.js";

const groupField = (value) => ({
  name: "group", label: "Group", value, isOptional: true, options: state.groups.map((group) => group.name), hint: "Volumes of a group share its limits.",
});

/** Where a volume may lie, as a choice. */
const place = (base) => ({ value: base.name, label: `${base.name} (${base.free === null || base.free === undefined ? "no volumes yet" : `${bytes(base.free)} free`})` });

const pathOf = (volume) => `/volumes/${segment(volume.uuid || volume.name)}`;
const loadVolumes = () => refreshNow("volumes", "arrays", "devices", "groups", "exports", "jobs");
/** Whether an answer is a job: what was asked for takes longer. */
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
      { name: "on", label: "On", type: "select", value: on, options: bases().map(place) },
      { name: "size", label: "Size", parse: parseBytes, hint: "Such as 20 GiB." },
      groupField(),
      qosField({}),
      { name: "force", label: "Overwrite whatever lies on a device without volumes", type: "checkbox" },
    ],
    action: "Make the volume",
    submit: async (values) => {
      const answer = await post("/volumes", values);
      await loadVolumes();
      return isJob(answer) ? `The volume ${values.name} is being made.` : `The volume ${values.name} was made.`;
    },
  });
}

export function growVolume(message, volume) {
  return message.dialog({
    title: `Grow the volume ${volume.name}`,
    body: [h("p", null, `It has ${bytes(volume.size)}. Users of its exports are told. A volume cannot shrink again.`)],
    fields: [{ name: "size", label: "New size", value: editableBytes(volume.size), parse: (text) => {
      const size = parseBytes(text);
      if (size <= volume.size) throw new Error(`The new size must be more than ${bytes(volume.size)}`);
      return size;
    } }],
    action: "Grow",
    submit: async ({ size }) => {
      const answer = await change(volume, { size });
      return isJob(answer) ? `The volume ${volume.name} grows.` : `The volume ${volume.name} has ${bytes(size)} now.`;
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
    submit: async ({ name }) => {
      await change(volume, { name });
      renamed = name;
      return `The volume ${volume.name} is called ${name} now.`;
    },
  });
  return renamed;
}

export function moveVolume(message, volume) {
  const places = bases().filter((base) => base.name !== volume.on && (base.free === null || base.free === undefined || base.free >= volume.size));
  return message.dialog({
    title: `Move the volume ${volume.name}`,
    body: [h("p", null, `${bytes(volume.size)} on ${volume.on} are copied. Its users can go on meanwhile.`)],
    fields: [
      { name: "to", label: "To", type: "select", options: places.map(place) },
      { name: "force", label: "Overwrite whatever lies on a device without volumes", type: "checkbox" },
    ],
    action: "Move",
    submit: async (values) => {
      await post(`${pathOf(volume)}/move`, values);
      await refreshNow("volumes", "jobs");
      return `The volume ${volume.name} moves to ${values.to}.`;
    },
  });
}

export function setQos(message, volume) {
  return message.dialog({
    title: `Limits of the volume ${volume.name}`,
    body: [h("p", null, "They take effect at once.")],
    fields: [qosField(volume.qos), groupField(volume.group ?? ""), ...floorFields(volume.floor)],
    action: "Set limits",
    submit: async ({ qos, group = "", least_iops, least_bandwidth }) => {
      await change(volume, { qos, group, floor: { iops: least_iops, bandwidth: least_bandwidth } });
      return `The limits of ${volume.name} are set.`;
    },
  });
}

export function deleteVolume(message, volume) {
  const exports = volume.exports.length > 0 ? ` It is served by ${some(volume.exports)}.` : "";
  return message.dialog({
    title: `Delete the volume ${volume.name}?`,
    body: [h("p", { class: "warning" }, `All data on it is lost: ${bytes(volume.size)} on ${volume.on}.${exports}`)],
    typed: volume.name, action: "Delete the volume", isDangerous: true,
    submit: async () => {
      await remove(pathOf(volume));
      return `The volume ${volume.name} was deleted.`;
    },
  });
}
