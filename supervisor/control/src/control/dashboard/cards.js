// A card for each bulkhead, showing its current state. The numbers keep their positions.

import { h, setData, setText } from './dom.js';
import { count, millis, rate, word } from './format.js';
import { COUNTED } from './history.js';
import { causes, isHealthy, worstFirst } from './worst.js';

/** Number of seconds in a sparkline. */
const SPARK_SAMPLES = 90;
const SPARK = { width: 180, height: 34 };

/** Minimum height of a rate above zero in a sparkline, in pixels. */
const RATE_HEIGHT_MIN = 2;

/** Minimum number of bulkheads at which the healthy ones are folded. */
const FOLDED_FROM = 12;

export class Cards {
  constructor(place, fold, open) {
    this.place = place;
    this.fold = fold;
    this.folded = fold.lastElementChild;
    this.open = open;
    this.isSearching = false;
    this.cards = new Map();
    this.text = '';
  }

  update(bulkheads, history, hasBreaker) {
    const names = new Set(bulkheads.map((bulkhead) => bulkhead.name));
    for (const [name, card] of this.cards) {
      if (names.has(name)) continue;
      card.element.remove();
      this.cards.delete(name);
    }
    const focused = document.activeElement;
    const sorted = worstFirst(bulkheads);
    const isFolded = (bulkhead) => bulkheads.length >= FOLDED_FROM && isHealthy(bulkhead);
    this.arrange(this.place, sorted.filter((bulkhead) => !isFolded(bulkhead)));
    this.arrange(this.folded, sorted.filter(isFolded));
    for (const bulkhead of bulkheads) this.card(bulkhead.name).update(bulkhead, history, hasBreaker(bulkhead));
    // Moving an element removes its focus.
    const isInCard = this.place.contains(focused) || this.folded.contains(focused);
    if (isInCard && document.activeElement !== focused) focused.focus({ preventScroll: true });
    this.filter(this.text);
  }

  /** Puts the cards of these bulkheads into a place, in this order. */
  arrange(place, bulkheads) {
    bulkheads.forEach(({ name }, at) => {
      const { element } = this.card(name);
      if (place.children[at] !== element) place.insertBefore(element, place.children[at] ?? null);
    });
  }

  card(name) {
    const known = this.cards.get(name);
    if (known) return known;
    const card = new Card(name, () => this.open(name));
    this.cards.set(name, card);
    return card;
  }

  /** Shows only cards whose name, state or service contains the text. Returns the number of shown cards. */
  filter(text) {
    this.text = text.trim().toLowerCase();
    let shown = 0;
    for (const card of this.cards.values()) {
      const isShown = `${card.name} ${card.state} ${card.service}`.toLowerCase().includes(this.text);
      card.element.hidden = !isShown;
      if (isShown) shown += 1;
    }
    this.showFold();
    return shown;
  }

  /** Shows the number of folded cards. A search opens the fold. */
  showFold() {
    const folded = [...this.folded.children].filter((card) => !card.hidden).length;
    this.fold.hidden = folded === 0;
    const noun = folded === 1 ? 'healthy bulkhead' : 'healthy bulkheads';
    setText(this.fold.firstElementChild, `${count(folded)} ${this.place.children.length ? 'other ' : ''}${noun}`);
    const isSearching = this.text !== '';
    if (isSearching !== this.isSearching) this.fold.open = isSearching;
    this.isSearching = isSearching;
  }

  /** Returns the buttons of the visible cards, in order. */
  buttons() {
    const places = this.fold.open ? [this.place, this.folded] : [this.place];
    return places.flatMap((place) => [...place.querySelectorAll('.card:not([hidden]) h3 button')]);
  }

  focus(name) {
    this.cards.get(name)?.button.focus();
  }
}

class Card {
  constructor(name, open) {
    this.name = name;
    this.button = h('button', { type: 'button', onclick: open, 'aria-haspopup': 'dialog' }, name);
    this.badge = h('span.badge');
    this.serviceBadge = h('span.badge.service');
    this.permits = new Gauge('in flight');
    this.queue = new Gauge('queue');
    this.counts = Object.fromEntries(COUNTED.map((what) => [what, h('dd')]));
    const counted = COUNTED.map((what) => h('div', { 'data-what': what }, h('dt', {}, what), this.counts[what]));
    this.spark = new Sparkline();
    this.p50 = h('b');
    this.p99 = h('b');
    this.breaker = h('span.breaker');
    this.detail = h('p.why');
    this.element = h(
      'article.card',
      { 'data-name': name },
      h('header', {}, h('h3', {}, this.button), h('span.badges', {}, this.badge, this.serviceBadge)),
      this.permits.element,
      this.queue.element,
      h('dl.counts', { 'aria-label': 'jobs per second' }, ...counted),
      this.spark.element,
      h('footer', {}, h('span', {}, 'p50 ', this.p50), h('span', {}, 'p99 ', this.p99), this.breaker),
      this.detail,
    );
  }

