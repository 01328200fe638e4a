// Connects the parts: passes data from the stream to the history, cards, heat map, details, feed and crash reports.

import { confirmAction, confirmReload, showHelp } from './actions.js';
import { hasAdvice, withBreaker } from './api.js';
import { Cards } from './cards.js';
import { Crashes } from './crashes.js';
import { Details } from './details.js';
import { batched, byId, h, setData, setText, visible } from './dom.js';
import { Feed } from './feed.js';
import { clock, count, duration, plural, rate } from './format.js';
import { HeatMap } from './heatmap.js';
import { COUNTED, History } from './history.js';
import { listen, restoreTheme, switchTheme } from './keys.js';
import { Stream } from './stream.js';
import { isTroubled } from './worst.js';

const history = new History();
const known = { bulkheads: [], at: Date.now(), breakers: new Set(), hasAdvice: false, version: null, host: '' };

restoreTheme();
const feed = new Feed();
const crashes = new Crashes();
const heat = new HeatMap();
const cards = new Cards(byId('cards'), byId('fold'), open);
const details = new Details(byId('details'), {
  act: (what, name) => confirmAction(what, bulkheadOf(name)),
  closed: (name) => cards.focus(name),
  hasAdvice: () => known.hasAdvice,
});

const bulkheadOf = (name) => known.bulkheads.find((bulkhead) => bulkhead.name === name);
const hasBreaker = (bulkhead) => known.breakers.has(bulkhead.name) || bulkhead.breaker !== 'closed';

function open(name) {
  const bulkhead = bulkheadOf(name);
  if (bulkhead) details.open(bulkhead);
}

const render = batched(() => {
  cards.update(known.bulkheads, history, hasBreaker);
  heat.update(known.at, known.bulkheads, history);
  details.update(known.bulkheads);
  feed.setBulkheads(known.bulkheads.map((bulkhead) => bulkhead.name));
  feed.showGroups(known.at);
  showTotals();
  showSummary();
  showFilter();
});

/** Shows the host and its problems, including in the page title. */
function showSummary() {
  const troubled = known.bulkheads.filter(isTroubled);
  const isFailing = (bulkhead) => bulkhead.state === 'failed' || bulkhead.service === 'failing';
  const failing = troubled.filter(isFailing).length;
  const degraded = troubled.length - failing;
  const rejected = known.bulkheads.reduce((total, bulkhead) => total + (history.rates(bulkhead.name).rejected ?? 0), 0);
  const crashed = feed.crashes(known.at);
  const parts = [
    failing ? `${count(failing)} failing` : null,
    degraded ? `${count(degraded)} degraded` : null,
    rejected > 0 ? `${rate(rejected)} rejected/s` : null,
    crashed ? `${plural(crashed, 'crash', 'crashes')} in 10 min` : null,
  ].filter(Boolean);
  setText(byId('summary'), parts.join(', ') || 'all well');
  setData(byId('summary'), 'state', troubled.length ? 'bad' : 'ok');
  const number = stream.state === 'lost' || stream.state === 'stuck' ? '(!) ' : troubled.length ? `(${troubled.length}) ` : '';
  document.title = `${number}${known.host ? `${known.host} – ` : ''}Bulkhead`;
}

function showTotals() {
  const all = (what) => known.bulkheads.reduce((total, bulkhead) => total + what(bulkhead), 0);
  const rates = known.bulkheads.map((bulkhead) => history.rates(bulkhead.name));
  const perSecond = (what) => rates.reduce((total, one) => total + (one[what] ?? 0), 0);
  const pairs = [
    ['workers', count(all((bulkhead) => bulkhead.workers.filter((worker) => worker.pid != null).length)), ''],
    ['in flight', count(all((bulkhead) => bulkhead.in_flight)), ''],
    ['queued', count(all((bulkhead) => bulkhead.queued)), ''],
    ...COUNTED.map((what) => [`${what}/s`, rate(perSecond(what)), perSecond(what) > 0 ? what : '']),
  ];
  const list = byId('totals');
  pairs.forEach(([name, value, what], at) => {
    const pair = list.children[at] ?? list.appendChild(h('div', {}, h('dt', {}, name), h('dd')));
    setText(pair.lastElementChild, value);
    setData(pair, 'some', what);
  });
}

function showFilter() {
  const shown = cards.filter(byId('filter').value);
  byId('none').hidden = shown > 0 || known.bulkheads.length === 0;
}

/** Loads data that changes rarely. Called again when it may have changed. */
async function loadFeatures() {
  try {
    [known.breakers, known.hasAdvice] = await Promise.all([withBreaker(), hasAdvice()]);
    render();
  } catch {
    // The next connection tries again.
  }
}

const CRASH_KINDS = new Set(['worker_exited', 'job_crashed', 'job_retried', 'worker_hung', 'crash_replayed']);

const stream = new Stream({
  hello(hello, isAnother) {
    if (isAnother) feed.remark('the supervisor was restarted or upgraded: counters start again');
    const isUpdated = known.version !== null && known.version !== hello.version;
    known.version = hello.version;
    known.host = visible(hello.host ?? '');
    setText(byId('host'), known.host);
    setText(byId('run'), `${hello.version} · pid ${hello.pid}${isUpdated ? ' · another version: reload this page' : ''}`);
    crashes.refresh();
    loadFeatures();
  },
  bulkheads(message) {
    known.bulkheads = message.bulkheads;
    known.at = Date.parse(message.at);
    history.add(known.at, message.bulkheads);
    render();
  },
  event(event) {
    feed.add(event);
    if (CRASH_KINDS.has(event.kind)) crashes.refresh();
    if (event.kind === 'config_reloaded') loadFeatures();
  },
  missed(number) {
    feed.remark(`${count(number)} events are not shown, because they arrived faster than they could be sent`, 'warning');
  },
  state: showLink,
});

/** Shows the state of the connection to the supervisor. */
function showLink() {
  const state = stream.state ?? 'connecting';
  const words = { live: 'live', stuck: 'stuck', lost: 'reconnecting…' };
  setText(byId('link'), words[state] ?? 'connecting…');
  setData(byId('link'), 'state', state);
  setData(document.body, 'link', state);
  setText(byId('link-age'), state === 'live' ? '' : duration(Date.now() - stream.changedAt));
  const shown = known.bulkheads.length ? ` The page shows the state of ${clock(known.at)}.` : '';
  const troubles = {
    stuck: `The data plane is not responding.${shown}`,
    lost: `The supervisor is not reachable.${shown} This page reconnects automatically.`,
  };
  showSummary();
  byId('trouble').hidden = !troubles[state];
  setText(byId('trouble'), troubles[state] ?? '');
}

setInterval(() => {
  if (stream.state !== 'live') showLink();
}, 1000);

byId('filter').addEventListener('input', showFilter);
byId('reload').addEventListener('click', confirmReload);
byId('help').addEventListener('click', showHelp);
const theme = () => {
  switchTheme();
  heat.repaint();
};
byId('theme').addEventListener('click', theme);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => heat.repaint());
listen({
  buttons: () => cards.buttons(),
  close: () => details.close(),
  help: showHelp,
  pause: () => feed.pause(!feed.isPaused),
  theme,
});
