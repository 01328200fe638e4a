// Number formats for people.

const WHOLE = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat('en-US', { notation: 'compact', maximumFractionDigits: 1 });

export function count(value) {
  if (value == null) return '–';
  return value < 100_000 ? WHOLE.format(value) : SHORT.format(value);
}

/** Formats a rate per second. */
export function rate(value) {
  if (value == null) return '–';
  if (value === 0) return '0';
  return value < 9.95 ? value.toFixed(1) : count(Math.round(value));
}

export function millis(value) {
  if (value == null) return '–';
  if (value < 0.995) return `${Math.max(1, Math.round(value * 1000))} µs`;
  if (value < 9.95) return `${value.toFixed(1)} ms`;
  return value < 10_000 ? `${Math.round(value)} ms` : duration(value);
}

export function duration(ms) {
  if (ms == null) return '–';
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} days`;
}

export function bytes(value) {
  if (value == null) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function percent(share) {
  return share == null ? '–' : `${Math.round(share * 100)} %`;
}

/** Formats an RFC 3339 time as local time of day. */
export function clock(at) {
  const date = new Date(at);
  return Number.isNaN(date.getTime()) ? String(at) : date.toLocaleTimeString('en-GB');
}

export function word(name) {
  return String(name).replaceAll('_', ' ');
}

export function sum(object) {
  return Object.values(object ?? {}).reduce((total, value) => total + value, 0);
}

export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;
