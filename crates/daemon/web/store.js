// The page's copy of the daemon's state: events update lists (and so does a timer), counters are read each second.
//
// Views subscribe and get the set of lists that differ. An unchanged text of a list is not parsed.

import { ApiError, followEvents, get, requestText } from "./api.js";
import { ExportRates, History } from "./history.js";

const LISTS = ["devices", "arrays", "volumes", "groups", "exports", "jobs", "health"];
const MOST_EVENTS = 1024; // kept by the daemon
const REFRESH_ALL_MS = 30_000; // in case an event is missing
const REFRESH_TRAFFIC_MS = 5_000;
const REFRESH_JOBS_MS = 2_000;
const SAMPLE_MS = 1_000;
const GATHER_MS = 100; // events come in bursts

// The lists that an event may have changed, by its kind.
const TOUCHES = {
  device: ["devices", "arrays", "exports", "health"],
  array: ["arrays", "jobs", "devices", "exports", "health"],
  volume: ["volumes", "arrays", "devices", "groups", "exports", "health"],
  group: ["groups", "volumes"],
  export: ["exports", "volumes", "arrays", "devices", "health"],
  job: ["jobs", "arrays"],
};

export const state = {
  system: null, devices: [], arrays: [], volumes: [], groups: [], exports: [], jobs: [], health: [],
  events: [], // newest first
  eventsSince_ns: null, // the start of the daemon that they are of
  isLoaded: false, isConnected: true,
  streamLost_ms: null, // since when, as performance.now() counts
};
export const history = new History();
export const exportRates = new ExportRates();

const texts = {};
const dirty = new Set();
const listeners = new Set();
let refreshing = null;
let reconnect = () => {};

/** Have `listener` called with the set of names that differ: lists, `events`, `system`, `connection`, `samples`. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function notify(...changed) {
  const set = new Set(changed);
  for (const listener of [...listeners]) listener(set);
}

function setConnected(isConnected) {
  if (state.isConnected === isConnected) return;
  state.isConnected = isConnected;
  notify("connection");
  if (isConnected) reconnect();
}

async function load(name) {
  const text = await requestText(`/${name}`);
  const isNew = texts[name] !== text;
  if (isNew) {
    texts[name] = text;
    state[name] = JSON.parse(text);
  }
  if (name === "exports") exportRates.add(state.exports, performance.now());
  return isNew ? name : null;
}

async function loadDirty() {
  const names = [...dirty];
  dirty.clear();
  try {
    const changed = (await Promise.all(names.map(load))).filter((name) => name !== null);
    const isFirst = !state.isLoaded;
    if (LISTS.every((name) => texts[name] !== undefined)) state.isLoaded = true;
    setConnected(true);
    if (isFirst && state.isLoaded) notify(...LISTS, "system", "events");
    else if (changed.length > 0) notify(...changed);
  } catch (error) {
    for (const name of names) dirty.add(name);
    if (error instanceof ApiError && error.status === 0) setConnected(false);
    else console.warn(`the lists cannot be loaded: ${error.message}`);
  }
}

/** Reload these lists soon. Resolves when they are loaded. */
export function refresh(...names) {
  for (const name of names.length > 0 ? names : [...LISTS, "system"]) dirty.add(name);
  refreshing ??= new Promise((resolve) => setTimeout(resolve, GATHER_MS)).then(async () => {
    refreshing = null;
    await loadDirty();
  });
  return refreshing;
}

/** Reload these lists at once, to show the user's last action. */
export async function refreshNow(...names) {
  for (const name of names) dirty.add(name);
  await loadDirty();
}

function take(events) {
  const known = state.events.length > 0 ? state.events[0].id : 0;
  const fresh = events.filter((event) => event.id > known);
  if (fresh.length === 0) return;
  state.events = [...fresh.reverse(), ...state.events].slice(0, MOST_EVENTS);
  notify("events");
}

/** Load the events that the page has missed. A restarted daemon counts its events from 1. */
async function catchUp() {
  const system = await get("/system");
  if (system.started_ns !== state.eventsSince_ns) state.events = [];
  state.eventsSince_ns = system.started_ns;
  const after = state.events.length > 0 ? state.events[0].id : 0;
  take(await get(`/events?after=${after}`));
}

function onEvent(event) {
  take([event]);
  refresh(...(TOUCHES[event.kind] ?? []));
}

async function sample() {
  try {
    const counters = await get("/samples");
    setConnected(true);
    if (history.add(counters)) notify("samples");
  } catch (error) {
    if (error instanceof ApiError && error.status === 0) setConnected(false);
  }
}

/** Repeat `work` periodically, one at a time, while the page is visible. */
function repeat(interval_ms, work) {
  const turn = async () => {
    const started = performance.now();
    if (!document.hidden) await work();
    setTimeout(turn, Math.max(interval_ms - (performance.now() - started), interval_ms / 4));
  };
  setTimeout(turn, interval_ms);
}

/** Begin to keep the state up to date. */
export async function start() {
  reconnect = followEvents({
    onOpen: () => {
      state.streamLost_ms = null;
      notify("connection");
      catchUp().catch((error) => console.warn(`the events cannot be loaded: ${error.message}`));
      refresh();
    },
    onEvent,
    onLost: () => {
      state.streamLost_ms ??= performance.now();
      notify("connection");
    },
  });
  repeat(SAMPLE_MS, sample);
  repeat(REFRESH_JOBS_MS, () => (state.jobs.length > 0 ? refresh("jobs", "arrays", "health") : null));
  repeat(REFRESH_TRAFFIC_MS, () => refresh("exports", "health"));
  repeat(REFRESH_ALL_MS, () => refresh());
  sample();
  await refresh();
}

export const find = (list, name) => state[list].find((item) => item.name === name);
/** The volumes on an array or device. */
export const volumesOn = (name) => state.volumes.filter((volume) => volume.backing === name);
/** Objects that exports can serve and volumes can lie on. */
export const bases = () => [...state.arrays, ...state.devices];
