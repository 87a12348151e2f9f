// The last minutes of the scene, as numbers, and the series that the charts draw from them. Pure.
//
// Counters in a scene are sums since the start. A chart shows the difference of two samples that
// lie `WINDOW_S` apart: long enough to be calm, short enough to follow a change.

export const KEPT_S = 600;
export const WINDOW_S = 15;

const FAILED = ["failed", "broken", "shed"]; // outcomes that are the deployment's
const PARTS = ["wait_s", "prefill_s", "transfer_s", "decode_s"];
const SUMS = [
  "local",
  "remote",
  "failed",
  "prompt_tokens",
  "cached_tokens",
  "stateless_tokens",
  "waiting",
];

/** What the charts need of a scene (with maps, as `store.completeScene` makes it). */
export function sampleOf(scene) {
  const sample = { at_s: scene.at_s, ttft: scene.ttft, in_flight: scene.in_flight };
  for (const key of SUMS) sample[key] = 0;
  sample.thresholds = {};
  let planned = 0;
  let requests = 0;
  for (const home of scene.homes.values()) {
    for (const key of SUMS) sample[key] += home[key];
    if (!home.has_plan) continue;
    sample.thresholds[home.cluster] = [home.threshold_tokens, home.planned_threshold_tokens];
    const weight = home.planned_rps || 1;
    planned += weight * home.planned_share;
    requests += weight;
  }
  sample.planned_share = requests > 0 ? planned / requests : null;
  sample.links = {};
  sample.backlogs = {};
  sample.capacities = {};
  for (const [key, link] of scene.links) {
    sample.links[key] = link.rate_bps;
    sample.backlogs[key] = link.backlog_bytes;
    sample.capacities[key] = link.capacity_bps;
  }
  return sample;
}

export class History {
  constructor(keptSeconds = KEPT_S) {
    this.kept = keptSeconds;
    this.samples = [];
  }

  /** Begins with a sample and the requests that were kept from before it. */
  begin(sample, requests) {
    this.samples = [...samplesBefore(sample, requests, this.kept), sample];
  }

  push(sample) {
    const last = this.samples.at(-1);
    // A clock that was set back would draw the line backwards.
    if (last !== undefined && sample.at_s < last.at_s) this.samples = [];
    if (last !== undefined && sample.at_s === last.at_s) this.samples.pop();
    this.samples.push(sample);
    const first = sample.at_s - this.kept - WINDOW_S;
    let old = 0;
    while (this.samples[old].at_s < first) old += 1;
    if (old > 0) this.samples.splice(0, old);
  }

  /** From and to, in seconds; at least a minute: the first samples should not fill the chart. */
  get span() {
    const last = this.samples.at(-1)?.at_s ?? 0;
    const first = this.samples[0]?.at_s ?? last;
    return [Math.min(last - 60, Math.max(first, last - this.kept)), last];
  }
}

/**
 * [at_s, value] for each sample: `measure(earlier, later, seconds)` of the sample and the one
 * `windowSeconds` before it. The value is null, a gap, where the earlier sample is missing, or
 * where the counters went back because a gateway restarted.
 */
export function windowed(samples, measure, windowSeconds = WINDOW_S) {
  const points = [];
  let first = 0;
  for (let index = 0; index < samples.length; index += 1) {
    const later = samples[index];
    while (first + 1 < index && samples[first + 1].at_s <= later.at_s - windowSeconds) first += 1;
    const earlier = samples[first];
    const seconds = later.at_s - earlier.at_s;
    const value = seconds > 0 ? measure(earlier, later, seconds) : null;
    points.push([later.at_s, Number.isFinite(value) ? value : null]);
  }
  return points;
}

/** The value of each sample as it is. */
export function direct(samples, read) {
  return samples.map((sample) => {
    const value = read(sample);
    return [sample.at_s, Number.isFinite(value) ? value : null];
  });
}

/** The difference of a counter; null where it went back. */
function rise(earlier, later, key) {
  const difference = later[key] - earlier[key];
  return difference >= 0 ? difference : null;
}

