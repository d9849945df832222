// Exports: the list, the creation of one, and one export with the commands that attach it.

import { get, patch, post, remove, segment } from "./api.js";
import { DayPlots } from "./day.js";
import { explain } from "./dialog.js";
import { flag, operands, option } from "./command.js";
import { copyable, copyableCommand } from "./copy.js";
import { address, badge, h, hidden, link, setText } from "./dom.js";
import { bandwidth, bytes, count, counted, isKnown, latency, time } from "./format.js";
import { menu, Toolbar } from "./menu.js";
import { button, Message, section } from "./parts.js";
import { bases, exportRates, find, history, refreshNow, state } from "./store.js";
import { Facts, Table } from "./table.js";

const KINDS = ["vhost-user-blk", "ublk", "vduse", "nbd", "nvme-tcp"];

function parseOptions(lines) {
  const options = {};
  for (const line of lines) {
    const at = line.indexOf("=");
    if (at < 1) throw new Error(`“${line}” is not an option: use key=value`);
    options[line.slice(0, at).trim()] = line.slice(at + 1).trim();
  }
  return options;
}

const allOptions = ({ options, socket, listen }) => ({ ...options, ...(socket && { socket }), ...(listen && { listen }) });

/** Ask for a new export; `of` is proposed. */
export function createExport(message, of = "") {
  const names = [...state.volumes, ...bases()].map((item) => item.name);
  return message.dialog({
    title: "New export",
    fields: [
      { name: "name", label: "Name" },
      { name: "kind", label: "Kind", type: "select", value: KINDS[0], options: KINDS.map((kind) => ({ value: kind, label: kind })) },
      { name: "of", label: "Serves", value: of, options: names, hint: "A volume, array or device by name." },
      { name: "more", label: "Further namespaces", type: "lines", isOptional: true, hint: "For nvme-tcp: further volumes, one a line, in the order of their namespaces." },
      { name: "socket", label: "Socket", isOptional: true, placeholder: "/run/freestone/name.sock", hint: "For vhost-user-blk and nbd: a path. Default: the export's name in the daemon's runtime directory." },
      { name: "listen", label: "Listen address", isOptional: true, placeholder: "10.0.0.1:4420", hint: "For nvme-tcp and nbd." },
      { name: "options", label: "Other options", type: "lines", isOptional: true, parse: parseOptions, hint: "One key=value a line, as in freestone serve --export." },
      { name: "read_only", label: "Read-only", type: "checkbox" },
    ],
    action: "Create the export",
    command: ({ name, kind, of, more = [], read_only, ...values }) => ["export", "create", option("kind", kind), [of, ...more].map((served) => option("of", served)),
      Object.entries(allOptions(values)).map(([key, value]) => option("option", `${key}=${value}`)), flag("read-only", read_only), operands(name)],
    submit: async ({ name, kind, of, more = [], read_only, ...values }) => {
      await post("/exports", { name, kind, volumes: [of, ...more], options: allOptions(values), read_only });
      await refreshNow("exports", "volumes", "arrays", "devices");
      return `The export ${name} was created.`;
    },
  });
}

function deleteExport(message, item) {
  const clients = item.traffic?.clients ?? 0;
  return message.dialog({
    title: `Delete the export ${item.name}?`,
    body: [h("p", { class: "warning" }, clients > 0 ? `${counted(clients, "client")} lose${clients === 1 ? "s" : ""} access to ${item.volumes.join(", ")}.` : "No client is connected."),
      h("p", null, "The data is kept.")],
    action: "Delete the export", isDangerous: true,
    command: () => ["export", "delete", operands(item.name)],
    submit: async () => {
      await remove(`/exports/${segment(item.name)}`);
      return `The export ${item.name} was deleted.`;
    },
  });
}

/** Processors of the daemon that an export may be served from. */
const processors = () => (state.system?.cores ?? []).map((core) => core.cpu).filter((cpu) => cpu !== null && cpu !== undefined);

