// Problems, as the daemon sees them: for the header, the overview and the page's title.

import { address } from "./dom.js";
import { counted } from "./format.js";
import { isExposed } from "./redundancy.js";
import { find, state } from "./store.js";

// What the summary counts, in this order: the code of problems, the object and its state.
const COUNTED = [
  ["array-failed", "array", "failed"],
  ["array-offline", "array", "offline"],
  ["array-degraded", "array", "degraded"],
  ["device-not-open", "device", "not open"],
  ["volume-not-available", "volume", "not available"],
  ["portal-not-open", "portal", "not open"],
  ["export-waiting", "export", "waiting"],
];

const lookOf = (problem) => (problem.severity === "critical" ? "bad" : "warn");
/** Whether the problem is a degraded array whose next failure loses data. */
const isAboutExposed = (problem) => problem.code === "array-degraded" && isExposed(find("arrays", problem.object) ?? {});

// Portals have no view of their own.
const whereIs = (problem) => (problem.kind === "portal" ? "#/exports" : address(`${problem.kind}s`, problem.object));

/** Every problem as {look, href, text}; the worst first. */
export function problems() {
  return state.health.map((problem) => ({ look: lookOf(problem), href: whereIs(problem), text: problem.text }));
}

/** All of it in a few words. */
export function summary() {
  if (!state.isLoaded) return { look: "idle", text: "Loading…" };
  const exposed = state.arrays.filter(isExposed).length;
  if (state.health.length === 0 && exposed === 0) return { look: "good", text: "No problems" };
  const parts = exposed > 0 ? [`${counted(exposed, "array")} without redundancy`] : [];
  for (const [code, object, is] of COUNTED) {
    const count = state.health.filter((problem) => problem.code === code && !isAboutExposed(problem)).length;
    if (count > 0) parts.push(`${counted(count, object)} ${is}`);
  }
  const isBad = exposed > 0 || lookOf(state.health[0]) === "bad";
  return { look: isBad ? "bad" : "warn", text: parts.length > 0 ? parts.join(", ") : counted(state.health.length, "warning") };
}
