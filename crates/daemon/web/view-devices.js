// Devices: leaves that the daemon has open by name, beside the members of arrays.

import { post, remove, segment } from "./api.js";
import { address, badge, h, link, links, someLinks } from "./dom.js";
import { bytes, counted, some } from "./format.js";
import { button, Message } from "./parts.js";
import { find, refreshNow, state } from "./store.js";
import { Facts, Table } from "./table.js";

const stateOf = (device) => (device.error ? "not open" : "open");

function createDevice(message) {
  return message.dialog({
    title: "Open a device",
    body: [h("p", null, "It is opened now and at every start of the daemon.")],
    fields: [{ name: "name", label: "Name" },
      { name: "spec", label: "Specification", placeholder: "/dev/nvme0n1", hint: "kind:key=value,… as freestone serve --device takes it, or the path of a file or block device." }],
    action: "Open the device",
    submit: async (values) => {
      await post("/devices", values);
      await refreshNow("devices");
      return `The device ${values.name} is open.`;
    },
  });
}

function deleteDevice(message, device) {
  const lost = device.volumes.length > 0 ? ` ${counted(device.volumes.length, "volume")} on it can no longer be reached: ${some(device.volumes)}.` : "";
  return message.dialog({
    title: `Close the device ${device.name}?`,
    body: [h("p", { class: "warning" }, `The daemon closes it and forgets it.${lost}`), h("p", null, "What it holds stays.")],
    typed: device.name, action: "Close the device", isDangerous: true,
    submit: async () => {
      await remove(`/devices/${segment(device.name)}`);
      return `The device ${device.name} was closed.`;
    },
  });
}

export function openDevices() {
  const message = new Message();
  const table = new Table({
    caption: "Devices",
    empty: "No device is open beside the members of arrays.",
    key: (device) => device.name,
    columns: [
      { label: "Name", isHeader: true, sort: (device) => device.name, depends: (device) => device.name, nodes: (device) => link(address("devices", device.name), device.name) },
      { label: "State", depends: (device) => device.error, nodes: (device) => [badge(stateOf(device)), device.error ? h("p", { class: "why" }, device.error) : null] },
      { label: "Specification", text: (device) => device.spec },
      { label: "Capacity", isNumber: true, sort: (device) => device.capacity ?? -1, text: (device) => bytes(device.capacity) },
      { label: "Free", isNumber: true, text: (device) => bytes(device.free) },
      { label: "Access", isShort: true, text: (device) => (device.read_only ? "read-only" : "read-write") },
      { label: "Volumes", isNumber: true, text: (device) => String(device.volumes.length) },
      { label: "Exports", depends: (device) => device.exports, nodes: (device) => links("exports", device.exports) },
    ],
  });
  return {
    title: "Devices",
    element: h("div", null, h("div", { class: "toolbar" }, button("Open a device…", () => createDevice(message), { className: "primary" })), message.element, h("div", { class: "panel" }, table.element)),
    update() { table.update(state.devices); },
    close() { table.close(); },
  };
}

/** The view of a device; nothing if there is none of this name. */
export function openDevice(name) {
  if (!find("devices", name)) return null;
  const message = new Message();
  const facts = new Facts("Device");
  const destroy = async () => {
    if (!(await deleteDevice(message, find("devices", name)))) return;
    location.hash = "#/devices";
    await refreshNow("devices");
  };
  return {
    title: `Device ${name}`,
    element: h("div", null, h("div", { class: "panel" }, facts.element),
      h("div", { class: "toolbar", role: "group", "aria-label": `Actions of ${name}` }, button("Close the device…", destroy, { className: "danger" })), message.element),
    update() {
      const now = find("devices", name);
      if (!now) return;
      facts.set("State", [badge(stateOf(now)), now.error ? ` ${now.error}` : null], now.error);
      facts.set("Specification", now.spec);
      facts.set("Capacity", bytes(now.capacity));
      facts.set("Block", bytes(now.block_size));
      facts.set("Access", now.read_only ? "read-only" : "read-write");
      facts.set("Free for volumes", bytes(now.free));
      facts.set("Volumes", someLinks("volumes", now.volumes), now.volumes);
      facts.set("Exports of all of it", links("exports", now.exports), now.exports);
    },
  };
}
