// Volumes: the list, which stays quick with a thousand of them, the groups, and one volume with its plots.

import { address, h, link, links, newId, setText } from "./dom.js";
import { bandwidth, bytes, count, counted, latency } from "./format.js";
import { DayPlots } from "./day.js";
import { ALL } from "./history.js";
import { Toolbar } from "./menu.js";
import { baseLink, button, Message, section } from "./parts.js";
import { Plots, sparkline, peak } from "./plots.js";
import { groupTable, limitedText, minText, qosText } from "./qos.js";
import { find, history, refreshNow, state } from "./store.js";
import { Facts, Table } from "./table.js";
import { createVolume, deleteVolume, growVolume, moveVolume, renameVolume, setQos } from "./volume-actions.js";

const series = (volume) => history.volumes.get(volume.name);
const iops = (volume) => history.together(series(volume), 0);
const rate = (volume) => history.together(series(volume), 2);

const meanLatency = (volume) => history.meanLatency([series(volume)]);

function volumeTable() {
  const live = (label, value, format) => ({ label, isNumber: true, sort: value, live: (volume, cell) => setText(cell, format(value(volume))) });
  return new Table({
    caption: "Volumes",
    empty: "No volumes yet.",
    key: (volume) => volume.uuid || volume.name,
    columns: [
      { label: "Name", isHeader: true, sort: (volume) => volume.name, depends: (volume) => volume.name, nodes: (volume) => link(address("volumes", volume.name), volume.name) },
      { label: "Size", isNumber: true, sort: (volume) => volume.size_bytes, text: (volume) => bytes(volume.size_bytes) },
      { label: "On", sort: (volume) => volume.backing, depends: (volume) => volume.backing, nodes: (volume) => baseLink(volume.backing) },
      { label: "QoS", text: (volume) => qosText(volume.qos) },
      { label: "Group", sort: (volume) => volume.group ?? "", text: (volume) => volume.group ?? "–" },
      { label: "Exports", depends: (volume) => volume.exports, nodes: (volume) => links("exports", volume.exports) },
      { label: "IOPS", isNumber: true, sort: iops, live: (volume, cell) => sparkline(cell, history, series(volume), [0, 1], peak(history, series(volume), 0, 1), count(iops(volume))) },
      live("Bandwidth", rate, bandwidth),
      live("Mean latency", meanLatency, latency),
    ],
  });
}

export function openVolumes(query) {
  const on = query.get("on") ?? "";
  const message = new Message();
  const table = volumeTable();
  const plots = new Plots();
  const groupMessage = new Message();
  const groups = groupTable(groupMessage);
  const filterId = newId("filter");
  const filter = h("input", { type: "search", id: filterId, autocomplete: "off", spellcheck: "false", value: query.get("filter") ?? "" });
  const shown = h("p", { role: "status", class: "muted" });

  const applyFilter = () => {
    const text = filter.value.trim().toLowerCase();
    const holds = (value) => value !== null && value !== undefined && value.toLowerCase().includes(text);
    const n = table.filter((volume) => (on === "" || volume.backing === on)
      && (text === "" || holds(volume.name) || holds(volume.backing) || holds(volume.group) || volume.exports.some(holds) || holds(volume.uuid)));
    setText(shown, n === state.volumes.length ? counted(n, "volume") : `${n} of ${counted(state.volumes.length, "volume")} shown`);
  };
  filter.addEventListener("input", applyFilter);

  return {
    title: on === "" ? "Volumes" : `Volumes on ${on}`,
    element: h("div", null,
      h("div", { class: "toolbar" },
        button("New volume…", () => createVolume(message, on || undefined), { className: "primary" }),
        h("label", { for: filterId }, "Filter"), filter, shown, on === "" ? null : link("#/volumes", "Show all volumes")),
      message.element,
      on === "" ? section("All volumes together", plots.element) : null,
      section("Volumes", table.element),
      section("Groups", h("div", { class: "toolbar" }, button("New group…", groups.create)), groupMessage.element, groups.table.element)),
    update(changed) {
      if (changed.has("volumes") || changed.has("arrays") || changed.has("devices")) {
        table.update(state.volumes);
        applyFilter();
      }
      if (changed.has("groups")) groups.table.update(state.groups);
    },
    sample() {
      plots.draw(history, history.volumes.get(ALL), "all volumes together");
      table.sample();
    },
    close() {
      table.close();
      plots.close();
    },
  };
}

/** The view of a volume; nothing if there is none of this name. */
export function openVolume(name) {
  if (!find("volumes", name)) return null;
  const volume = () => find("volumes", name);
  const message = new Message();
  const facts = new Facts("Volume");
  const plots = new Plots();
  const day = new DayPlots(`volumes/${name}`, name);

  const rename = async () => {
    const renamed = await renameVolume(message, volume());
    if (renamed !== null && renamed !== name) location.replace(address("volumes", renamed));
  };
  const destroy = async () => {
    if (!(await deleteVolume(message, volume()))) return;
    location.hash = "#/volumes";
    await refreshNow("volumes", "arrays", "devices", "groups", "exports");
  };

  const setWaits = () => facts.set("Waits for limits", limitedText(history.limited(history.volumes.get(name))));

  const toolbar = new Toolbar(name);
  toolbar.update([
    { label: "Grow…", run: () => growVolume(message, volume()) }, { label: "Set QoS…", run: () => setQos(message, volume()) },
    { label: "Rename…", run: rename }, { label: "Move…", run: () => moveVolume(message, volume()) }, { label: "Delete…", run: destroy, isDangerous: true },
  ]);

  return {
    title: `Volume ${name}`,
    element: h("div", null, h("div", { class: "panel" }, facts.element),
      toolbar.element, message.element, section("Last two minutes", plots.element), section("History", day.element)),
    update() {
      const now = volume();
      if (!now) return;
      facts.set("Size", bytes(now.size_bytes));
      facts.set("On", now.moving_to ? h("span", null, baseLink(now.backing), ", moving to ", baseLink(now.moving_to)) : baseLink(now.backing), `${now.backing} ${now.moving_to ?? ""}`);
      facts.set("Copy of", now.copying_from ? `${now.copying_from}${now.error ? `: ${now.error}` : ""}` : "–");
      facts.set("QoS", qosText(now.qos));
      facts.set("Group", now.group ?? "–");
      facts.set("Guaranteed minimum", minText(now.min_qos));
      setWaits();
      facts.set("Exports", links("exports", now.exports), now.exports);
      facts.set("Extents", String(now.extents));
      facts.set("UUID", now.uuid);
    },
    sample() {
      plots.draw(history, history.volumes.get(name), name);
      setWaits();
    },
    close() {
      plots.close();
      day.close();
    },
  };
}
