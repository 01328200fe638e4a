// Crash reports: a list that follows the events, and the details of each report that a user opens.

import { confirmReplay } from './actions.js';
import { crashList, crashReport, replayCrash } from './api.js';
import { byId, h, setText } from './dom.js';
import { bytes, clock, duration, millis, plural } from './format.js';

/** Maximum number of reports in the list. */
const REPORTS_MAX = 50;

/** Minimum interval between requests for the list. */
const PAUSE_MS = 3000;

/** Maximum number of payload bytes that are shown. */
const PAYLOAD_BYTES_MAX = 256;

export class Crashes {
  constructor() {
    this.place = byId('crashes');
    this.ids = '';
    this.askedAt = -PAUSE_MS;
    this.timer = null;
  }

  /** Schedules a request for the list. */
  refresh() {
    if (this.timer !== null) return;
    const wait = Math.max(0, this.askedAt + PAUSE_MS - performance.now());
    this.timer = setTimeout(() => this.load(), wait);
  }

  async load() {
    this.askedAt = performance.now();
    // A report is written shortly after its event. From here on, new events cause another request.
    this.timer = null;
    try {
      this.show((await crashList(REPORTS_MAX)).reverse());
    } catch (problem) {
      setText(byId('crash-count'), problem.message);
    }
  }

  show(crashes) {
    const ids = crashes.map(key).join(' ');
    setText(byId('crash-count'), crashes.length === REPORTS_MAX ? `newest ${REPORTS_MAX}` : crashes.length ? `${crashes.length} reports` : '');
    if (ids === this.ids && ids) return;
    this.ids = ids;
    const known = new Map([...this.place.querySelectorAll('details')].map((one) => [one.dataset.key, one]));
    const entries = crashes.map((crash) => known.get(key(crash)) ?? entry(crash));
    this.place.replaceChildren(...(entries.length ? entries : [h('p.muted', {}, 'No worker has crashed.')]));
  }
}

/** Workers that never start share one report with a count. */
const key = (crash) => `${crash.id}×${crash.count}`;

function cause(crash) {
  const what = crash.signal ?? crash.system_call ?? (crash.exit_code == null ? null : `exit ${crash.exit_code}`);
  return what ?? crash.cause;
}

function entry(crash) {
  const details = h(
    'details',
    { 'data-key': key(crash) },
    h(
      'summary',
      {},
      h('time', { datetime: crash.at }, clock(crash.at)),
      h('b.cause', {}, cause(crash)),
      crash.count > 1 ? h('span.times', {}, `× ${crash.count}`) : null,
      h('span.who', {}, crash.bulkhead),
      h('span.fields', {}, [crash.operation, crash.tenant].filter(Boolean).join(' · ')),
    ),
  );
  details.addEventListener('toggle', () => fill(details, crash.id), { once: true });
  return details;
}

async function fill(details, id) {
  const body = h('div.report', {}, h('p.muted', {}, 'loading…'));
  details.append(body);
  try {
    body.replaceChildren(...report(await crashReport(id)));
  } catch (problem) {
    body.replaceChildren(h('p.error', {}, problem.message));
  }
}

function report(crash) {
  const usage = crash.usage && `user ${millis(crash.usage.user_ms)}, system ${millis(crash.usage.system_ms)}, peak memory ${bytes(crash.usage.max_rss_bytes)}`;
  const facts = [
    ['cause', `the ${crash.victim} ${crash.message}`],
    ['worker', `pid ${crash.pid}, slot ${crash.slot}, generation ${crash.generation}, ${crash.stage}`],
    ['lifetime', `${duration(crash.uptime_ms)}, ${plural(crash.served, 'job', 'jobs')} served, ${crash.in_flight} in flight`],
    ['usage', usage],
    ['report', crash.id],
  ];
  const stderr = crash.stderr_tail ? [h('h4', {}, 'Standard error'), h('pre', { tabindex: 0 }, crash.stderr_tail)] : [];
  const backtrace = crash.native ? [h('h4', {}, 'Backtrace'), h('pre', { tabindex: 0 }, nativeText(crash.native))] : [];
  const replay = crash.jobs.some((one) => one.payload != null && !one.is_answered) ? [replayButton(crash)] : [];
  const stack = crash.runtime_stack ? [h('h4', {}, 'Stacks written by the worker'), h('pre', { tabindex: 0 }, crash.runtime_stack)] : [];
  return [list(facts), ...replay, ...stack, ...backtrace, ...crash.jobs.map((one, at) => job(one, at === crash.culprit)), ...stderr];
}

