// The page's frame: the view, the header's health, the theme, the connection.
//
// A view is an object with a `title`, an `element`, `update(changed)` for lists that differ, and where it needs them
// `sample()` for new counters and `close()`. The address says which one: `#/volumes/NAME`.

import { forgetToken, hasToken, onTokenNeeded, openInTab, takeTokenFromAddress } from "./api.js";
import { askForToken, explain } from "./dialog.js";
import { h, setText, SIGNS } from "./dom.js";
import { dateAndTime, time } from "./format.js";
import { summary } from "./health.js";
import { Warnings } from "./redundancy.js";
import { find, start, state, subscribe } from "./store.js";
import { openArray } from "./view-array.js";
import { openArrays } from "./view-arrays.js";
import { openDevice, openDevices } from "./view-devices.js";
import { openEvents } from "./view-events.js";
import { openExport, openExports } from "./view-exports.js";
import { openOverview } from "./view-overview.js";
import { openVolume, openVolumes } from "./view-volumes.js";

const SHORT_LOSS_MS = 2000; // a shorter loss is not shown
const EVERYTHING = new Set(["devices", "arrays", "volumes", "groups", "exports", "jobs", "events", "system"]);
const VIEWS = {
  "": { list: openOverview }, arrays: { list: openArrays, one: openArray }, volumes: { list: openVolumes, one: openVolume },
  exports: { list: openExports, one: openExport }, devices: { list: openDevices, one: openDevice }, events: { list: openEvents },
};

const main = document.getElementById("main");
const warnings = new Warnings(document.getElementById("exposed"));
let view = null;
let isMissing = false; // the address named no object when it was opened

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, name] = path.split("/");
  try {
    return { kind, name: name === undefined || name === "" ? null : decodeURIComponent(name), query: new URLSearchParams(query) };
  } catch {
    return { kind: "unknown", name: null, query: new URLSearchParams() };
  }
}

function open({ kind, name, query }) {
  const views = VIEWS[kind];
  const opened = name === null ? views?.list(query) : views?.one?.(name);
  isMissing = !opened;
  return opened ?? { title: "Not found", element: h("p", null, "No such object. It may have been deleted or renamed."), update() {} };
}

/** Whether the view's object was deleted or renamed meanwhile. */
function isGone() {
  const { kind, name } = route();
  return name !== null && Boolean(VIEWS[kind]?.one) && !find(kind, name);
}

function markCurrent(kind, name) {
  for (const anchor of document.querySelectorAll("nav a")) {
    const isHere = anchor.getAttribute("href") === `#/${kind}`;
    if (isHere) anchor.setAttribute("aria-current", name === null ? "page" : "true");
    else anchor.removeAttribute("aria-current");
  }
}

function show({ isFocused }) {
  if (!state.isLoaded) return;
  const here = route();
  view?.close?.();
  view = open(here);
  const heading = h("h1", { tabindex: -1 }, view.title);
  view.update(EVERYTHING);
  main.replaceChildren(heading, view.element);
  view.sample?.();
  markCurrent(here.kind, here.name);
  showHealth();
  scrollTo(0, 0);
  if (isFocused) heading.focus();
}

function showHealth() {
  const { look, text } = summary();
  const health = document.getElementById("health");
  health.className = look;
  setText(health, `${SIGNS[look]} ${text}`);
  const host = state.system ? `${hostName()}: ` : "";
  document.title = `${look === "good" || look === "idle" ? "" : "(!) "}${host}${view?.title ?? "Loading"} – freestoned`;
}

function showConnection() {
  const banner = document.getElementById("connection");
  const lost_ms = state.streamLost_ms === null ? 0 : performance.now() - state.streamLost_ms;
  if (lost_ms > 0 && lost_ms < SHORT_LOSS_MS) setTimeout(showConnection, SHORT_LOSS_MS);
  const text = !state.isConnected ? "The daemon is unreachable. The page may be out of date. Reconnecting…"
    : lost_ms >= SHORT_LOSS_MS ? "The stream of events is interrupted. The page may be half a minute old. Reconnecting…" : "";
  setText(banner, text);
  banner.hidden = text === "";
}

const hostName = () => state.system.host || location.hostname;

function showDaemon() {
  const { system } = state;
  if (!system) return;
  setText(document.getElementById("host"), hostName());
  setText(document.getElementById("version"), system.version);
  setText(document.getElementById("role"), system.role ? `Role: ${system.role}` : "");
  document.getElementById("log-out").hidden = !hasToken();
  const cores = `${system.cores.length} core${system.cores.length === 1 ? "" : "s"}`;
  setText(document.getElementById("daemon"), `Process ${system.pid}, ${cores}, running since ${dateAndTime(system.started_ns)}`);
}

function showLastEvent() {
  const [event] = state.events;
  const line = document.getElementById("last-event");
  // The list of the events' view is live itself, so that no event is announced twice.
  line.setAttribute("aria-live", location.hash.startsWith("#/events") ? "off" : "polite");
  if (event) setText(line, `${time(event.at_ns)} ${event.text}`);
}

function onChange(changed) {
  if (changed.has("connection")) showConnection();
  if (changed.has("samples")) {
    view?.sample?.();
    if (changed.size === 1) return;
  }
  if (changed.has("system")) showDaemon();
  if (changed.has("events")) showLastEvent();
  if (!state.isLoaded) return;
  if (changed.has("arrays") || changed.has("jobs")) warnings.update();
  if (!view || isMissing || isGone()) show({ isFocused: false });
  else if ([...changed].some((name) => EVERYTHING.has(name))) view.update(changed);
  showHealth();
}

function isDark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

function startTheme() {
  const toggle = document.getElementById("theme");
  const label = () => setText(toggle, isDark() ? "Light theme" : "Dark theme");
  toggle.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("freestone-theme", theme);
    label();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
}

/** A button of the footer that shows an answer of the daemon in a tab of its own. */
function startLink(id, path) {
  const alert = document.getElementById("footer-alert");
  document.getElementById(id).addEventListener("click", async () => {
    setText(alert, "");
    try {
      await openInTab(path);
    } catch (error) {
      setText(alert, explain(error));
    }
  });
}

onTokenNeeded(askForToken);
takeTokenFromAddress();
startTheme();
startLink("openapi", "/v1/openapi.json");
startLink("metrics", "/metrics");
document.getElementById("log-out").addEventListener("click", forgetToken);
// The address is for views: a jump within the page must not change it.
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) {
    takeTokenFromAddress();
  }
  show({ isFocused: true });
});
main.append(h("p", { class: "muted" }, "Loading…"));
subscribe(onChange);
showHealth();
start();
