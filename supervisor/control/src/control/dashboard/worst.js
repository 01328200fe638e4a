// Orders the bulkheads by urgency, based on the state of the workers and the service state.

const STATES = { failed: 3, degraded: 2, starting: 1, draining: 1 };
const SERVICES = { failing: 3, degraded: 2 };

/** Returns the urgency. The worse of the two states counts most, then their sum. */
function rank(bulkhead) {
  const state = STATES[bulkhead.state] ?? 0;
  const service = SERVICES[bulkhead.service] ?? 0;
  return Math.max(state, service) * 10 + state + service;
}

/** Returns true if workers are missing or jobs fail, so that an operator should look at the bulkhead. */
export const isTroubled = (bulkhead) => rank(bulkhead) >= 20;

/** Returns true if all workers are ready and the jobs succeed. */
export const isHealthy = (bulkhead) => rank(bulkhead) === 0;

/** Sorts the most urgent bulkheads first. Bulkheads of equal urgency keep their order. */
export function worstFirst(bulkheads) {
  return [...bulkheads].sort((a, b) => rank(b) - rank(a));
}

/** Returns the reason why a bulkhead has problems, or an empty text if it has none. */
export function causes(bulkhead) {
  return [bulkhead.detail, bulkhead.service_cause].filter(Boolean).join(' · ');
}