function nativeText(native) {
  const frame = (one, at) => {
    const place = one.file ? ` at ${one.file}${one.line == null ? '' : `:${one.line}`}` : '';
    return `#${at} ${one.function ?? '??'}${place} (${one.module ? `${one.module}+` : ''}${one.offset})`;
  };
  if (native.unavailable) return `no backtrace: ${native.unavailable}`;
  return native.threads.flatMap((thread) => [
    threadTitle(native, thread),
    ...thread.frames.map(frame),
  ]).join('\n');
}

function threadTitle(native, thread) {
  const named = (text, name) => (name ? `${text} (${name})` : text);
  return [
    named(`thread ${thread.id}`, thread.name),
    thread.process == null ? null : named(`process ${thread.process}`, thread.program),
    thread.state && `state ${thread.state}`,
    thread.waits_in && `waiting in ${thread.waits_in}`,
    native.signal_code == null ? null : `signal code ${native.signal_code}`,
    native.address && `address ${native.address}`,
  ].filter(Boolean).join(', ');
}

const VERDICTS = {
  same: 'The job crashed in the same way.',
  different: 'The job crashed, but in a different way.',
  no_crash: 'The job did not crash in a fresh worker.',
  not_run: 'The job did not run, because no worker was available.',
};

function replayButton(crash) {
  const result = h('p.verdict', { role: 'status' });
  const button = h('button', { type: 'button' }, 'Replay…');
  const run = async () => {
    button.disabled = true;
    setText(result, 'The job is running…');
    try {
      const replay = await replayCrash(crash.id);
      const outcomes = replay.replays.map((one) => one.message ?? one.outcome).filter(Boolean);
      setText(result, [VERDICTS[replay.verdict] ?? replay.verdict, ...outcomes].join(' '));
    } catch (problem) {
      setText(result, problem.message);
    }
    button.disabled = false;
  };
  button.addEventListener('click', () => confirmReplay(crash, run));
  return h('div', {}, h('div.actions', {}, button), result);
}

function job(one, isCulprit) {
  const facts = [
    ['operation', one.operation || '–'],
    ['tenant', one.tenant || '–'],
    ['ran', `${millis(one.ran_ms)}, attempt ${one.attempts}`],
    ['payload', bytes(one.payload_bytes)],
    ['digest', one.digest],
    ['trace', one.trace_id],
  ];
  const payload = one.payload ? h('pre', { tabindex: 0 }, preview(one.payload)) : null;
  return h('div', {}, h('h4', {}, isCulprit ? `Job ${one.job}, the suspected cause` : `Job ${one.job}`), list(facts), payload);
}

function list(facts) {
  const known = facts.filter(([, value]) => value);
  return h('dl.facts', {}, ...known.flatMap(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]));
}

/** Returns the beginning of a payload, as text if it is printable, otherwise as a hex dump. */
function preview(base64) {
  const all = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const shown = all.slice(0, PAYLOAD_BYTES_MAX);
  const more = all.length > shown.length ? `\n[${plural(all.length - shown.length, 'byte', 'bytes')} more]` : '';
  // If the limit cuts off part of a character, the character is replaced by U+FFFD at the end.
  const text = new TextDecoder().decode(shown).replace(more ? /\ufffd$/ : /$^/, '');
  return (/[\u0000-\u0008\u000e-\u001f\u007f\ufffd]/.test(text) ? hex(shown) : text) + more;
}

function hex(bytesShown) {
  const lines = [];
  for (let at = 0; at < bytesShown.length; at += 16) {
    const part = [...bytesShown.slice(at, at + 16)];
    const digits = part.map((byte) => byte.toString(16).padStart(2, '0')).join(' ');
    lines.push(`${digits.padEnd(48)} ${part.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : '.')).join('')}`);
  }
  return lines.join('\n');
}