function setProcessors(message, item) {
  const field = (cpu) => ({ name: `cpu${cpu}`, label: `Processor ${cpu}`, type: "checkbox", value: item.cores.includes(cpu) });
  return message.dialog({
    title: `Processors of the export ${item.name}`,
    body: [h("p", null, "Without a choice, all processors of the daemon serve it. Clients stay connected. New connections of NBD and NVMe/TCP use the new processors.")],
    fields: processors().map(field),
    action: "Set processors",
    command: (values) => ["export", "remap", option("cores", processors().filter((cpu) => values[`cpu${cpu}`]).join(",")), operands(item.name)],
    submit: async (values) => {
      const cores = processors().filter((cpu) => values[`cpu${cpu}`]);
      await patch(`/exports/${segment(item.name)}`, { cores });
      await refreshNow("exports");
      return `The export ${item.name} uses ${cores.length > 0 ? counted(cores.length, "processor") : "all processors"}.`;
    },
  });
}

/** What an export serves, as a link. */
function served(name) {
  if (find("volumes", name)) return link(address("volumes", name), name);
  if (find("arrays", name)) return link(address("arrays", name), name);
  if (find("devices", name)) return link(address("devices", name), name);
  return h("span", null, name);
}

const servedList = (item) => item.volumes.flatMap((name, i) => [i > 0 ? ", " : null, served(name)]);
/** Where clients find an export: its socket or address, and for NVMe its NQN. */
const places = (item) => ["socket", "listen", "nqn"].map((key) => item.options[key]).filter(Boolean);

/** The same as nodes, each place with a button that copies it. */
function placeNodes(item) {
  const all = places(item);
  return all.length > 0 ? all.map((place) => h("div", null, copyable(place))) : [item.description ?? "–"];
}

/** The NQNs of the hosts that may connect. */
function hostNodes(hosts) {
  if (!hosts) return ["any"];
  return hosts.length > 0 ? hosts.map((nqn) => h("div", null, copyable(nqn))) : ["none"];
}

export function openExports() {
  const message = new Message();
  const current = (item) => find("exports", item.name) ?? item;
  const table = new Table({
    caption: "Exports",
    empty: "No exports yet.",
    key: (item) => item.name,
    columns: [
      { label: "Name", isHeader: true, sort: (item) => item.name, depends: (item) => item.name, nodes: (item) => link(address("exports", item.name), item.name) },
      { label: "State", sort: (item) => item.state, depends: (item) => [item.state, item.error], nodes: (item) => [badge(item.state), item.error ? h("p", { class: "why" }, item.error) : null] },
      { label: "Kind", isShort: true, sort: (item) => item.kind, text: (item) => item.kind },
      { label: "Serves", depends: (item) => item.volumes.map((name) => [name, Boolean(find("volumes", name))]), nodes: servedList },
      { label: "Address", depends: (item) => [places(item), item.description], nodes: placeNodes },
      { label: "Access", isShort: true, text: (item) => (item.read_only ? "read-only" : "read-write") },
      { label: "Clients", isNumber: true, sort: (item) => item.traffic?.clients ?? -1, text: (item) => count(item.traffic?.clients) },
      { label: "IOPS", isNumber: true, sort: (item) => exportRates.of(item.name).iops, live: (item, cell) => setText(cell, count(exportRates.of(item.name).iops)) },
      { label: "Failed", isNumber: true, sort: (item) => item.traffic?.errors ?? -1, text: (item) => count(item.traffic?.errors) },
      { label: "Actions", depends: (item) => item.name, nodes: (item) => h("div", { class: "buttons" },
        link(address("exports", item.name), ["Attach", hidden(` ${item.name}`)], { class: "button" }),
        menu(item.name, [[{ label: "Delete…", isDangerous: true, run: async () => { if (await deleteExport(message, current(item))) await refreshNow("exports", "volumes"); } }]])) },
    ],
  });
  return {
    title: "Exports",
    element: h("div", null, h("div", { class: "toolbar" }, button("New export…", () => createExport(message), { className: "primary" })), message.element, h("div", { class: "panel" }, table.element)),
    update() { table.update(state.exports); },
    sample() { table.sample(); },
    close() { table.close(); },
  };
}

const attachLine = ([program, text]) => h("div", { class: "attach" }, h("h3", null, program), copyableCommand(text, `for ${program}`));

/** How a client is protected. */
const securityText = ({ is_secured, is_authenticated }) => [is_secured ? "TLS" : null, is_authenticated ? "authenticated" : null].filter(Boolean).join(", ") || "none";

