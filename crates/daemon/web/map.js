// The picture of all objects and their connections: devices and members, arrays, volumes, exports, from left to right.
//
// Each array or device has a band of the picture, with its members on the left and its volumes and exports on the right.
// Healthy members are drawn as one, and other healthy parts if a band would get too high. Each node is a link; its name has
// the visible text, then the meaning of its lines (`more`).

import { address, look, SIGNS, svg } from "./dom.js";
import { bytes, counted, listed, some } from "./format.js";
import { arrayLook } from "./redundancy.js";

const WIDTH = 1240;
const NODE_WIDTH = 250;
const NODE_HEIGHT = 40;
const ROW = 48;
const GAP = 14; // between bands
const HEAD = 28;
const COLUMNS = [0, 330, 660, 990];
const MOST_NODES = 8; // of a column in a band
const MOST_LETTERS = 27; // of a name
const MOST_SMALL_LETTERS = 34; // of the line below

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const base = (path) => path.split("/").at(-1) || path;

function memberNodes(array) {
  const node = (member) => ({
    name: member.device ? base(member.device) : "no device", below: `slot ${member.slot}, ${member.state}`, state: member.state,
    more: `member of array ${array.name}`, href: address("arrays", array.name),
  });
  let members = array.members.map(node);
  const sound = members.filter((member) => look(member.state) === "good");
  if (sound.length > 1) {
    members = members.filter((member) => look(member.state) !== "good");
    members.push({
      name: counted(sound.length, "member"), below: "live", state: "live", href: address("arrays", array.name),
      more: `members of array ${array.name}`,
    });
  }
  if (array.spares.length > 0) {
    members.push({
      name: counted(array.spares.length, "spare"), below: some(array.spares.map((spare) => base(spare.device ?? "missing")), 3), state: "spare",
      href: address("arrays", array.name), more: `of array ${array.name}`,
    });
  }
  return members;
}

function volumeNodes(name, volumes) {
  if (volumes.length > MOST_NODES) {
    const size = volumes.reduce((sum, volume) => sum + volume.size_bytes, 0);
    return [{
      name: counted(volumes.length, "volume"), below: bytes(size), state: "", serves: new Set(volumes.map((volume) => volume.name)),
      href: `#/volumes?on=${encodeURIComponent(name)}`, more: `together, on ${name}`,
    }];
  }
  return volumes.map((volume) => ({
    name: volume.name, below: bytes(volume.size_bytes), state: "", serves: new Set([volume.name]), href: address("volumes", volume.name),
    more: `volume on ${volume.backing}, ${volume.exports.length > 0 ? `served by ${some(volume.exports)}` : "not served"}`,
  }));
}

function exportNode(item) {
  return {
    name: item.name, below: `${item.kind}, ${item.state}`, state: item.state, of: item.volumes, href: address("exports", item.name),
    more: `export of ${some(item.volumes)}`,
  };
}

function exportNodes(exports) {
  const nodes = exports.map(exportNode);
  const sound = nodes.filter((node) => look(node.state) === "good");
  if (nodes.length <= MOST_NODES || sound.length < 2) return nodes;
  const others = nodes.filter((node) => look(node.state) !== "good").slice(0, MOST_NODES);
  const together = {
    name: counted(sound.length, "export"), below: "active", state: "active", of: sound.flatMap((node) => node.of), href: "#/exports",
    more: "together",
  };
  return [...others, together];
}

/** The bands: for each array and device its nodes by column. */
function bands({ arrays, devices, volumes, exports }) {
  const homes = new Map(); // the band of each name
  const all = [];
  const add = (name, left, middle) => {
    const own = volumes.filter((volume) => volume.backing === name);
    const band = { name, columns: [left, middle, volumeNodes(name, own), []], exports: [] };
    for (const served of [name, ...own.map((volume) => volume.name)]) homes.set(served, band);
    all.push(band);
  };
  for (const array of arrays) {
    const left = array.parity > 0 && Number.isInteger(array.redundancy_left) ? `, ${array.redundancy_left} may fail` : "";
    const below = `RAID ${array.level ?? "?"}, ${array.state}${left}`;
    const more = `array of ${counted(array.members.length, "member")} with ${counted(array.volumes.length, "volume")}`;
    add(array.name, memberNodes(array), [{ name: array.name, below, more, state: array.state, looks: arrayLook(array), serves: new Set([array.name]), href: address("arrays", array.name) }]);
  }
  for (const device of devices) {
    const state = device.error ? "not open" : "open";
    add(device.name, [{
      name: device.name, below: `${bytes(device.capacity_bytes)}, ${state}`, state, serves: new Set([device.name]), href: address("devices", device.name),
      more: "device",
    }], []);
  }
  const homeless = { name: "", columns: [[], [], [], []], exports: [] };
  for (const item of exports) (homes.get(item.volumes.find((name) => homes.has(name))) ?? homeless).exports.push(item);
  if (homeless.exports.length > 0) all.push(homeless);
  for (const band of all) band.columns[3] = exportNodes(band.exports);
  return all;
}

