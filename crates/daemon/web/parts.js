// Parts that several views share: sections, messages, buttons, jobs.

import { patch, post, remove, segment } from "./api.js";
import { operands, option, size } from "./command.js";
import { explain, openDialog } from "./dialog.js";
import { h, hidden, link, address, newId, setText } from "./dom.js";
import { bytes, days, duration, isKnown, parseBytes } from "./format.js";
import { find, refreshNow, state } from "./store.js";

/** A part of a view under a heading. */
export function section(title, ...children) {
  const id = newId("section");
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

/** A link to an array or device. */
export function baseLink(name) {
  return link(address(find("devices", name) ? "devices" : "arrays", name), name);
}

/** A button. `of` names its object for those who hear the page, where several buttons say the same. */
export function button(label, onclick, { of, className } = {}) {
  return h("button", { type: "button", class: className, onclick }, label, of ? hidden(` ${of}`) : null);
}

/** A number, and a second fact in a line of its own: next to each other they read as one number. */
export function figure(number, second) {
  return [h("span", { class: "big" }, number), hidden(", "), h("span", { class: "second" }, second)];
}

/** Bytes that are free of the capacity of an array or device: a number, a bar of what is used, and when it will be full. */
export function freeOf({ name, capacity_bytes, free_bytes, full_in_s }) {
  if (!(capacity_bytes > 0) || !isKnown(free_bytes)) return [bytes(free_bytes)];
  const used = 1 - free_bytes / capacity_bytes;
  const bar = h("meter", { min: 0, max: 1, high: 0.9, value: used, "aria-label": `${(used * 100).toFixed(0)} % of ${name} used` });
  return [bytes(free_bytes), bar, isKnown(full_in_s) ? h("p", { class: "why", title: "By a linear fit to the use of the last day." }, `full in ${days(full_in_s)}`) : null];
}

/** The part of an array or device on which `freeOf` depends. */
export const freeDepends = ({ capacity_bytes, free_bytes, full_in_s }) => [capacity_bytes, free_bytes, isKnown(full_in_s) ? days(full_in_s) : null];

/** Reports the result of an action next to its button. */
export class Message {
  constructor() {
    this.status = h("p", { class: "notice", role: "status" });
    this.alert = h("p", { class: "error", role: "alert" });
    this.element = h("div", { class: "messages" }, this.status, this.alert);
  }

  say(text) {
    setText(this.alert, "");
    setText(this.status, text);
  }

  /** Run an action that returns a message or nothing; shows the message, or the error. */
  async run(action) {
    setText(this.alert, "");
    try {
      setText(this.status, (await action()) ?? "");
    } catch (error) {
      setText(this.status, "");
      setText(this.alert, explain(error));
    }
  }

  /** Open a dialog whose `submit` returns the message to show here. */
  async dialog(options) {
    let said = "";
    this.say("");
    const isDone = await openDialog({ ...options, submit: async (values) => { said = (await options.submit(values)) ?? ""; } });
    if (isDone) this.say(said);
    return isDone;
  }
}

/** Run an action of an array; returns the daemon's message. */
export async function act(array, action) {
  const done = await post(`/arrays/${segment(array)}/actions`, action);
  await refreshNow("arrays", "jobs");
  return done.text;
}

// Jobs that can be cancelled. The others rebuild a slot, and run until it is complete.
const CANCELLABLE = new Set(["check", "repair", "replace", "move", "create", "grow", "copy"]);
const JOB_NAMES = {
  rebuild: "Rebuild", "partial-resync": "Partial resync", replace: "Replacement", resync: "Resync", reshape: "Reshape", check: "Check", repair: "Repair", move: "Move", create: "Creation", grow: "Growth", copy: "Copy", stream: "Stream",
};
// The effect of cancelling the job of a volume.
const WITHOUT = {
  move: "The volume keeps its place. No data is lost.", create: "The volume is not created.", grow: "The volume keeps its size. No data is lost.", copy: "The volume is not created.",
};

class JobItem {
  constructor(list, job) {
    this.list = list;
    this.id = job.id;
    this.array = job.backing;
    this.name = (JOB_NAMES[job.kind] ?? job.kind).toLowerCase();
    this.whose = job.volume ? `The ${this.name} of ${job.volume}` : `The jobs of ${job.backing}`;
    const what = jobTitle(job);
    const label = newId("job");
    this.bar = h("progress", { max: 1, "aria-labelledby": label });
    this.text = h("p", { class: "numbers" });
    this.pause = h("button", { type: "button", onclick: () => this.toggle() });
    this.limits = button("Limit rate…", () => this.limit(), { of: what });
    this.pauseWord = h("span");
    this.pause.append(this.pauseWord, hidden(` ${what}`));
    this.element = h("li", { class: "job" },
      h("p", { class: "what", id: label }, JOB_NAMES[job.kind] ?? job.kind, " of ", ...jobLinks(job)),
      this.bar, this.text,
      h("div", { class: "buttons" }, this.pause, this.limits,
        CANCELLABLE.has(job.kind) ? button("Cancel…", () => this.cancel(what), { of: what }) : null));
  }

  update(job) {
    this.job = job;
    const part = job.total_bytes > 0 ? job.done_bytes / job.total_bytes : 0;
    this.bar.value = part;
    const pace = job.waits_for ? `waits: ${job.waits_for}` : job.is_paused ? "paused" : `${job.is_urgent ? "urgent, " : ""}${bytes(job.bytes_per_s)}/s, ${job.eta_s === null || job.eta_s === undefined ? "time left unknown" : `${duration(job.eta_s)} left`}`;
    setText(this.text, `${(part * 100).toFixed(1)} % · ${bytes(job.done_bytes)} of ${bytes(job.total_bytes)} · ${pace}`);
    setText(this.pauseWord, job.is_paused ? "Resume" : "Pause");
    this.pause.disabled = this.limits.disabled = Boolean(job.waits_for);
  }

  toggle() {
    const is_paused = !this.job.is_paused;
    this.list.message.run(async () => {
      await patch(`/jobs/${segment(this.id)}`, { is_paused });
      await refreshNow("jobs", "arrays");
      return `${this.whose} ${this.job.volume ? "is" : "are"} ${is_paused ? "paused" : "resumed"}.`;
    });
  }

  limit() {
    const rate = (name, label, hint) => ({ name, label, hint, isOptional: true, parse: parseBytes });
    this.list.message.dialog({
      title: this.job.volume ? `Limit the ${this.name} of ${this.job.volume}` : `Limit the jobs of ${this.array}`,
      fields: [
        rate("max", "Maximum rate, bytes a second", "Such as 200 MiB. 0: no fixed maximum; the job yields to clients."),
        rate("min", "Minimum rate, bytes a second", "Regardless of the latency of clients."),
      ],
      action: "Set limits",
      command: ({ max, min }) => ["job", "rate", option("max", size(max)), option("min", size(min)), operands(this.id)],
      submit: async ({ max, min }) => {
        await patch(`/jobs/${segment(this.id)}`, { max_bytes_per_s: max, min_bytes_per_s: min });
        await refreshNow("jobs");
        return `${this.whose} ${this.job.volume ? "is" : "are"} limited now.`;
      },
    });
  }

  cancel(what) {
    this.list.message.dialog({
      title: `Cancel the ${what}?`,
      body: [h("p", null, this.job.volume ? WITHOUT[this.job.kind] : "Its progress is lost: a new job starts from the beginning. No data is lost.")],
      action: "Cancel the job",
      isDangerous: true,
      command: () => ["job", "cancel", operands(this.id)],
      submit: async () => {
        await remove(`/jobs/${segment(this.id)}`);
        await refreshNow("arrays", "jobs", "volumes");
        return `The ${what} was cancelled.`;
      },
    });
  }
}

const slotText = (job) => (job.slot === null || job.slot === undefined ? "" : `, slot ${job.slot}`);

const toward = (job) => (job.kind === "move" ? "to" : "on");

/** The object of a job, with links. */
function jobLinks(job) {
  const place = baseLink(job.backing);
  const volume = find("volumes", job.volume) ? link(address("volumes", job.volume), job.volume) : job.volume;
  return job.volume ? [volume, ` ${toward(job)} `, place] : [place, slotText(job)];
}

function jobTitle(job) {
  const name = (JOB_NAMES[job.kind] ?? job.kind).toLowerCase();
  return job.volume ? `${name} of ${job.volume} ${toward(job)} ${job.backing}` : `${name} of ${job.backing}${slotText(job)}`;
}

/** The jobs that run, of all arrays or of one. */
export class JobList {
  constructor(array) {
    this.array = array;
    this.items = new Map();
    this.message = new Message();
    this.list = h("ul", { class: "jobs" });
    this.empty = h("p", { class: "muted" }, "No jobs.");
    this.element = h("div", null, this.list, this.empty, this.message.element);
  }

  update() {
    const jobs = state.jobs.filter((job) => this.array === undefined || job.backing === this.array);
    const gone = new Set(this.items.keys());
    for (const job of jobs) {
      gone.delete(job.id);
      let item = this.items.get(job.id);
      if (!item) {
        item = new JobItem(this, job);
        this.items.set(job.id, item);
        this.list.append(item.element);
      }
      item.update(job);
    }
    for (const id of gone) {
      this.items.get(id).element.remove();
      this.items.delete(id);
    }
    this.list.hidden = jobs.length === 0;
    this.empty.hidden = jobs.length > 0;
  }
}
