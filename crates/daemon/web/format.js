// Numbers and times as people read them, and sizes as people write them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE_DECIMAL = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const DATE_AND_CLOCK = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });

/** Whether a value of the API is there. */
export const isKnown = (value) => value !== null && value !== undefined;

/** `1.5 GiB`; a dash for nothing. */
export function bytes(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  let unit = 0;
  while (value >= 1024 && unit + 1 < UNITS.length) {
    value /= 1024;
    unit += 1;
  }
  return `${ONE_DECIMAL.format(value)} ${UNITS[unit]}`;
}

/** `24.1 MiB/s`. */
export function bandwidth(value) {
  return Number.isNaN(value) ? "–" : `${bytes(value)}/s`;
}

/** `1,234`. */
export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return (value < 10 ? ONE_DECIMAL : NUMBER).format(value);
}

/** Nanoseconds as `85 µs` or `1.2 ms`. */
export function latency(ns) {
  if (Number.isNaN(ns)) return "–";
  if (ns < 1e6) return `${(ns < 1e5 ? ONE_DECIMAL : NUMBER).format(ns / 1e3)} µs`;
  if (ns < 1e9) return `${ONE_DECIMAL.format(ns / 1e6)} ms`;
  return `${ONE_DECIMAL.format(ns / 1e9)} s`;
}

/** Seconds as `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Seconds as `5 hours` or `12 days`: an estimate. */
export const days = (seconds) => (seconds < 48 * 3600 ? counted(Math.round(seconds / 3600), "hour") : counted(Math.round(seconds / 86400), "day"));

/** Nanoseconds since 1970 as the time of day, with the date unless it is today's. */
export function time(ns) {
  const date = new Date(ns / 1e6);
  return (date.toDateString() === new Date().toDateString() ? CLOCK : DATE_AND_CLOCK).format(date);
}

/** Nanoseconds since 1970 as date and time of day. */
export const dateAndTime = (ns) => DATE_AND_CLOCK.format(new Date(ns / 1e6));

/** `1 volume`, `2 volumes`. */
export function counted(n, noun) {
  return `${NUMBER.format(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** `a, b and c`. */
export function listed(names) {
  return names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`;
}

/** The first few names, and the number of the others. */
export function some(names, most = 8) {
  if (names.length <= most) return listed(names);
  return `${names.slice(0, most).join(", ")} and ${NUMBER.format(names.length - most)} more`;
}

/** Bytes of `20 GiB`, `20G` or `4096`: units are binary, as on the command line. Throws the reason if it is invalid. */
export function parseBytes(text) {
  const parts = /^([0-9]+(?:\.[0-9]+)?)\s*([KMGTP])?(?:iB)?$|^([0-9]+)\s*B$/i.exec(text.trim());
  if (!parts) throw new Error(`“${text}” is not a size: use 4096, 512 MiB or 20 GiB`);
  const exponent = parts[2] ? "KMGTP".indexOf(parts[2].toUpperCase()) + 1 : 0;
  const value = Number(parts[1] ?? parts[3]) * 1024 ** exponent;
  if (!Number.isSafeInteger(value)) throw new Error(`“${text}” is not a whole number of bytes, or too large`);
  return value;
}

/** A whole number. Throws the reason if it is invalid. */
export function parseCount(text) {
  const plain = text.trim().replaceAll(",", "");
  if (!/^[0-9]+$/.test(plain) || !Number.isSafeInteger(Number(plain))) throw new Error(`“${text}” is not a whole number`);
  return Number(plain);
}

/** A size that parseBytes reads back to the same number. */
export function editableBytes(value) {
  let unit = 0;
  while (value > 0 && value % 1024 === 0 && unit < 5) {
    value /= 1024;
    unit += 1;
  }
  return unit === 0 ? String(value) : `${value} ${UNITS[unit]}`;
}
