// A card for each bulkhead with its current state. The numbers keep their positions.

import { h, setData, setText } from './dom.js';
import { count, millis, rate, word } from './format.js';
import { COUNTED } from './history.js';
import { causes, worstFirst } from './worst.js';

/** Number of seconds in a sparkline. */
const SPARK_SAMPLES = 90;
const SPARK = { width: 180, height: 34 };

export class Cards {
  constructor(place, open) {
    this.place = place;
    this.open = open;
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
    worstFirst(bulkheads).forEach((bulkhead, at) => {
      const card = this.card(bulkhead.name);
      if (this.place.children[at] !== card.element) this.place.insertBefore(card.element, this.place.children[at] ?? null);
      card.update(bulkhead, history, hasBreaker(bulkhead));
    });
    // Moving an element removes its focus.
    if (this.place.contains(focused) && document.activeElement !== focused) focused.focus({ preventScroll: true });
    this.filter(this.text);
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
    return shown;
  }

  /** Returns the buttons of the visible cards, in order. */
  buttons() {
    return [...this.place.querySelectorAll('.card:not([hidden]) h3 button')];
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

/** Successful jobs as an area, other outcomes as a line above it. */
class Sparkline {
  constructor() {
    this.area = path('area');
    this.good = path('good');
    this.bad = path('bad');
    this.element = svg('svg', { class: 'spark', viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: 'none' });
    this.element.setAttribute('role', 'img');
    this.element.append(this.area, this.good, this.bad);
  }

  update(samples) {
    const known = samples.map((sample) => sample.gained).filter(Boolean);
    const good = known.map((gain) => gain.ok / gain.seconds);
    const bad = known.map((gain) => (gain.rejected + gain.failed + gain.late + gain.crashed) / gain.seconds);
    const top = Math.max(1, ...good, ...bad);
    this.good.setAttribute('d', curve(good, top));
    this.area.setAttribute('d', `${curve(good, top)}V${SPARK.height}H${x(0, good.length).toFixed(1)}Z`);
    this.bad.setAttribute('d', curve(bad, top, (at) => bad[at] > 0 || bad[at - 1] > 0 || bad[at + 1] > 0));
    const label = `the last ${samples.length} seconds: at most ${rate(Math.max(0, ...good))} ok and ${rate(Math.max(0, ...bad))} other jobs per second`;
    this.element.setAttribute('aria-label', label);
  }
}

const x = (at, length) => SPARK.width - ((length - 1 - at) * SPARK.width) / (SPARK_SAMPLES - 1);

/** Returns a line through the values, with gaps where values are of no interest. */
function curve(values, top, isOfInterest = () => true) {
  let isDown = false;
  const steps = values.map((value, at) => {
    const step = isDown ? 'L' : 'M';
    isDown = isOfInterest(at);
    const y = SPARK.height - 1 - (value / top) * (SPARK.height - 3);
    return isDown ? `${step}${x(at, values.length).toFixed(1)} ${y.toFixed(1)}` : '';
  });
  return steps.join('') || `M0 ${SPARK.height}`;
}

function svg(tag, attributes) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const path = (kind) => svg('path', { class: kind, 'vector-effect': 'non-scaling-stroke' });
