// Which bulkhead needs to be looked at first: by the state of its workers and how well it serves.

const STATES = { failed: 3, degraded: 2, starting: 1, draining: 1 };
const SERVICES = { failing: 3, degraded: 2 };

/** Larger is worse: the worse of the two counts most, then both together. */
function rank(bulkhead) {
  const state = STATES[bulkhead.state] ?? 0;
  const service = SERVICES[bulkhead.service] ?? 0;
  return Math.max(state, service) * 10 + state + service;
}

/** The worst first; those that are alike as they were. */
export function worstFirst(bulkheads) {
  return [...bulkheads].sort((a, b) => rank(b) - rank(a));
}

/** Why a bulkhead is not well; empty if it is. */
export function causes(bulkhead) {
  return [bulkhead.detail, bulkhead.service_cause].filter(Boolean).join(' · ');
}
