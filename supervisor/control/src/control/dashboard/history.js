// Samples of each bulkhead, one per second. This module does not modify the page.

import { sum } from './format.js';

/** Maximum number of samples, one per second. */
export const SAMPLES_MAX = 600;

/** Number of samples to average a rate over. */
const RATE_SAMPLES = 3;

/** Counters of a sample, named as on the cards. */
export const COUNTED = ['ok', 'rejected', 'failed', 'late', 'crashed'];

const counters = (bulkhead) => ({
  ok: bulkhead.done,
  rejected: sum(bulkhead.rejected),
  failed: bulkhead.failed,
  late: bulkhead.deadline_exceeded,
  crashed: bulkhead.crashed,
});

/** Returns the load: 0 to 1 is the share of permits in use; 1 to 2 adds the share of the queue in use. */
function load({ in_flight: inFlight, limit, queued, queue_capacity: capacity }) {
  const taken = limit > 0 ? Math.min(1, inFlight / limit) : inFlight > 0 ? 1 : 0;
  return queued > 0 ? 1 + Math.min(1, queued / Math.max(capacity, 1)) : taken;
}

export class History {
  constructor() {
    this.byName = new Map();
  }

  /** Adds a snapshot of all bulkheads. Removed bulkheads are dropped. */
  add(at, bulkheads) {
    const names = new Set(bulkheads.map((bulkhead) => bulkhead.name));
    for (const name of this.byName.keys()) if (!names.has(name)) this.byName.delete(name);
    for (const bulkhead of bulkheads) this.addOne(at, bulkhead);
  }

  addOne(at, bulkhead) {
    const samples = this.of(bulkhead.name);
    const { limit, in_flight: inFlight, queued } = bulkhead;
    const sample = { at, total: counters(bulkhead), load: load(bulkhead), limit, inFlight, queued };
    const last = samples.at(-1);
    // Two snapshots that arrive at almost the same time were delayed in transit. The newer one replaces the older one.
    if (last && at - last.at < 200) samples.pop();
    sample.gained = gained(samples.at(-1), sample);
    samples.push(sample);
    if (samples.length > SAMPLES_MAX) samples.shift();
    this.byName.set(bulkhead.name, samples);
  }

  of(name) {
    return this.byName.get(name) ?? [];
  }

  /** Returns rates per second over the last few samples; `null` while they are unknown. */
  rates(name) {
    const lately = this.of(name).slice(-RATE_SAMPLES).filter((sample) => sample.gained);
    const seconds = lately.reduce((total, sample) => total + sample.gained.seconds, 0);
    const rate = (what) => lately.reduce((total, sample) => total + sample.gained[what], 0) / seconds;
    return Object.fromEntries(COUNTED.map((what) => [what, seconds > 0 ? rate(what) : null]));
  }
}

/** Returns the increase of the counters since the previous sample; unknown if a counter decreased after a restart. */
function gained(before, now) {
  if (!before) return null;
  const seconds = (now.at - before.at) / 1000;
  const gains = COUNTED.map((what) => [what, now.total[what] - before.total[what]]);
  if (seconds <= 0 || gains.some(([, gain]) => gain < 0)) return null;
  return { seconds, ...Object.fromEntries(gains) };
}
