// The permanent connection, which reconnects automatically and reports its state.

import { openStream } from './api.js';

/** Number of past events to request: all that the supervisor keeps. */
const PAST_MAX = 4096;

/** Delays before reconnecting, for consecutive attempts. */
const RETRY_MS = [250, 500, 1000, 2000, 4000];

/** Maximum silence before the connection is closed. The state of the bulkheads normally arrives every second. */
const SILENCE_MS = 10_000;

/**
 * Callbacks in `on`: `state(name, since)` with the state `connecting`, `live`, `stuck` or `lost`;
 * `hello(hello, isAnother)` with the first frame, and true if the supervisor was restarted or upgraded;
 * `bulkheads`, `event` and `missed` with the other frames.
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
    this.listen('hello', (hello) => this.handleHello(hello));
    this.listen('bulkheads', (message) => {
      this.setState('live');
      this.on.bulkheads(message);
    });
    this.listen('event', (event) => this.take(event));
    this.listen('missed', (missed) => this.on.missed(missed.count));
    this.listen('stuck', () => this.setState('stuck'));
    this.source.onerror = () => this.handleError();
    this.watchSilence();
  }

  listen(kind, then) {
    this.source.addEventListener(kind, (message) => {
      this.watchSilence();
      then(JSON.parse(message.data));
    });
  }

  handleHello(hello) {
    const isAnother = this.started !== hello.started;
    if (isAnother) this.seq = 0;
    const isFirst = this.started === null;
    this.started = hello.started;
    this.on.hello(hello, isAnother && !isFirst);
  }

  /** After reconnecting, the supervisor sends past events again. */
  take(event) {
    if (event.seq <= this.seq) return;
    this.seq = event.seq;
    this.on.event(event);
  }

  watchSilence() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.handleError(), SILENCE_MS);
  }

  handleError() {
    clearTimeout(this.silence);
    this.source.close();
    this.setState('lost');
    const wait = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)];
    this.tries += 1;
    // Random delay, so that many dashboards do not reconnect at the same time.
    setTimeout(() => this.open(), wait * (0.75 + Math.random() / 2));
  }

  setState(state) {
    if (state !== 'lost') this.tries = 0;
    if (this.state === state) return;
    this.state = state;
    this.changedAt = Date.now();
    this.on.state(state);
  }
}
