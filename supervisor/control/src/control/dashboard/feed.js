// Events, newest first. However many new events arrive, they cause at most one page update per frame. Memory usage is
// bounded.

import { batched, byId, fillRows, h, setText } from './dom.js';
import { clock, count, word } from './format.js';

/** Maximum number of events in memory, and of lines on the page. */
const KEPT_MAX = 4096;
const LINES_MAX = 500;

/** Time that the groups of events cover, and the maximum number of groups. */
const GROUPED_MS = 600_000;
const GROUPS_MAX = 50;

/** Maximum number of characters of a cause in the groups. */
const CAUSE_CHARS_MAX = 160;

/** Maximum number of characters for the fields in an event's line. The expanded view shows all of them. */
const LINE_CHARS_MAX = 240;

const RANK = { info: 0, warning: 1, critical: 2 };
/** The most important fields come first; the others follow by name. */
const FIRST = ['message', 'detail', 'reason', 'signal', 'exit_code', 'operation', 'tenant'];
const COMMON = new Set(['at', 'seq', 'severity', 'kind', 'bulkhead']);

/** Time of an event in milliseconds. */
const AT = Symbol('time');

export class Feed {
  constructor() {
    this.place = byId('feed');
    this.kept = [];
    this.coming = [];
    this.total = 0;
    this.isPaused = false;
    this.flushSoon = batched(() => this.flush());
    byId('feed-severity').addEventListener('change', () => this.renew());
    byId('feed-bulkhead').addEventListener('change', () => this.renew());
    byId('feed-pause').addEventListener('click', () => this.pause(!this.isPaused));
  }

  add(event) {
    this.total += 1;
    event = { ...event };
    // Not shown as a field, because `Object.entries` does not return symbol keys.
    event[AT] = Date.parse(event.at);
    keep(this.kept, event, KEPT_MAX);
    keep(this.coming, event, LINES_MAX);
    this.flushSoon();
  }

  /** Inserts a remark from the dashboard between the events, for example that the supervisor was restarted. */
  remark(text, severity = 'info') {
    this.add({ at: new Date().toISOString(), severity, kind: 'dashboard', bulkhead: null, message: text });
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    const button = byId('feed-pause');
    button.setAttribute('aria-pressed', isPaused);
    setText(button, isPaused ? 'Go on' : 'Pause');
    this.flushSoon();
  }

  /** Updates the bulkheads in the selection. */
  setBulkheads(names) {
    const select = byId('feed-bulkhead');
    const offered = [...select.options].slice(1).map((option) => option.value);
    if (offered.length === names.length && offered.every((name, at) => name === names[at])) return;
    const chosen = select.value;
    const options = names.map((name) => {
      const option = h('option', {}, name);
      option.value = name;
      return option;
    });
    select.replaceChildren(select.options[0], ...options);
    select.value = names.includes(chosen) ? chosen : '';
    if (select.value !== chosen) this.renew();
  }

  isWanted(event) {
    const [severity, bulkhead] = [byId('feed-severity').value, byId('feed-bulkhead').value];
    return (RANK[event.severity] ?? 0) >= RANK[severity] && (!bulkhead || event.bulkhead === bulkhead);
  }

  /** Shows the events of the last ten minutes by kind, bulkhead and cause. The most severe and most frequent come first. */
  showGroups(now) {
    const groups = new Map();
    for (const event of this.kept) {
      if (!(event[AT] > now - GROUPED_MS) || event.kind === 'dashboard' || !this.isWanted(event)) continue;
      const why = causeOf(event);
      // Numbers such as process IDs do not distinguish causes.
      const name = JSON.stringify([event.kind, event.bulkhead, event.severity, why.replace(/\d+/g, '#')]);
      const group = groups.get(name) ?? { event, why, count: 0 };
      groups.set(name, { ...group, count: group.count + 1 + (event.suppressed ?? 0), last: event.at });
    }
    const sorted = [...groups.values()].sort((a, b) => (RANK[b.event.severity] ?? 0) - (RANK[a.event.severity] ?? 0) || b.count - a.count);
    fillRows(
      byId('groups'),
      sorted.slice(0, GROUPS_MAX).map(({ event, why, count: times, last }) => [
        `${count(times)} ×`,
        { text: word(event.kind), state: event.severity },
        event.bulkhead ?? '',
        { text: why.slice(0, CAUSE_CHARS_MAX), title: why },
        clock(last),
      ]),
    );
  }

  /** Returns the number of crashes in the last ten minutes: crashes of workers, and of programs whose worker continues. */
  crashes(now) {
    const lately = this.kept.filter((event) => event[AT] > now - GROUPED_MS);
    const deaths = lately.filter((event) => event.kind === 'worker_exited' && event.severity !== 'info');
    const dead = new Set(deaths.map((event) => event.pid));
    const programs = lately.filter((event) => event.kind === 'job_crashed' && !dead.has(event.pid));
    const suppressed = deaths.reduce((total, event) => total + (event.suppressed ?? 0), 0);
    return deaths.length + programs.length + suppressed;
  }

  renew() {
    this.showGroups(Date.now());
    this.coming = this.kept.slice(-LINES_MAX * 4);
    this.place.replaceChildren();
    this.flush();
  }

  flush() {
    if (this.isPaused) return setText(byId('feed-count'), `${count(this.coming.length)} more`);
    const lines = this.coming.filter((event) => this.isWanted(event)).slice(-LINES_MAX).map(line);
    this.coming = [];
    this.place.prepend(...lines.reverse());
    while (this.place.children.length > LINES_MAX) this.place.lastElementChild.remove();
    setText(byId('feed-count'), `${count(this.total)} events`);
  }
}

function keep(list, event, most) {
  list.push(event);
  if (list.length > most) list.splice(0, list.length - most);
}

function fieldsOf(event) {
  const fields = Object.entries(event).filter(([name, value]) => !COMMON.has(name) && value !== null && value !== '');
  return fields.sort(([a], [b]) => place(a) - place(b));
}

const summaryOf = (fields) => fields.map(([name, value]) => `${name}=${asText(value)}`).join('  ');

function line(event) {
  const fields = fieldsOf(event);
  const details = h(
    'details',
    {},
    h(
      'summary',
      {},
      h('time', { datetime: event.at }, clock(event.at)),
      h('span.severity', {}, event.severity),
      h('span.kind', {}, word(event.kind)),
      h('span.who', {}, event.bulkhead ?? ''),
      h('span.fields', {}, summaryOf(fields).slice(0, LINE_CHARS_MAX)),
    ),
  );
  details.addEventListener('toggle', () => details.append(all(fields)), { once: true });
  return h('li', { 'data-severity': event.severity }, details);
}

const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);

/** Returns why an event occurred, if its fields say so. */
function causeOf(event) {
  const exit = event.exit_code == null ? null : `exit ${event.exit_code}`;
  const killed = event.killed ? `killed: ${event.killed}` : null;
  const why = killed ?? event.signal ?? exit ?? event.message ?? event.reason ?? event.system_call ?? event.detail ?? event.operation;
  if (why != null && why !== '') return asText(why);
  return event.severity === 'info' ? '' : summaryOf(fieldsOf(event));
}

const asText = (value) => (typeof value === 'object' ? JSON.stringify(value) : String(value));

function all(fields) {
  const pairs = fields.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, asText(value))));
  return h('dl.fields-all', {}, ...pairs);
}
