// How many members of an array may still fail, and the warning about arrays that have no redundancy left.

import { address, badge, h, link, setText } from "./dom.js";
import { counted, duration } from "./format.js";
import { state } from "./store.js";

// The jobs that restore redundancy.
const RESTORING = new Set(["rebuild", "partial-resync", "resync"]);

const isServed = (array) => array.state !== "failed" && array.state !== "offline";

/** Whether an array that was created with redundancy has none left: the next failure loses its data. */
export const isExposed = (array) => array.parity > 0 && array.redundancy_left === 0 && isServed(array);

/** `2 more members may fail`; a dash if the array does not run. */
export function redundancyText(array) {
  const left = array.redundancy_left;
  if (left === null || left === undefined || !isServed(array)) return "–";
  if (array.parity === 0) return "no redundancy";
  return left === 0 ? "no more members may fail" : `${counted(left, "more member")} may fail`;
}

/** The look of an array's state: an array that the next failure destroys is not just degraded. */
export const arrayLook = (array) => (isExposed(array) ? "bad" : undefined);

/** The state of an array as sign and word. */
export const arrayBadge = (array) => badge(array.state, arrayLook(array));

/** The end of the redundancy's absence, and what to do until then. */
function outlook(array) {
  const jobs = state.jobs.filter((job) => job.backing === array.name && !job.volume && RESTORING.has(job.kind));
  if (jobs.length === 0) return { until: ", and no rebuild is running.", left: "", advice: "Add a spare. Do not pull or fail a drive." };
  const noun = jobs.some((job) => job.kind === "resync") ? "resync" : "rebuild";
  const times = jobs.map((job) => job.eta_s ?? Infinity);
  // The members of several groups do not stand in for each other: every rebuild counts.
  const left = array.groups > 1 ? Math.max(...times) : Math.min(...times);
  const isPaused = jobs.every((job) => job.is_paused);
  return {
    until: ` until the ${noun} ends `,
    left: isPaused ? "(paused)." : `(${left === Infinity ? "time left unknown" : duration(left)}).`,
    advice: isPaused ? `Resume the ${noun}. Do not pull or fail a drive.` : "Do not pull or fail a drive.",
  };
}

class Warning {
  constructor(name) {
    this.until = h("span");
    this.left = h("span", { "aria-live": "off" }); // announced once, not with each minute
    this.advice = h("span");
    this.element = h("p", null, "No redundancy left on ", link(address("arrays", name), name), this.until, this.left, " ", this.advice);
  }

  update(array) {
    const { until, left, advice } = outlook(array);
    setText(this.until, until);
    setText(this.left, left);
    setText(this.advice, advice);
  }
}

/** Shows a warning for each array without redundancy in `element`, whatever the view is. */
export class Warnings {
  constructor(element) {
    this.element = element;
    this.shown = new Map();
  }

  update() {
    const exposed = state.arrays.filter(isExposed);
    const names = new Set(exposed.map((array) => array.name));
    for (const [name, warning] of this.shown) {
      if (names.has(name)) continue;
      warning.element.remove();
      this.shown.delete(name);
    }
    this.element.hidden = exposed.length === 0;
    for (const array of exposed) {
      let warning = this.shown.get(array.name);
      if (!warning) this.shown.set(array.name, warning = new Warning(array.name));
      warning.update(array);
      if (!warning.element.isConnected) this.element.append(warning.element);
    }
  }
}
