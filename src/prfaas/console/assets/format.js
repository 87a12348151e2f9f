// Numbers in words: rates, sizes, durations, counts. Pure.

const GROUPS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits, without an exponent: 0.123, 1.23, 12.3, 123. */
function threeDigits(value) {
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

function scaled(value, base, units) {
  let rank = 0;
  let size = Math.abs(value);
  // 999.5 would be printed as 1000.
  while (size >= base * 0.9995 && rank < units.length - 1) {
    size /= base;
    rank += 1;
  }
  return { number: Math.sign(value) * size, unit: units[rank], divisor: base ** rank };
}

/** 1234567 becomes "1,234,567". */
export function count(value) {
  return GROUPS.format(value);
}

/** 19412 becomes "19.4k". */
export function short(value) {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-";
  const { number, unit } = scaled(value, 1000, ["", "k", "M", "G", "T"]);
  if (unit === "") return Number.isInteger(number) ? String(number) : threeDigits(number);
  return threeDigits(number) + unit;
}

export function tokens(value) {
  if (!Number.isFinite(value)) return "no limit";
  return `${short(Math.round(value))} tokens`;
}

const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(value) {
  const { number, unit } = scaled(value, 1000, BYTES);
  return `${unit === "B" ? number.toFixed(0) : threeDigits(number)} ${unit}`;
}

const RATES = ["bps", "kbps", "Mbps", "Gbps", "Tbps"];

/** Bits per second. */
export function rate(bps) {
  if (!(bps > 0)) return "0 bps";
  const { number, unit } = scaled(bps, 1000, RATES);
  return `${threeDigits(number)} ${unit}`;
}

/** "3.2 of 10 Gbps": both numbers in the unit of the capacity, so that they compare at a glance. */
export function rateOf(bps, capacityBps) {
  if (!(capacityBps > 0)) return rate(bps);
  const { number, unit, divisor } = scaled(capacityBps, 1000, RATES);
  const used = bps / divisor;
  const digits = used > 0 && used < 0.005 ? "<0.01" : trimmed(used);
  return `${digits} of ${trimmed(number)} ${unit}`;
}

function trimmed(value) {
  const text = threeDigits(value);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.001) return "<1 ms";
  if (size < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (size < 99.95) return `${trimmed(seconds)} s`;
  const whole = Math.round(size);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function percent(share) {
  if (!Number.isFinite(share)) return "-";
  const value = share * 100;
  if (value > 0 && value < 1) return "<1%";
  return `${value.toFixed(value < 9.95 && value > 0 ? 1 : 0)}%`.replace(".0%", "%");
}

/** A tick of an axis is a round value: "30.0 Gbps" becomes "30 Gbps", and "2.50" becomes "2.5". */
export function rounded(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

/** Requests per second. */
export function perSecond(value) {
  return `${trimmed(value)}/s`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

function twoDigits(value) {
  return String(value).padStart(2, "0");
}

/** The time of day, in the reader's time zone. */
export function timeOfDay(epochSeconds) {
  const date = new Date(epochSeconds * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map(twoDigits).join(":");
}

/** A time since the start of a run: "12:05", or "1:12:05". */
export function runTime(seconds) {
  const whole = Math.max(0, Math.floor(seconds + 1e-9));
  const hours = Math.floor(whole / 3600);
  const rest = `${twoDigits(Math.floor((whole % 3600) / 60))}:${twoDigits(whole % 60)}`;
  return hours > 0 ? `${hours}:${rest}` : rest;
}

/** A link's name, as events and the requests' log write it. */
export function linkName(link) {
  return `${link.source} -> ${link.target}`;
}

/** The same with a real arrow, for people. */
export function linkLabel(link) {
  return `${link.source} → ${link.target}`;
}