  update(bulkhead, history, hasBreaker) {
    this.state = bulkhead.state;
    setData(this.element, 'state', bulkhead.state);
    setText(this.badge, bulkhead.state);
    setData(this.badge, 'state', bulkhead.state);
    this.service = bulkhead.service;
    setText(this.serviceBadge, `service ${bulkhead.service}`);
    setData(this.serviceBadge, 'state', bulkhead.service);
    this.permits.update(bulkhead.in_flight, bulkhead.limit);
    this.queue.update(bulkhead.queued, bulkhead.queue_capacity);
    const rates = history.rates(bulkhead.name);
    for (const what of COUNTED) {
      setText(this.counts[what], rate(rates[what]));
      setData(this.counts[what].parentElement, 'some', rates[what] > 0);
    }
    this.spark.update(history.of(bulkhead.name).slice(-SPARK_SAMPLES));
    setText(this.p50, millis(bulkhead.latency_ms.run.p50));
    setText(this.p99, millis(bulkhead.latency_ms.run.p99));
    setText(this.breaker, hasBreaker ? `breaker ${word(bulkhead.breaker)}` : '');
    setData(this.breaker, 'state', bulkhead.breaker);
    setText(this.detail, causes(bulkhead));
    this.detail.hidden = !causes(bulkhead);
  }
}

/** A value relative to its maximum. */
class Gauge {
  constructor(name) {
    this.fill = h('i');
    this.now = h('b');
    this.most = h('span');
    this.bar = h('div.track', { role: 'meter', 'aria-label': name, 'aria-valuemin': 0 }, this.fill);
    this.element = h('div.gauge', {}, h('span.name', {}, name), this.bar, h('span.value', {}, this.now, this.most));
  }

  update(now, most) {
    const share = most > 0 ? Math.min(1, now / most) : now > 0 ? 1 : 0;
    this.fill.style.setProperty('--share', share.toFixed(3));
    setData(this.fill, 'high', share >= 1 ? 'full' : share >= 0.8 ? 'high' : 'low');
    this.bar.setAttribute('aria-valuenow', now);
    this.bar.setAttribute('aria-valuemax', Math.max(most, now));
    setText(this.now, count(now));
    setText(this.most, ` / ${count(most)}`);
  }
}

/** Layers of a sparkline from bottom to top, and the outcomes that each of them counts. */
const LAYERS = [
  ['good', ['ok']],
  ['refused', ['rejected']],
  ['bad', ['failed', 'late', 'crashed']],
];

/** Jobs per second by outcome: a stack for each second. */
class Sparkline {
  constructor() {
    this.layers = LAYERS.map(([name]) => svg('path', { class: name }));
    this.element = svg('svg', { class: 'spark', viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: 'none' });
    this.element.setAttribute('role', 'img');
    this.element.append(...this.layers);
  }

  update(samples) {
    const known = samples.map((sample) => sample.gained).filter(Boolean);
    const stacks = known.map((gain) => LAYERS.map(([, outcomes]) => outcomes.reduce((total, what) => total + gain[what], 0) / gain.seconds));
    const sums = stacks.map((stack) => stack.reduce((total, one) => total + one, 0));
    const heights = stacks.map((stack) => stackHeights(stack, Math.max(1, ...sums)));
    this.layers.forEach((layer, at) => layer.setAttribute('d', bars(heights, at) || `M0 ${SPARK.height}`));
    const most = LAYERS.map((_, at) => rate(Math.max(0, ...stacks.map((stack) => stack[at]))));
    const label = `the last ${samples.length} seconds: at most ${most[0]} ok, ${most[1]} rejected and ${most[2]} other jobs per second`;
    this.element.setAttribute('aria-label', label);
  }
}

/** Returns the heights of the layers. Small rates stay visible, at the expense of the highest layer. */
function stackHeights(stack, top) {
  const heights = stack.map((value) => (value > 0 ? Math.max(RATE_HEIGHT_MIN, (value / top) * SPARK.height) : 0));
  const surplus = heights.reduce((total, one) => total + one, 0) - SPARK.height;
  if (surplus > 0) heights[heights.indexOf(Math.max(...heights))] -= surplus;
  return heights;
}

/** Returns the path of one layer, with a bar for each second. The newest is on the right. */
function bars(heights, layer) {
  const width = SPARK.width / SPARK_SAMPLES;
  return heights
    .map((stack, at) => {
      if (!stack[layer]) return '';
      const left = SPARK.width - (heights.length - at) * width;
      const below = stack.slice(0, layer).reduce((total, one) => total + one, 0);
      const height = stack[layer].toFixed(1);
      return `M${left.toFixed(1)} ${(SPARK.height - below).toFixed(1)}v-${height}h${width.toFixed(2)}v${height}z`;
    })
    .join('');
}

function svg(tag, attributes) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
