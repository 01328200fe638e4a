// Details of one bulkhead, shown beside the main page and updated while they are open.

import { bulkheadPath, get, logLines } from './api.js';
import { fillRows, h, setData, setText, table } from './dom.js';
import { bytes, clock, count, duration, millis, plural, word } from './format.js';
import { causes } from './worst.js';

/** Number of output lines shown, and the interval between requests for output and advice. */
const LINES = 40;
const OUTPUT_EVERY_MS = 3000;
const ADVICE_EVERY_MS = 15_000;

const WORKER_HEADS = ['PID', 'State', 'Up', 'In flight', 'Served', 'Restarts', 'Memory', 'CPU', 'Last exit', 'Confinement'];
const TOTALS = [
  ['submitted', 'submitted'],
  ['done', 'ok'],
  ['failed', 'failed'],
  ['deadline_exceeded', 'deadline exceeded'],
  ['crashed', 'crashed'],
  ['cancelled', 'cancelled'],
  ['restarts', 'restarts'],
  ['retries', 'retries'],
  ['quarantined', 'quarantined'],
  ['late_replies', 'late replies'],
];

export class Details {
  constructor(place, { act, closed, hasAdvice }) {
    this.place = place;
    this.act = act;
    this.closed = closed;
    this.hasAdvice = hasAdvice;
    this.name = null;
  }

  get isOpen() {
    return this.name !== null;
  }

  open(bulkhead) {
    this.name = bulkhead.name;
    this.askedAt = { output: -OUTPUT_EVERY_MS, advice: -ADVICE_EVERY_MS };
    this.build();
    this.place.hidden = false;
    this.place.scrollTop = 0;
    this.place.setAttribute('aria-label', `Details of ${bulkhead.name}`);
    this.update([bulkhead]);
    this.closer.focus();
  }

  close() {
    if (!this.isOpen) return;
    const name = this.name;
    this.name = null;
    this.place.hidden = true;
    this.place.replaceChildren();
    this.closed(name);
  }

  build() {
    this.badge = h('span.badge');
    this.serviceBadge = h('span.badge.service');
    this.closer = h('button', { type: 'button', 'aria-label': 'Close', onclick: () => this.close() }, '✕');
    this.why = h('p.why');
    this.facts = h('dl.facts');
    this.buttons = h('div.actions');
    this.workers = table('Workers', WORKER_HEADS);
    this.latency = table('Milliseconds', ['', 'p50', 'p90', 'p99', 'Longest']);
    this.totals = h('dl.numbers');
    this.rejected = table('Rejected', ['Reason', 'Jobs']);
    this.tenants = table('Tenants', ['Tenant', 'In flight', 'Queued', 'Submitted', 'Rejected']);
    this.advice = h('div.advice');
    this.output = h('pre', { tabindex: 0, 'aria-label': 'Worker output' });
    this.place.replaceChildren(
      h('header', {}, h('h2', {}, this.name), this.badge, this.serviceBadge, this.closer),
      this.why,
      this.buttons,
      part('Now', this.facts),
      part('Workers', this.workers.element),
      part('Latency of jobs', this.latency.element),
      part('Totals', this.totals),
      (this.rejectedPart = part('Rejected, by reason', this.rejected.element)),
      (this.tenantsPart = part('Busiest tenants', this.tenants.element)),
      (this.advicePart = part('Advice', this.advice)),
      part('Worker output', this.output),
    );
    this.advicePart.hidden = true;
  }

  update(bulkheads) {
    if (!this.isOpen) return;
    const bulkhead = bulkheads.find((one) => one.name === this.name);
    if (!bulkhead) return this.close();
    setText(this.badge, bulkhead.state);
    setData(this.badge, 'state', bulkhead.state);
    setText(this.serviceBadge, `service ${bulkhead.service}`);
    setData(this.serviceBadge, 'state', bulkhead.service);
    setText(this.why, causes(bulkhead));
    this.why.hidden = !causes(bulkhead);
    this.showActions(bulkhead);
    this.showFacts(bulkhead);
    fillRows(this.workers.body, bulkhead.workers.map(workerRow));
    const { run, queue } = bulkhead.latency_ms;
    fillRows(this.latency.body, [latencyRow('running', run), latencyRow('in the queue', queue)]);
    fillPairs(this.totals, TOTALS.map(([field, name]) => [name, count(bulkhead[field])]));
    const reasons = Object.entries(bulkhead.rejected).sort((a, b) => b[1] - a[1]);
    fillRows(this.rejected.body, reasons.map(([reason, jobs]) => [word(reason), count(jobs)]));
    this.rejectedPart.hidden = reasons.length === 0;
    fillRows(this.tenants.body, bulkhead.tenants.map(tenantRow));
    this.tenantsPart.hidden = bulkhead.tenants.length === 0;
    this.loadEvery('output', OUTPUT_EVERY_MS, () => this.loadOutput(bulkhead.name));
    this.loadEvery('advice', ADVICE_EVERY_MS, () => this.loadAdvice(bulkhead.name));
  }