/** Requests per second of one route: "local", "remote" or "failed". */
export function requestRate(route) {
  return (earlier, later, seconds) => {
    const finished = rise(earlier, later, route);
    return finished === null ? null : finished / seconds;
  };
}

export function shareOffloaded(earlier, later) {
  const remote = rise(earlier, later, "remote");
  const local = rise(earlier, later, "local");
  if (remote === null || local === null || remote + local === 0) return null;
  return remote / (remote + local);
}

/** The share of the prompts' tokens that one counter has. */
export function shareOfPrompts(key) {
  return (earlier, later) => {
    const part = rise(earlier, later, key);
    const whole = rise(earlier, later, "prompt_tokens");
    return part === null || !(whole > 0) ? null : part / whole;
  };
}

/** The mean of one part of TTFT over the first tokens of the interval. */
export function meanTtft(part) {
  return (earlier, later) => {
    const number = rise(earlier.ttft, later.ttft, "first_tokens");
    const seconds = rise(earlier.ttft, later.ttft, part);
    return seconds === null || !(number > 0) ? null : seconds / number;
  };
}

const STEP_S = 5;

/**
 * Samples from before the page was opened, as far as the kept requests allow: the counters of
 * `sample` without the requests that ended, or had their first token, later. Rates of links and
 * thresholds of that time are not known.
 */
export function samplesBefore(sample, requests, keptSeconds = KEPT_S) {
  if (requests.length === 0) return [];
  const oldest = Math.min(...requests.map((request) => request.at_s + request.total_s));
  const found = [];
  for (
    let at = sample.at_s - STEP_S;
    at >= Math.max(oldest, sample.at_s - keptSeconds);
    at -= STEP_S
  ) {
    found.push(sampleWithout(sample, requests, at));
  }
  return found.reverse();
}

/** As the gateway counts it: an error of the client is none of the deployment. */
function countedAs(request) {
  if (FAILED.includes(request.outcome)) return "failed";
  if (request.outcome !== "completed" && request.ttft_s === null) return null;
  return request.route === "remote" ? "remote" : "local";
}

function sampleWithout(sample, requests, at) {
  const before = {
    ...sample,
    at_s: at,
    ttft: { ...sample.ttft },
    links: {},
    backlogs: {},
    capacities: {},
    thresholds: {},
    planned_share: null,
  };
  for (const request of requests) {
    if (request.ttft_s !== null && request.at_s + request.ttft_s > at) {
      before.ttft.first_tokens -= 1;
      for (const part of PARTS) before.ttft[part] -= request[part];
    }
    if (request.outcome === "in progress" || request.at_s + request.total_s <= at) continue;
    const counted = countedAs(request);
    if (counted === null) continue;
    before[counted] -= 1;
    before.prompt_tokens -= request.prompt_tokens;
    before.cached_tokens -= request.cached_tokens;
  }
  return before;
}

/** `measure` over the window that ends with the sample at `index`. */
export function valueAt(samples, measure, index, windowSeconds = WINDOW_S) {
  if (index < 1) return null;
  const later = samples[index];
  let first = index - 1;
  while (first > 0 && samples[first].at_s > later.at_s - windowSeconds) first -= 1;
  const value = measure(samples[first], later, later.at_s - samples[first].at_s);
  return Number.isFinite(value) ? value : null;
}

/** The figures of the tiles; each is null where nothing happened in the window. */
export function figuresAt(samples, index, windowSeconds = WINDOW_S) {
  const at = (measure) => valueAt(samples, measure, index, windowSeconds);
  const parts = PARTS.map((part) => at(meanTtft(part)));
  const rates = ["local", "remote", "failed"].map((route) => at(requestRate(route)));
  return {
    requests: rates.includes(null) ? null : rates[0] + rates[1] + rates[2],
    failures: rates[2],
    offloaded: at(shareOffloaded),
    ttft: parts.includes(null) ? null : parts.reduce((sum, value) => sum + value, 0),
    cached: at(shareOfPrompts("cached_tokens")),
    stateless: at(shareOfPrompts("stateless_tokens")),
  };
}
