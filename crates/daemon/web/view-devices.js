// Devices: leaves with a registered name; members of arrays need none.

import { post, remove, segment } from "./api.js";
import { operands } from "./command.js";
import { copyable } from "./copy.js";
import { address, badge, h, link, links, someLinks } from "./dom.js";
import { driveColumns, setDrive } from "./drive.js";
import { bytes, counted, some } from "./format.js";
import { Toolbar } from "./menu.js";
import { button, freeDepends, freeOf, Message } from "./parts.js";
import { find, refreshNow, state } from "./store.js";
import { Facts, Table } from "./table.js";

const stateOf = (device) => (device.error ? "not open" : "open");

/** Ask for a device to open; `spec` is proposed. */
export function createDevice(message, spec = "") {
  return message.dialog({
    title: "New device",
    body: [h("p", null, "The daemon opens it now and at every start.")],
    fields: [{ name: "name", label: "Name" },
      { name: "spec", label: "Specification", value: spec, placeholder: "/dev/nvme0n1", hint: "kind:key=value,… as in freestone serve --device, or the path of a file or block device." }],
    action: "Create the device",
    command: ({ name, spec }) => ["device", "create", operands(name, spec)],
    submit: async (values) => {
      await post("/devices", values);
      await refreshNow("devices");
      return `The device ${values.name} was created.`;
    },
  });
}

function deleteDevice(message, device) {
  const lost = device.volumes.length > 0 ? ` ${counted(device.volumes.length, "volume")} on it become unavailable: ${some(device.volumes)}.` : "";
  return message.dialog({
    title: `Delete the device ${device.name}?`,
    body: [h("p", { class: "warning" }, `The daemon closes the device and removes it from its state.${lost}`), h("p", null, "Its content is kept.")],
    typed: device.name, action: "Delete the device", isDangerous: true,
    command: () => ["device", "delete", operands(device.name)],
    submit: async () => {
      await remove(`/devices/${segment(device.name)}`);
      return `The device ${device.name} was deleted.`;
    },
  });
}

export function openDevices() {
  const message = new Message();
  const table = new Table({
    caption: "Devices",
    empty: "No devices. Members of arrays are not listed here.",
    key: (device) => device.name,
    columns: [
      { label: "Name", isHeader: true, sort: (device) => device.name, depends: (device) => device.name, nodes: (device) => link(address("devices", device.name), device.name) },
      { label: "State", depends: (device) => device.error, nodes: (device) => [badge(stateOf(device)), device.error ? h("p", { class: "why" }, device.error) : null] },
      { label: "Specification", depends: (device) => device.spec, nodes: (device) => copyable(device.spec) },
      { label: "Capacity", isNumber: true, sort: (device) => device.capacity_bytes ?? -1, text: (device) => bytes(device.capacity_bytes) },
      { label: "Free", isNumber: true, sort: (device) => device.free_bytes ?? -1, depends: freeDepends, nodes: freeOf },
      ...driveColumns(),
      { label: "Access", isShort: true, text: (device) => (device.read_only ? "read-only" : "read-write") },
      { label: "Volumes", isNumber: true, text: (device) => String(device.volumes.length) },
      { label: "Exports", depends: (device) => device.exports, nodes: (device) => links("exports", device.exports) },
    ],
  });
  return {
    title: "Devices",
    element: h("div", null, h("div", { class: "toolbar" }, button("New device…", () => createDevice(message), { className: "primary" })), message.element, h("div", { class: "panel" }, table.element)),
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
  const toolbar = new Toolbar(name);
  toolbar.update([{ label: "Delete…", run: destroy, isDangerous: true }]);

  return {
    title: `Device ${name}`,
    element: h("div", null, h("div", { class: "panel" }, facts.element),
      toolbar.element, message.element),
    update() {
      const now = find("devices", name);
      if (!now) return;
      facts.set("State", [badge(stateOf(now)), now.error ? ` ${now.error}` : null], now.error);
      facts.set("Specification", copyable(now.spec), now.spec);
      facts.set("Capacity", bytes(now.capacity_bytes));
      facts.set("Block", bytes(now.block_bytes));
      facts.set("Access", now.read_only ? "read-only" : "read-write");
      facts.set("Free for volumes", freeOf(now), freeDepends(now));
      setDrive(facts, now.drive);
      facts.set("Volumes", someLinks("volumes", now.volumes), now.volumes);
      facts.set("Exported directly", links("exports", now.exports), now.exports);
    },
  };
}
