// Actions that change something. Each one is described first and runs only after the user confirms it.

import { ask, bulkheadPath } from './api.js';
import { byId, h } from './dom.js';
import { plural } from './format.js';

/** Time for which a notice is shown, and the maximum number of notices. */
const NOTICE_MS = 6000;
const NOTICES_MAX = 4;

const NUMBERS = [
  ['max_in_flight', 'Jobs in flight in each process', (bulkhead) => bulkhead.max_in_flight, 0],
  ['processes', 'Worker processes', (bulkhead) => bulkhead.processes, 1],
  ['max_queue', 'Jobs that may wait', (bulkhead) => bulkhead.queue_capacity, 0],
];

const verb = (name, does) => ({
  does,
  request: (bulkhead) => ['POST', `${bulkheadPath(bulkhead.name)}/${name}`],
});

const breaker = (mode, does) => ({
  does,
  request: (bulkhead) => ['PATCH', bulkheadPath(bulkhead.name), { breaker: mode }],
});

/** Title, label of the button, description, and request. */
const ACTIONS = {
  resize: {
    title: 'Resize',
    does: () => 'These numbers are in force at once, and no job is dropped. They hold until the supervisor ends, or the file says something else.',
    fields: NUMBERS,
    request: resized,
  },
  drain: {
    title: 'Drain',
    ...verb('drain', (bulkhead) => `It takes no more jobs: new ones, and the ${bulkhead.queued} that wait, are rejected as draining. The ${bulkhead.in_flight} in flight finish.`),
  },
  resume: { title: 'Resume', ...verb('resume', () => 'It takes jobs again.') },
  restart: {
    title: 'Restart',
    ...verb('restart', (bulkhead) => `Replaces ${plural(bulkhead.workers.length, 'worker', 'workers')}, one after the other, the replacement ready first. Those that are replaced finish their jobs.`),
  },
  reset: {
    title: 'Reset',
    ...verb('reset', () => 'Forgets what its breaker has seen, its restart history and its quarantine. Places for workers that were given up are tried again now.'),
  },
  open: {
    title: 'Force the breaker open',
    ...breaker('forced_open', () => 'Every new job is rejected as circuit open, or goes to a fallback, until an operator sets the breaker to auto or resets it.'),
  },
  close: { title: 'Breaker to auto', ...breaker('auto', () => 'The breaker closes, and decides by what it sees from now on.') },
};

function resized(bulkhead, form) {
  const change = {};
  for (const [key, , now] of NUMBERS) {
    const value = form.elements[key].valueAsNumber;
    if (!Number.isInteger(value)) throw new Error(`${key} must be a whole number`);
    if (value !== now(bulkhead)) change[key] = value;
  }
  if (!Object.keys(change).length) throw new Error('these are the numbers that are in force');
  return ['PATCH', bulkheadPath(bulkhead.name), change];
}

export function offer(what, bulkhead) {
  const action = ACTIONS[what];
  const fields = (action.fields ?? []).map(([key, label, now, min]) => field(key, label, now(bulkhead), min));
  confirm({
    title: `${action.title}: ${bulkhead.name}`,
    button: action.title,
    content: [h('p', {}, action.does(bulkhead)), ...fields],
    run: async (form) => {
      await ask(...action.request(bulkhead, form));
      notice(`${bulkhead.name}: ${action.title.toLowerCase()}, done`);
    },
  });
}

function field(key, label, value, min) {
  const input = h('input', { type: 'number', name: key, value, min, step: 1, required: true, inputmode: 'numeric' });
  return h('label.field', {}, h('span', {}, label, h('code', {}, key)), input);
}

/** Shows the result of a dry run, and reloads on confirmation. */
export async function offerReload() {
  try {
    const changes = JSON.parse(await ask('POST', '/v1/reload?dry_run=true'));
    const lines = changesTold(changes);
    const isNothing = lines.length === 0;
    confirm({
      title: 'Reload the configuration',
      button: isNothing ? null : 'Reload',
      content: isNothing
        ? [h('p', {}, 'The file says what is in force: there is nothing to change.')]
        : [h('p', {}, 'The file is read again, and this put in force. No job is lost.'), h('ul.changes', {}, ...lines.map((line) => h('li', {}, line)))],
      run: async () => {
        await ask('POST', '/v1/reload');
        notice('the configuration was reloaded');
      },
    });
  } catch (problem) {
    confirm({ title: 'The configuration cannot be reloaded', content: [h('p', {}, 'Everything goes on as it is.'), h('pre.error', {}, problem.message)] });
  }
}

function changesTold({ bulkheads, supervisor, access, ignored }) {
  const lines = bulkheads.map((one) => {
    const keys = one.keys.length ? `: ${one.keys.join(', ')}` : '';
    const replaced = one.replaces_workers ? '; its workers are replaced one after the other' : '';
    const live = one.live_dropped ?? [];
    const dropped = live.length ? `; set live and dropped, since it does not go together with the file: ${live.join(', ')}` : '';
    return `${one.bulkhead} ${one.change}${keys}${replaced}${dropped}`;
  });
  if (supervisor.length) lines.push(`[supervisor]: ${supervisor.join(', ')}`);
  if (access) lines.push('who may submit ([[access]])');
  if (ignored.length) lines.push(`not ${ignored.join(', ')}, which takes a restart of the supervisor`);
  return lines;
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
  // Focuses the input or the cancel button, so that pressing Enter by accident changes nothing.
  (form.querySelector('input') ?? cancel).focus();
}

export function notice(text) {
  const place = byId('notices');
  const told = h('p', {}, text);
  place.append(told);
  while (place.children.length > NOTICES_MAX) place.firstElementChild.remove();
  setTimeout(() => told.remove(), NOTICE_MS);
}

export function showHelp() {
  const keys = [
    ['j  k  or arrows', 'from card to card'],
    ['Enter', 'details of a bulkhead'],
    ['Esc', 'closes what is open'],
    ['/', 'filters the bulkheads'],
    ['p', 'holds the events'],
    ['t', 'light or dark'],
    ['?', 'this help'],
  ];
  const list = keys.map(([key, does]) => h('div', {}, h('dt', {}, h('kbd', {}, key)), h('dd', {}, does)));
  const about = 'Rates are taken over the last three seconds, percentiles over the last one to two minutes; a sparkline has 90 seconds. Late jobs are those that missed their deadline.';
  confirm({ title: 'Keyboard', content: [h('dl.keys', {}, ...list), h('p.muted', {}, about)] });
}
