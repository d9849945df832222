// Command lines of `freestone` that do the same as a dialog, quoted for a POSIX shell and without secrets.

const UNITS = ["", "K", "M", "G", "T"]; // binary, as the command line reads them
const HIDDEN = "***";
// User and password of a URI, and keys in the formats of NVMe. Options name files that hold secrets; a value may still be one.
const SECRETS = /(?<=:\/\/)[^/?#@\s]+(?=@)|\b(?:DHHC-1|NVMeTLSkey-1):[^\s,]+/g;
const PLAIN = /^[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*$/;

/** `--name value`; nothing without a value. */
export function option(name, value) {
  if (value === undefined || value === "") return [];
  return String(value).startsWith("-") ? [`--${name}=${value}`] : [`--${name}`, String(value)];
}

/** `--name`, if it is set. */
export const flag = (name, isSet) => (isSet ? [`--${name}`] : []);

/** Operands, which may begin with a dash. They come last. */
export const operands = (...values) => (values.some((value) => value.startsWith("-")) ? ["--", ...values] : values);

/** Bytes as the command line reads them, exactly: `20G`. */
export function size(bytes) {
  if (bytes === undefined) return undefined;
  let unit = 0;
  while (bytes > 0 && bytes % 1024 === 0 && unit + 1 < UNITS.length) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes}${UNITS[unit]}`;
}

const quoted = (word) => (PLAIN.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** The line of these arguments, nested as they may be, and whether a secret was left out. */
export function commandLine(args) {
  const words = ["freestone", ...args.flat(Infinity)];
  const shown = words.map((word) => word.replace(SECRETS, HIDDEN));
  return { text: shown.map(quoted).join(" "), isWithoutSecret: shown.some((word, i) => word !== words[i]) };
}
