// What was seen of each bulkhead, second by second. Nothing here touches the page.

import { sum } from './format.js';

/** Seconds that are kept, one sample each. */
export const SAMPLES_MAX = 600;

/** Samples that a rate is taken over, so that it is calm. */
const RATE_SAMPLES = 3;

/** What is counted, as the cards tell it. */
export const COUNTED = ['ok', 'rejected', 'failed', 'late', 'crashed'];

const counters = (bulkhead) => ({
  ok: bulkhead.done,
  rejected: sum(bulkhead.rejected),
  failed: bulkhead.failed,
  late: bulkhead.deadline_exceeded,
  crashed: bulkhead.crashed,
});

/** 0 to 1 is the share of permits taken, 1 to 2 that and the share of the queue. */
function load({ in_flight: inFlight, limit, queued, queue_capacity: capacity }) {
  const taken = limit > 0 ? Math.min(1, inFlight / limit) : inFlight > 0 ? 1 : 0;
  return queued > 0 ? 1 + Math.min(1, queued / Math.max(capacity, 1)) : taken;
}

export class History {
  constructor() {
    this.byName = new Map();
  }

  /** Takes a snapshot of all bulkheads in; those that are gone are forgotten. */
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
    // Two at once were held up on the way: the newer one stands.
    if (last && at - last.at < 200) samples.pop();
    sample.gained = gained(samples.at(-1), sample);
    samples.push(sample);
    if (samples.length > SAMPLES_MAX) samples.shift();
    this.byName.set(bulkhead.name, samples);
  }

  of(name) {
    return this.byName.get(name) ?? [];
  }

  /** By the second, over the last few samples; `null` while nothing is known. */
  rates(name) {
    const lately = this.of(name).slice(-RATE_SAMPLES).filter((sample) => sample.gained);
    const seconds = lately.reduce((total, sample) => total + sample.gained.seconds, 0);
    const rate = (what) => lately.reduce((total, sample) => total + sample.gained[what], 0) / seconds;
    return Object.fromEntries(COUNTED.map((what) => [what, seconds > 0 ? rate(what) : null]));
  }
}

/** What was counted since the sample before. A counter that went back is that of another run: not known. */
function gained(before, now) {
  if (!before) return null;
  const seconds = (now.at - before.at) / 1000;
  const gains = COUNTED.map((what) => [what, now.total[what] - before.total[what]]);
  if (seconds <= 0 || gains.some(([, gain]) => gain < 0)) return null;
  return { seconds, ...Object.fromEntries(gains) };
}
