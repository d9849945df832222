// The overview: health, jobs, and the picture of all objects.

import { h, link, SIGNS } from "./dom.js";
import { FirstSteps } from "./first-steps.js";
import { bytes, count, bandwidth, counted } from "./format.js";
import { problems } from "./health.js";
import { ALL } from "./history.js";
import { drawMap } from "./map.js";
import { figure, JobList, Message, section } from "./parts.js";
import { Facts } from "./table.js";
import { history, state } from "./store.js";

// The temperature of a drive changes all the time.
const withoutDrive = ({ drive: _, ...member }) => member;

export function openOverview() {
  const steps = new FirstSteps(new Message());
  const list = h("ul", { class: "problems", "aria-label": "Problems" });
  const facts = new Facts("Totals", { class: "facts figures" });
  const jobs = new JobList();
  const picture = h("div", { class: "picture" });
  let drawn = "";
  const show = (name, number, second) => facts.set(name, figure(number, second), [number, second]);

  const updateHealth = () => {
    const all = problems();
    const signature = JSON.stringify(all);
    if (list.signature === signature) return;
    list.signature = signature;
    list.hidden = all.length === 0;
    list.replaceChildren(...all.map((problem) => h("li", { class: problem.look },
      h("span", { "aria-hidden": "true", class: "sign" }, SIGNS[problem.look]), " ", link(problem.href, problem.text))));
  };

  const updateTotals = () => {
    const capacity = state.arrays.reduce((sum, array) => sum + array.capacity_bytes, 0);
    const free = state.arrays.reduce((sum, array) => sum + (array.free_bytes ?? 0), 0);
    show("Arrays", count(state.arrays.length), `${bytes(capacity)}, ${bytes(free)} free`);
    show("Volumes", count(state.volumes.length), bytes(state.volumes.reduce((sum, volume) => sum + volume.size_bytes, 0)));
    const clients = state.exports.reduce((sum, item) => sum + (item.traffic?.clients ?? 0), 0);
    show("Exports", count(state.exports.length), counted(clients, "client"));
  };

  const updatePicture = () => {
    const { arrays, devices, volumes, exports } = state;
    const signature = JSON.stringify([
      arrays.map((array) => [array.name, array.level, array.state, array.redundancy_left, [...array.members, ...array.spares].map(withoutDrive)]),
      devices.map((device) => [device.name, device.capacity_bytes, device.error]),
      volumes.map((volume) => [volume.name, volume.backing, volume.size_bytes, volume.exports]),
      exports.map((item) => [item.name, item.kind, item.state, item.volumes]),
    ]);
    if (drawn === signature) return;
    drawn = signature;
    const focused = picture.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const isEmpty = arrays.length + devices.length + exports.length === 0;
    picture.replaceChildren(isEmpty ? h("p", { class: "muted" }, "No objects yet.") : drawMap(state));
    if (focused !== null) [...picture.querySelectorAll("a")].find((node) => node.getAttribute("href") === focused)?.focus();
  };

  return {
    title: "Overview",
    element: h("div", null,
      h("div", { class: "panel health" }, list, facts.element),
      steps.element, section("Jobs", jobs.element), section("Topology", picture)),
    update() {
      updateHealth();
      updateTotals();
      steps.update();
      jobs.update();
      updatePicture();
    },
    sample() {
      const all = history.volumes.get(ALL);
      const [reads, writes, read, written] = [0, 1, 2, 3].map((metric) => history.now(all, metric));
      show("IOPS", count(reads + writes), `${count(reads)} read, ${count(writes)} write`);
      show("Bandwidth", bandwidth(read + written), `${bandwidth(read)} read, ${bandwidth(written)} write`);
    },
  };
}
