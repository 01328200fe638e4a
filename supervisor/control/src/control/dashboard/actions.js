// Actions that change the supervisor. Before an action runs, the user sees a description and must confirm.

import { bulkheadPath, request } from './api.js';
import { byId, h } from './dom.js';
import { plural } from './format.js';

/** Time for which a notice is shown, and the maximum number of notices. */
const NOTICE_MS = 6000;
const NOTICES_MAX = 4;

const NUMBERS = [
  ['max_in_flight', 'Jobs in flight in each process', (bulkhead) => bulkhead.max_in_flight, 0],
  ['processes', 'Worker processes', (bulkhead) => bulkhead.processes, 1],
  ['max_queue', 'Maximum queue length', (bulkhead) => bulkhead.max_queue, 0],
];

const post = (name, description) => ({
  description,
  request: (bulkhead) => ['POST', `${bulkheadPath(bulkhead.name)}/${name}`],
});

const breaker = (mode, description) => ({
  description,
  request: (bulkhead) => ['PATCH', bulkheadPath(bulkhead.name), { breaker: mode }],
});

/** Title, button label, description and request. */
const ACTIONS = {
  resize: {
    title: 'Resize',
    description: () => 'The new numbers take effect immediately, and no jobs are dropped. They apply until the supervisor stops or a reload changes these keys.',
    fields: NUMBERS,
    request: resized,
  },
  drain: {
    title: 'Drain',
    ...post('drain', (bulkhead) => `The bulkhead accepts no more jobs: new jobs and the ${bulkhead.queued} queued jobs are rejected as draining. The ${bulkhead.in_flight} jobs in flight finish.`),
  },
  resume: { title: 'Resume', ...post('resume', () => 'The bulkhead accepts jobs again.') },
  restart: {
    title: 'Restart',
    ...post('restart', (bulkhead) => `Replaces ${plural(bulkhead.workers.length, 'worker', 'workers')}, one at a time. Each worker is replaced once its replacement is ready, and finishes its jobs first.`),
  },
  reset: {
    title: 'Reset',
    ...post('reset', () => 'Clears the history of the breaker, the restart history and the quarantine. Failed worker slots are retried immediately.'),
  },
  open: {
    title: 'Force the breaker open',
    ...breaker('forced_open', () => 'Every new job is rejected as circuit open, or forwarded to a fallback, until an operator sets the breaker to auto or resets it.'),
  },
  close: { title: 'Breaker to auto', ...breaker('auto', () => 'The breaker closes, and only new failures can open it again.') },
};

function resized(bulkhead, form) {
  const change = {};
  for (const [key, , now] of NUMBERS) {
    const value = form.elements[key].valueAsNumber;
    if (!Number.isInteger(value)) throw new Error(`${key} must be a whole number`);
    if (value !== now(bulkhead)) change[key] = value;
  }
  if (!Object.keys(change).length) throw new Error('the numbers are unchanged');
  return ['PATCH', bulkheadPath(bulkhead.name), change];
}

export function confirmAction(what, bulkhead) {
  const action = ACTIONS[what];
  const fields = (action.fields ?? []).map(([key, label, now, min]) => field(key, label, now(bulkhead), min));
  confirm({
    title: `${action.title}: ${bulkhead.name}`,
    button: action.title,
    content: [h('p', {}, action.description(bulkhead)), ...fields],
    run: async (form) => {
      await request(...action.request(bulkhead, form));
      notice(`${bulkhead.name}: ${action.title.toLowerCase()}, done`);
    },
  });
}

function field(key, label, value, min) {
  const input = h('input', { type: 'number', name: key, value, min, step: 1, required: true, inputmode: 'numeric' });
  return h('label.field', {}, h('span', {}, label, h('code', {}, key)), input);
}