function layOut(all) {
  let y = HEAD;
  for (const band of all) {
    const rows = Math.max(...band.columns.map((column) => column.length), 1);
    band.columns.forEach((column, i) => column.forEach((node, row) => {
      node.x = COLUMNS[i];
      node.y = y + ((rows - column.length) / 2 + row) * ROW;
    }));
    y += rows * ROW + GAP;
  }
  return y;
}

function edge(from, to, state) {
  const [x1, y1, x2, y2] = [from.x + NODE_WIDTH, from.y + NODE_HEIGHT / 2, to.x, to.y + NODE_HEIGHT / 2];
  const bend = (x2 - x1) / 2;
  const element = svg("path", { class: `edge ${state ? look(state) : "idle"}`, d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
  return { from, to, element };
}

/** Marks the path of the node under the pointer or with the focus, from drives to clients. */
function startTrace(map, drawn) {
  const steps = [["to", "from"], ["from", "to"]]; // to the left, to the right
  const trace = (node) => {
    const marked = new Set([node.element]);
    for (const [here, there] of steps) {
      const open = [node];
      for (let at = open.pop(); at; at = open.pop()) {
        for (const step of drawn.filter((other) => other[here] === at && !marked.has(other.element))) {
          marked.add(step.element).add(step[there].element);
          open.push(step[there]);
        }
      }
    }
    return marked;
  };
  const show = (event) => {
    const element = event.type === "pointerleave" || event.type === "focusout" ? null : event.target.closest(".node");
    const marked = element ? trace(element.node) : new Set();
    map.classList.toggle("traced", marked.size > 1);
    for (const part of map.querySelectorAll(".node, .edge")) part.classList.toggle("on-path", marked.has(part));
  };
  for (const name of ["pointerover", "pointerleave", "focusin", "focusout"]) map.addEventListener(name, show);
}

function edges(all) {
  const sources = all.flatMap((band) => band.columns.slice(0, 3).flat()).filter((node) => node.serves);
  const bySource = new Map(sources.flatMap((node) => [...node.serves].map((name) => [name, node])));
  const drawn = [];
  for (const { columns: [left, middle, volumes, exports] } of all) {
    const trunk = middle[0] ?? left[0];
    if (middle[0]) for (const member of left) drawn.push(edge(member, middle[0], member.state));
    for (const volume of volumes) drawn.push(edge(trunk, volume, ""));
    for (const item of exports) {
      for (const source of new Set(item.of.map((name) => bySource.get(name)).filter(Boolean))) drawn.push(edge(source, item, item.state));
    }
  }
  return drawn;
}

function drawNode(node) {
  const looks = node.looks ?? (node.state ? look(node.state) : "plain");
  const left = node.state ? 28 : 12;
  const says = `${node.name}, ${node.below}, ${node.more}`;
  node.element = svg("a", { href: node.href, class: `node ${looks}`, "aria-label": says },
    svg("title", null, says),
    svg("rect", { x: node.x + 0.5, y: node.y + 0.5, width: NODE_WIDTH - 1, height: NODE_HEIGHT - 1, rx: 4 }),
    node.state ? svg("text", { x: node.x + 10, y: node.y + 17, class: "sign" }, SIGNS[looks]) : null, " ",
    svg("text", { x: node.x + left, y: node.y + 17, class: "name" }, short(node.name, MOST_LETTERS)), " ",
    svg("text", { x: node.x + left, y: node.y + 32, class: "below" }, short(node.below, MOST_SMALL_LETTERS)));
  node.element.node = node;
  return node.element;
}

/** Draw the picture. `lists` are those of the store. */
export function drawMap(lists) {
  const all = bands(lists);
  const height = layOut(all);
  const heads = ["Devices and members", "Arrays", "Volumes", "Exports"].map((text, i) => svg("text", { x: COLUMNS[i], y: 14, class: "head" }, text));
  const counts = [[lists.devices, "device"], [lists.arrays, "array"], [lists.volumes, "volume"], [lists.exports, "export"]]
    .map(([list, noun]) => counted(list.length, noun));
  const drawn = edges(all);
  const map = svg("svg", { class: "map", viewBox: `0 0 ${WIDTH} ${height}`, role: "group", "aria-label": `Objects: ${listed(counts)}` },
    svg("g", { "aria-hidden": "true" }, heads), svg("g", { "aria-hidden": "true" }, drawn.map(({ element }) => element)),
    all.map((band) => band.columns.flat().map(drawNode)));
  startTrace(map, drawn);
  return map;
}
