// The only module that creates elements. Text is never parsed as markup, and invisible characters are made visible.

// Control characters, characters that change the writing direction, and zero-width characters.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e007f}]/gu;

export function visible(text) {
  return String(text).replace(UNSEEN, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, '0')}`);
}

export const byId = (id) => document.getElementById(id);

/** Creates an element: `h('span.state', { title: 'x', onclick: f }, 'text', child)`. */
export function h(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split('.');
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(' ');
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child != null).map(node));
  return element;
}

function node(child) {
  return child instanceof Node ? child : visible(child);
}

function setAttribute(element, name, value) {
  if (value == null || value === false) return;
  if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
  else element.setAttribute(name, value === true ? '' : visible(value));
}

/** Sets the text of an element only if it differs. */
export function setText(element, text) {
  const shown = visible(text ?? '');
  if (element.textContent !== shown) element.textContent = shown;
}

export function setData(element, name, value) {
  if (element.dataset[name] !== String(value)) element.dataset[name] = value;
}

/** Fills a table body with these rows and reuses its cells. A cell is text, or `{ text, state, title }`. */
export function fillRows(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.insertRow();
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((cell, column) => fillCell(row.cells[column] ?? row.insertCell(), cell));
  });
}

function fillCell(element, cell) {
  const { text, state = '', title = '' } = typeof cell === 'object' && cell !== null ? cell : { text: cell };
  setText(element, text);
  setData(element, 'state', state);
  if (element.title !== visible(title)) element.title = visible(title);
}

/** Creates a table with these column headers. Returns the table and its body. */
export function table(caption, heads) {
  const body = h('tbody');
  const row = h('tr', {}, ...heads.map((head) => h('th', { scope: 'col' }, head)));
  return { element: h('div.scroll', {}, h('table', { 'aria-label': caption }, h('thead', {}, row), body)), body };
}

/** Runs `work` at most once per frame; in a hidden tab, which has no frames, after a short delay. */
export function batched(work) {
  let isDue = false;
  const run = () => {
    if (!isDue) return;
    isDue = false;
    work();
  };
  return () => {
    if (isDue) return;
    isDue = true;
    if (document.hidden) setTimeout(run, 1000);
    else requestAnimationFrame(run);
  };
}
