// Problems: one list for the header, the overview and the page's title.

import { address } from "./dom.js";
import { counted, listed } from "./format.js";
import { state } from "./store.js";

/** Every problem as {look, href, name, text}; the worst first. */
export function problems() {
  const all = [];
  for (const array of state.arrays) {
    const href = address("arrays", array.name);
    if (array.state === "failed" || array.state === "offline") {
      all.push({ look: "bad", href, name: array.name, text: `Array ${array.name} is ${array.state}${array.error ? `: ${array.error}` : ""}` });
    } else if (array.state !== "optimal") {
      const out = array.members.filter((member) => member.state !== "live").map((member) => `slot ${member.slot} ${member.state}`);
      all.push({ look: "warn", href, name: array.name, text: `Array ${array.name} is ${array.state}: ${listed(out)}` });
    }
    if (array.scrub && !array.scrub.is_repairing && array.scrub.mismatched_rows > 0) {
      all.push({ look: "warn", href, name: array.name, text: `The scrub of ${array.name} found ${counted(array.scrub.mismatched_rows, "row")} that differ` });
    }
  }
  for (const device of state.devices) {
    if (device.error) all.push({ look: "bad", href: address("devices", device.name), name: device.name, text: `Device ${device.name} is not open: ${device.error}` });
  }
  for (const item of state.exports) {
    if (item.state !== "active") all.push({ look: "warn", href: address("exports", item.name), name: item.name, text: `Export ${item.name} is ${item.state}${item.error ? `: ${item.error}` : ""}` });
  }
  return all.sort((a, b) => (a.look === b.look ? 0 : a.look === "bad" ? -1 : 1));
}

/** All of it in a few words. */
export function summary() {
  if (!state.isLoaded) return { look: "idle", text: "Loading…" };
  const parts = [];
  const arrays = (name) => state.arrays.filter((array) => array.state === name).length;
  for (const name of ["failed", "offline", "degraded"]) {
    if (arrays(name) > 0) parts.push(`${counted(arrays(name), "array")} ${name}`);
  }
  const closed = state.devices.filter((device) => device.error).length;
  if (closed > 0) parts.push(`${counted(closed, "device")} not open`);
  const waiting = state.exports.filter((item) => item.state !== "active").length;
  if (waiting > 0) parts.push(`${counted(waiting, "export")} waiting`);
  const all = problems();
  if (all.length === 0) return { look: "good", text: "No problems" };
  return { look: all[0].look, text: parts.length > 0 ? parts.join(", ") : counted(all.length, "warning") };
}
