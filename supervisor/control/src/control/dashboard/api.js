// Requests to the API at the page's origin.

// Absolute addresses, because relative requests fail if the page's address contains the token.
const url = (path) => location.origin + path;

const ANSWER_WITHIN_MS = 20_000;

/** An error response from the API, with the API's message. */
export class Problem extends Error {
  constructor(message, body = {}) {
    super(message);
    this.body = body;
  }
}

/** Time limit for a replay, which can take as long as the deadline of the job. */
const REPLAY_WITHIN_MS = 600_000;

export async function request(method, path, body, within = ANSWER_WITHIN_MS) {
  const headers = method === 'GET' ? {} : { 'Content-Type': 'application/json' };
  let response;
  let text;
  try {
    const signal = AbortSignal.timeout(within);
    const sent = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(url(path), { method, headers, body: sent, cache: 'no-store', signal });
    text = await response.text();
  } catch {
    throw new Problem('the supervisor is not responding');
  }
  if (response.ok) return text;
  const problem = parsed(text);
  throw new Problem(problem.detail ?? `the supervisor responded with status ${response.status}`, problem);
}

function parsed(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}

export const get = async (path) => JSON.parse(await request('GET', path));
export const bulkheadPath = (name) => `/v1/bulkheads/${encodeURIComponent(name)}`;
export const logLines = async (name, limit) => {
  const text = await request('GET', `${bulkheadPath(name)}/logs?limit=${limit}`);
  return text.split('\n').filter(Boolean).map(parsed);
};
export const crashList = async (limit) => (await get(`/v1/crashes?limit=${limit}`)).crashes;
export const crashPath = (id) => `/v1/crashes/${encodeURIComponent(id)}`;
export const crashReport = (id) => get(crashPath(id));
export const replayCrash = async (id) => JSON.parse(await request('POST', `${crashPath(id)}/replay`, undefined, REPLAY_WITHIN_MS));

/** Returns the names of the bulkheads with a configured breaker. */
export async function withBreaker() {
  const config = await get('/v1/config');
  return new Set(config.bulkheads.filter((bulkhead) => bulkhead.breaker).map((bulkhead) => bulkhead.name));
}

/** Returns true if this version supports advice. */
export async function hasAdvice() {
  return '/v1/bulkheads/{name}/advice' in (await get('/openapi.json')).paths;
}

export const openStream = (limit) => new EventSource(url(`/v1/watch?limit=${limit}`));
