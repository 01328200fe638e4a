// Keyboard shortcuts, and the choice between the light and dark themes.

import { byId } from './dom.js';

const THEME = 'bulkhead-theme';
const NEXT = new Set(['j', 'ArrowDown', 'ArrowRight']);
const PREVIOUS = new Set(['k', 'ArrowUp', 'ArrowLeft']);

/** `on` contains the actions `close`, `help`, `pause` and `theme`, and `buttons`, which returns the cards' buttons. */
export function listen(on) {
  document.addEventListener('keydown', (event) => {
    // An open dialog handles its own keys.
    if (event.ctrlKey || event.metaKey || event.altKey || byId('dialog').open) return;
    if (event.key === 'Escape') return leave(event, on);
    if (isTyping(event.target)) return;
    if (handleKey(event, on)) event.preventDefault();
  });
}

function handleKey(event, on) {
  if (NEXT.has(event.key)) return step(event, on.buttons(), 1);
  if (PREVIOUS.has(event.key)) return step(event, on.buttons(), -1);
  const action = { '/': () => byId('filter').focus(), '?': on.help, p: on.pause, t: on.theme }[event.key];
  action?.();
  return Boolean(action);
}

function leave(event, on) {
  if (event.target === byId('filter')) event.target.blur();
  else on.close();
}

function isTyping(target) {
  return target.matches('input, select, textarea');
}

/** Arrow keys move between cards only where they are not needed for scrolling. */
function step(event, buttons, by) {
  const at = buttons.indexOf(document.activeElement);
  const isArrow = event.key.startsWith('Arrow');
  if (buttons.length === 0 || (isArrow && at < 0)) return false;
  const next = at < 0 ? 0 : Math.min(buttons.length - 1, Math.max(0, at + by));
  buttons[next].focus();
  buttons[next].closest('.card').scrollIntoView({ block: 'nearest' });
  return true;
}

function isDark() {
  return document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === 'dark'
    : matchMedia('(prefers-color-scheme: dark)').matches;
}

export function switchTheme() {
  const theme = isDark() ? 'light' : 'dark';
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // If there is no storage, the theme applies to this page only.
  }
}

export function restoreTheme() {
  try {
    const theme = localStorage.getItem(THEME);
    if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  } catch {
    // If there is no storage, the system's preference applies.
  }
}
