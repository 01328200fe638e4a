// Recent load of all bulkheads: one row per bulkhead, one column per second.

import { byId, fillRows, h, setText } from './dom.js';
import { count, percent, plural } from './format.js';
import { SAMPLES_MAX } from './history.js';

/** Height of a row in CSS pixels. The style sheet contains the same value. */
const ROW = 22;
const GAP = 3;

/** Number of seconds in the map: the smallest of these that covers the samples. */
const SPANS = [120, 300, SAMPLES_MAX];

export class HeatMap {
  constructor() {
    this.canvas = byId('heat');
    this.names = byId('heat-names');
    this.hint = byId('heat-hint');
    this.idle = this.hint.textContent;
    this.rows = [];
    this.span = SPANS[0];
    this.canvas.addEventListener('pointermove', (event) => this.point(event));
    this.canvas.addEventListener('pointerleave', () => setText(this.hint, this.idle));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.repaint();
  }

  /** Reads the colours from the style sheet, because they depend on the theme. */
  repaint() {
    const colour = (name) => {
      const swatch = byId('legend').querySelector(`.heat-${name}`);
      return getComputedStyle(swatch).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);
    };
    this.ramp = [0, 1, 2, 3, 4, 5, 6].map(colour);
    this.crash = `rgb(${colour('crash').join(' ')})`;
    this.draw();
  }

  update(now, bulkheads, history) {
    this.now = now;
    this.rows = bulkheads.map(({ name }) => ({ name, samples: history.of(name) }));
    const age = (now - Math.min(now, ...this.rows.map(({ samples }) => samples[0].at))) / 1000;
    this.span = SPANS.find((span) => span > age) ?? SAMPLES_MAX;
    this.label();
    this.draw();
    this.describe();
  }

  label() {
    while (this.names.children.length > this.rows.length) this.names.lastElementChild.remove();
    this.rows.forEach(({ name }, at) => {
      const label = this.names.children[at] ?? this.names.appendChild(h('span'));
      setText(label, name);
    });
    const [begin, middle] = byId('heat-axis').children;
    setText(begin, `${this.span / 60} min ago`);
    setText(middle, `${this.span / 120} min`);
  }

  draw() {
    const { canvas, rows } = this;
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, Math.max(1, rows.length) * ROW];
    canvas.style.setProperty('height', `${height}px`);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext('2d');
    pen.scale(scale, scale);
    const second = width / this.span;
    rows.forEach(({ samples }, at) => this.drawRow(pen, samples, at * ROW, width, second));
  }

  drawRow(pen, samples, top, width, second) {
    pen.fillStyle = this.mix(0);
    pen.globalAlpha = 0.45;
    pen.fillRect(0, top, width, ROW - GAP);
    pen.globalAlpha = 1;
    for (const sample of samples) {
      const left = width - ((this.now - sample.at) / 1000 + 1) * second;
      if (left < -second) continue;
      pen.fillStyle = this.mix(sample.load);
      // Slightly wider than a column, to avoid visible seams.
      pen.fillRect(left, top, second + 0.6, ROW - GAP);
    }
    pen.fillStyle = this.crash;
    for (const sample of samples) {
      if (!(sample.gained?.crashed > 0)) continue;
      const left = width - ((this.now - sample.at) / 1000 + 1) * second;
      pen.fillRect(left - 0.5, top, Math.max(2, second), 6);
    }
  }

  /** Returns the colour of a load between 0 and 2. */
  mix(load) {
    // Full permits and a non-empty queue are different states, so there is no gradient between them.
    const place = load <= 1 ? load * 4 : 5 + (load - 1);
    const low = load <= 1 ? Math.min(3, Math.floor(place)) : 5;
    const share = place - low;
    const parts = this.ramp[low].map((part, at) => Math.round(part + (this.ramp[low + 1][at] - part) * share));
    return `rgb(${parts.join(' ')})`;
  }

  point(event) {
    const row = this.rows[Math.floor(event.offsetY / ROW)];
    const age = (1 - event.offsetX / this.canvas.clientWidth) * this.span * 1000;
    const at = this.now - age;
    const sample = row?.samples.find((one) => Math.abs(one.at - at) <= 1000);
    if (!sample) return setText(this.hint, this.idle);
    const { inFlight, limit, queued, gained } = sample;
    const crashes = gained?.crashed > 0 ? `, ${plural(gained.crashed, 'crash', 'crashes')}` : '';
    setText(this.hint, `${row.name}, ${Math.round(age / 1000)} s ago: ${inFlight} of ${limit} in flight, ${queued} queued${crashes}`);
  }

  /** Describes the map in text. */
  describe() {
    const rows = this.rows.map(({ name, samples }) => {
      const share = (one) => Math.min(1, one.load);
      const mean = (some) => some.reduce((total, one) => total + share(one), 0) / Math.max(1, some.length);
      const most = (what) => samples.reduce((top, one) => Math.max(top, what(one)), 0);
      const crashes = samples.reduce((total, one) => total + (one.gained?.crashed ?? 0), 0);
      const now = samples.length ? share(samples.at(-1)) : 0;
      return { name, now, minute: mean(samples.slice(-60)), all: mean(samples), peak: most(share), queued: most((one) => one.queued), crashes };
    });
    fillRows(
      byId('heat-table'),
      rows.map((row) => [row.name, percent(row.now), percent(row.minute), percent(row.all), percent(row.peak), count(row.queued), count(row.crashes)]),
    );
    const texts = rows.slice(0, 20).map((row) => `${row.name} ${percent(row.now)} now, ${percent(row.all)} on average`);
    this.canvas.setAttribute('aria-label', `Utilisation by bulkhead over the last minutes. ${texts.join('; ')}. The table below has the numbers.`);
  }
}