  showActions(bulkhead) {
    const isDraining = bulkhead.state === 'draining';
    const isForced = bulkhead.breaker === 'forced_open';
    const actions = ['resize', isDraining ? 'resume' : 'drain', 'restart', 'reset', isForced ? 'close' : 'open'];
    if (this.buttons.dataset.actions === actions.join()) return;
    this.buttons.dataset.actions = actions.join();
    const labels = { resize: 'Resize…', drain: 'Drain…', resume: 'Resume…', restart: 'Restart…', reset: 'Reset…', open: 'Force breaker open…', close: 'Breaker to auto…' };
    const button = (what) => h('button', { type: 'button', 'data-action': what, onclick: () => this.act(what, this.name) }, labels[what]);
    this.buttons.replaceChildren(...actions.map(button));
  }

  showFacts(bulkhead) {
    const rate = bulkhead.rate_limit;
    fillPairs(this.facts, [
      ['in flight', `${count(bulkhead.in_flight)} of ${count(bulkhead.limit)}, ${count(bulkhead.available)} free`],
      ['queue', `${count(bulkhead.queued)} of ${count(bulkhead.queue_capacity)}`],
      ['size', `${plural(bulkhead.processes, 'process', 'processes')} × ${bulkhead.max_in_flight} in flight`],
      ['rate limit', rate ? `${rate.per_second} per second, burst ${rate.burst}, per ${rate.per}` : 'none'],
      ['breaker', word(bulkhead.breaker)],
      ['elsewhere', bulkhead.elsewhere ? `${count(bulkhead.elsewhere)} at a fallback` : ''],
    ]);
  }

  loadEvery(what, every, load) {
    if (performance.now() - this.askedAt[what] < every) return;
    this.askedAt[what] = performance.now();
    // Errors are ignored, because the header already shows that the supervisor cannot be reached.
    load().catch(() => {});
  }

  async loadOutput(name) {
    const lines = await logLines(name, LINES);
    if (this.name !== name) return;
    const texts = lines.map((line) => `${clock(line.at)} ${line.pid ?? ''} ${line.stream ?? ''}  ${line.line ?? JSON.stringify(line)}`);
    setText(this.output, texts.join('\n') || 'The workers have written no output.');
  }

  async loadAdvice(name) {
    if (!this.hasAdvice()) return;
    const response = await get(`${bulkheadPath(name)}/advice`);
    if (this.name !== name) return;
    this.advicePart.hidden = false;
    this.advice.replaceChildren(...advice(response));
  }
}

function part(title, ...children) {
  return h('section', {}, h('h3', {}, title), ...children);
}

/** Fills a list with name-value pairs. Pairs without a value are left out. */
function fillPairs(list, pairs) {
  const known = pairs.filter(([, value]) => value !== '');
  while (list.children.length > known.length) list.lastElementChild.remove();
  known.forEach(([name, value], at) => {
    const pair = list.children[at] ?? list.appendChild(h('div', {}, h('dt'), h('dd')));
    setText(pair.firstElementChild, name);
    setText(pair.lastElementChild, value);
  });
}

function workerRow(worker) {
  const pid = worker.pid == null ? '–' : String(worker.pid);
  return [
    worker.tenant ? `${pid} (${worker.tenant})` : pid,
    { text: word(worker.spare && worker.state === 'ready' ? 'spare' : worker.state), state: worker.state, title: worker.status ?? '' },
    duration(worker.uptime_ms),
    count(worker.in_flight),
    count(worker.served),
    count(worker.restarts),
    bytes(worker.rss_bytes),
    duration(worker.cpu_ms),
    worker.last_exit ?? '–',
    confinement(worker.confinement),
  ];
}

function confinement(state) {
  if (!state) return '–';
  const layers = [
    state.seccomp === 'none' ? null : 'seccomp',
    state.landlock == null ? null : `Landlock ${state.landlock}`,
    state.namespaces.length ? `${state.namespaces.length} namespaces` : null,
    state.cgroup ? 'cgroup' : null,
    state.uid == null ? null : `user ${state.uid}`,
  ];
  const missing = state.missing.length ? `; missing: ${state.missing.join(', ')}` : '';
  return { text: `${state.profile}: ${layers.filter(Boolean).join(', ') || 'nothing'}${missing}`, state: missing ? 'missing' : '', title: state.namespaces.join(', ') };
}

const latencyRow = (name, { p50, p90, p99, max }) => [name, millis(p50), millis(p90), millis(p99), millis(max)];
const tenantRow = (tenant) => [tenant.name || '(none)', count(tenant.in_flight), count(tenant.queued), count(tenant.submitted), count(tenant.rejected)];

function advice(response) {
  const period = `Observed for ${duration(response.watched_ms)}.`;
  if (!response.enough) return [h('p.muted', {}, `${period} ${response.missing ?? 'There are not enough observations for advice yet.'}`)];
  if (!response.advice.length) return [h('p.muted', {}, `${period} The limits fit the observations.`)];
  const text = (value) => (typeof value === 'object' ? JSON.stringify(value) : String(value));
  const items = response.advice.map((one) => h('li', {}, h('code', {}, one.key), ` ${one.now == null ? '' : text(one.now)} → `, h('b', {}, text(one.proposed)), h('p', {}, one.reason)));
  return [h('p.muted', {}, period), h('ul', {}, ...items)];
}