const clientTable = (name) => new Table({
  caption: `Clients of ${name}`,
  empty: "No client is connected.",
  key: (client) => client.place,
  columns: [
    { label: "Host", isHeader: true, text: (client) => client.host ?? "–" },
    { label: "Address", text: (client) => client.address ?? "–" },
    { label: "Queues", isNumber: true, text: (client) => (isKnown(client.queues) ? count(client.queues) : "–") },
    { label: "Security", text: securityText },
    { label: "Read", isNumber: true, text: (client) => bytes(client.read_bytes) },
    { label: "Written", isNumber: true, text: (client) => bytes(client.written_bytes) },
    { label: "Connected since", isShort: true, text: (client) => time(client.since_ns) },
  ],
});

/** The view of an export; nothing if there is none of this name. */
export function openExport(name) {
  if (!find("exports", name)) return null;
  const item = () => find("exports", name);
  const message = new Message();
  const facts = new Facts("Export");
  const attach = h("div");
  const day = new DayPlots(`exports/${name}`, name, { hasLatency: false });
  const clients = clientTable(name);
  let loadedFor = null;
  let isLoading = false;

  // With each look at the daemon, since bytes move; one request at a time.
  const loadClients = async () => {
    if (isLoading) return;
    isLoading = true;
    try {
      const connected = await get(`/exports/${segment(name)}/clients`);
      // The key of a row: clients have no name.
      clients.update(Array.isArray(connected) ? connected.map((client, place) => ({ ...client, place })) : []);
    } catch {
      clients.update([]); // the header says that the daemon does not answer
    } finally {
      isLoading = false;
    }
  };

  // The commands change with the options and the state, but not with each client.
  const loadAttach = async (now) => {
    const signature = JSON.stringify([now.state, now.options, now.volumes, now.description]);
    if (signature === loadedFor) return;
    loadedFor = signature;
    try {
      const { lines } = await get(`/exports/${segment(name)}/attach`);
      const entries = Object.entries(lines);
      attach.replaceChildren(...(entries.length > 0 ? entries.map(attachLine) : [h("p", { class: "muted" }, "No commands.")]));
    } catch (error) {
      attach.replaceChildren(h("p", { class: "error", role: "alert" }, explain(error)));
    }
  };
  const destroy = async () => {
    if (!(await deleteExport(message, item()))) return;
    location.hash = "#/exports";
    await refreshNow("exports", "volumes", "arrays", "devices");
  };

  const toolbar = new Toolbar(name);
  toolbar.update([
    ...(processors().length > 0 ? [{ label: "Processors…", run: () => setProcessors(message, item()) }] : []), { label: "Delete…", run: destroy, isDangerous: true },
  ]);

  return {
    title: `Export ${name}`,
    element: h("div", null, h("div", { class: "panel" }, facts.element),
      toolbar.element, message.element, section("Clients", h("div", { class: "panel" }, clients.element)), section("Attach", attach), section("History", day.element)),
    update() {
      const now = item();
      if (!now) return;
      facts.set("State", [badge(now.state), now.error ? ` ${now.error}` : null], [now.state, now.error]);
      facts.set("Kind", now.kind);
      facts.set("Serves", servedList(now), now.volumes);
      facts.set("Access", now.read_only ? "read-only" : "read-write");
      facts.set("Options", Object.entries(now.options).map(([key, value]) => `${key}=${value}`).join(", ") || "–");
      facts.set("Description", now.description ?? "–");
      facts.set("Address", placeNodes(now), [places(now), now.description]);
      if (now.kind === "nvme-tcp") facts.set("Hosts that may connect", hostNodes(now.hosts), now.hosts ?? "any");
      facts.set("Processors", now.cores.join(", ") || "all");
      const { traffic } = now;
      facts.set("Clients", traffic ? `${count(traffic.clients)} connected, ${count(traffic.connections)} in total` : "–");
      facts.set("Read", traffic ? `${bytes(traffic.read_bytes)} in ${counted(traffic.reads, "request")}` : "–");
      facts.set("Written", traffic ? `${bytes(traffic.written_bytes)} in ${counted(traffic.writes, "request")}` : "–");
      facts.set("Failed requests", count(traffic?.errors));
      loadAttach(now);
      loadClients();
    },
    sample() {
      const rates = exportRates.of(name);
      facts.set("IOPS", count(rates.iops));
      facts.set("Bandwidth", bandwidth(rates.bytes_per_s));
      facts.set("Mean latency of its volumes", latency(history.meanLatency(item()?.volumes.map((volume) => history.volumes.get(volume)) ?? [])));
    },
    close() { day.close(); clients.close(); },
  };
}
