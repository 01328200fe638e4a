// The one connection that is open all the time. It comes back by itself, and tells what became of it.

import { openStream } from './api.js';

/** Events of the past that are asked for. */
const PAST_MAX = 500;

/** How long the next try waits, try after try. */
const RETRY_MS = [250, 500, 1000, 2000, 4000];

/** A connection that says nothing for so long is given up: the state of the bulkheads comes every second. */
const SILENCE_MS = 10_000;

/**
 * `on.state(name, since)` hears `connecting`, `live`, `stuck`, `lost`; `on.hello(hello, isAnother)` who is there
 * and whether it is another run of the supervisor; `on.bulkheads`, `on.event`, `on.missed` what it says.
 */
export class Stream {
  constructor(on) {
    this.on = on;
    this.tries = 0;
    this.seq = 0;
    this.started = null;
    this.changedAt = Date.now();
    this.open();
  }

  open() {
    this.source = openStream(PAST_MAX);
    this.listen('hello', (hello) => this.greet(hello));
    this.listen('bulkheads', (told) => {
      this.become('live');
      this.on.bulkheads(told);
    });
    this.listen('event', (event) => this.take(event));
    this.listen('missed', (missed) => this.on.missed(missed.count));
    this.listen('stuck', () => this.become('stuck'));
    this.source.onerror = () => this.lose();
    this.watchSilence();
  }

  listen(kind, then) {
    this.source.addEventListener(kind, (message) => {
      this.watchSilence();
      then(JSON.parse(message.data));
    });
  }

  greet(hello) {
    const isAnother = this.started !== hello.started;
    if (isAnother) this.seq = 0;
    const isFirst = this.started === null;
    this.started = hello.started;
    this.on.hello(hello, isAnother && !isFirst);
  }

  /** Those of before are told again after each connection. */
  take(event) {
    if (event.seq <= this.seq) return;
    this.seq = event.seq;
    this.on.event(event);
  }

  watchSilence() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.lose(), SILENCE_MS);
  }

  lose() {
    clearTimeout(this.silence);
    this.source.close();
    this.become('lost');
    const wait = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)];
    this.tries += 1;
    // A room full of dashboards does not come back in step.
    setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
  }

  become(state) {
    if (state !== 'lost') this.tries = 0;
    if (this.state === state) return;
    this.state = state;
    this.changedAt = Date.now();
    this.on.state(state);
  }
}
