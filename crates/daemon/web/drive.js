// Drives of the daemon's host, below devices and members.

import { copyable } from "./copy.js";
import { badge } from "./dom.js";
import { bytes, isKnown } from "./format.js";

const WARNINGS = {
  "spare-low": "spare capacity is low", temperature: "temperature", "reliability-degraded": "reliability is degraded", "read-only": "media are read-only",
  "backup-failed": "backup of volatile memory has failed", "memory-region-read-only": "persistent memory region is read-only",
};
// As the daemon counts it for its health.
const WORN_PERCENT = 90;

/** Whether the drive warns, or has little spare capacity or endurance left. */
export function isAtRisk(drive) {
  const health = drive?.health;
  return Boolean(health) && (health.warnings.length > 0 || health.spare_percent < health.spare_threshold_percent || health.wear_percent >= WORN_PERCENT);
}

/** Model and serial number, as far as they are known. */
export const driveName = (drive) => [drive?.model, drive?.serial].filter(isKnown).join(" ");

/** Columns of a table whose rows have a `drive`. */
export const driveColumns = () => [
  { label: "Drive", text: (row) => driveName(row.drive) || "–" },
  { label: "Wear", isNumber: true, depends: (row) => [row.drive?.health?.wear_percent, isAtRisk(row.drive)], nodes: (row) => [isAtRisk(row.drive) ? badge("at risk") : null, isAtRisk(row.drive) ? " " : null, wearText(row.drive)] },
  { label: "Temperature", isNumber: true, isShort: true, text: (row) => temperatureText(row.drive) },
];

const wearText = (drive) => (drive?.health ? `${drive.health.wear_percent} %` : "–");
const temperatureText = (drive) => (isKnown(drive?.temperature_celsius) ? `${drive.temperature_celsius} °C` : "–");

function healthText({ spare_percent, spare_threshold_percent, media_errors, warnings }) {
  const words = warnings.map((warning) => WARNINGS[warning] ?? warning);
  return `spare capacity ${spare_percent} % (warns below ${spare_threshold_percent} %), media errors ${media_errors}, ${words.length > 0 ? `warnings: ${words.join(", ")}` : "no warnings"}`;
}

/** Show a drive in facts. Values that are not known are left out. */
export function setDrive(facts, drive) {
  if (!drive) return;
  const set = (label, value, depends) => { if (isKnown(value)) facts.set(label, value, depends); };
  set("Drive", drive.model);
  set("Serial number", drive.serial && copyable(drive.serial), drive.serial);
  set("Firmware", drive.firmware);
  set("Drive size", drive.size_bytes && bytes(drive.size_bytes));
  set("Address", drive.address);
  facts.set("Temperature", temperatureText(drive));
  facts.set("Wear", [isAtRisk(drive) ? [badge("at risk"), " "] : null, wearText(drive)], [isAtRisk(drive), wearText(drive)]);
  facts.set("Drive health", drive.health ? healthText(drive.health) : drive.reason ?? "–");
}