/** Shows the result of a dry run, and reloads on confirmation. */
export async function confirmReload() {
  try {
    const changes = JSON.parse(await request('POST', '/v1/reload?dry_run=true'));
    const lines = describeChanges(changes);
    const isNothing = lines.length === 0;
    confirm({
      title: 'Reload the configuration',
      button: isNothing ? null : 'Reload',
      content: isNothing
        ? [h('p', {}, 'The file matches the active configuration: nothing changes.')]
        : [h('p', {}, 'The file is reread, and the following changes take effect. No jobs are lost.'), h('ul.changes', {}, ...lines.map((line) => h('li', {}, line)))],
      run: async () => {
        await request('POST', '/v1/reload');
        notice('the configuration was reloaded');
      },
    });
  } catch (problem) {
    confirm({ title: 'The configuration cannot be reloaded', content: [h('p', {}, 'The active configuration stays unchanged.'), h('pre.error', {}, problem.message)] });
  }
}

function describeChanges({ bulkheads, supervisor, access, ignored }) {
  const lines = bulkheads.map((one) => {
    const keys = one.keys.length ? `: ${one.keys.join(', ')}` : '';
    const replaced = one.replaces_workers ? '; the workers are replaced one at a time' : '';
    const live = one.live_dropped ?? [];
    const dropped = live.length ? `; values set at runtime were dropped because they conflict with the configuration file: ${live.join(', ')}` : '';
    return `${one.bulkhead} ${one.change}${keys}${replaced}${dropped}`;
  });
  if (supervisor.length) lines.push(`[supervisor]: ${supervisor.join(', ')}`);
  if (access) lines.push('access rules ([[access]])');
  if (ignored.length) lines.push(`not applied: ${ignored.join(', ')}; restart the supervisor to apply`);
  return lines;
}

/** Asks before a crash report is replayed. `replay` is called without waiting for its result. */
export function confirmReplay(crash, replay) {
  confirm({
    title: 'Replay',
    button: 'Replay',
    content: [h('p', {}, `Runs the payload of the report again, in a fresh worker of ${crash.bulkhead} that serves no other jobs. The handler runs once more, with all its side effects.`)],
    run: async () => {
      replay();
    },
  });
}

/** Shows a confirmation dialog. Without `button`, the dialog can only be closed. */
function confirm({ title, content, button, run }) {
  const dialog = byId('dialog');
  const error = h('p.error', { role: 'alert', hidden: true });
  const cancel = h('button', { type: 'button', onclick: () => dialog.close() }, button ? 'Cancel' : 'Close');
  const go = button ? h('button.primary', { type: 'submit' }, button) : null;
  const form = h('form', {}, h('h2', { id: 'dialog-title' }, title), ...content, error, h('div.actions', {}, cancel, go));
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      await run(form);
      dialog.close();
    } catch (problem) {
      error.textContent = problem.message;
      error.hidden = false;
      go.disabled = false;
    }
  });
  dialog.replaceChildren(form);
  dialog.showModal();
  // Focuses the input or the cancel button, so that accidentally pressing Enter changes nothing.
  (form.querySelector('input') ?? cancel).focus();
}

export function notice(text) {
  const place = byId('notices');
  const element = h('p', {}, text);
  place.append(element);
  while (place.children.length > NOTICES_MAX) place.firstElementChild.remove();
  setTimeout(() => element.remove(), NOTICE_MS);
}

export function showHelp() {
  const keys = [
    ['j  k  or arrows', 'move between cards'],
    ['Enter', 'open the details of a bulkhead'],
    ['Esc', 'close the dialog or the details'],
    ['/', 'filter the bulkheads'],
    ['p', 'pause the events'],
    ['t', 'switch between light and dark'],
    ['?', 'show this help'],
  ];
  const list = keys.map(([key, description]) => h('div', {}, h('dt', {}, h('kbd', {}, key)), h('dd', {}, description)));
  const about = 'Rates cover the last three seconds, percentiles the last one to two minutes, and a sparkline 90 seconds. Late jobs missed their deadline.';
  confirm({ title: 'Keyboard', content: [h('dl.keys', {}, ...list), h('p.muted', {}, about)] });
}
