// Problems, as the daemon sees them: for the header, the overview and the page's title.

import { address } from "./dom.js";
import { counted } from "./format.js";
import { state } from "./store.js";

// What the summary counts, in this order: the code of problems, the object and its state.
const COUNTED = [
  ["array-failed", "array", "failed"],
  ["array-offline", "array", "offline"],
  ["array-degraded", "array", "degraded"],
  ["device-not-open", "device", "not open"],
  ["portal-not-open", "portal", "not open"],
  ["export-waiting", "export", "waiting"],
];

const lookOf = (problem) => (problem.severity === "critical" ? "bad" : "warn");

// Portals have no view of their own.
const whereIs = (problem) => (problem.kind === "portal" ? "#/exports" : address(`${problem.kind}s`, problem.object));

/** Every problem as {look, href, text}; the worst first. */
export function problems() {
  return state.health.map((problem) => ({ look: lookOf(problem), href: whereIs(problem), text: problem.text }));
}

/** All of it in a few words. */
export function summary() {
  if (!state.isLoaded) return { look: "idle", text: "Loading…" };
  if (state.health.length === 0) return { look: "good", text: "No problems" };
  const parts = COUNTED.flatMap(([code, object, is]) => {
    const count = state.health.filter((problem) => problem.code === code).length;
    return count > 0 ? [`${counted(count, object)} ${is}`] : [];
  });
  return { look: lookOf(state.health[0]), text: parts.length > 0 ? parts.join(", ") : counted(state.health.length, "warning") };
}
