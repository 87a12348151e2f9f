// A run of the simulator as scenes: frame k of a run is a scene like one of a live gateway. Pure.
//
// A *column* has one value per frame. *Steps* are [[frame, value], ...]: each value holds until the
// next entry. `console/simulation_report.py` writes both.

import { sampleOf } from "prfaas/history";
import { completeRequest, completeScene } from "prfaas/store";

/** The value of steps at frame `k`. */
export function stepAt(steps, k) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle][0] <= k) low = middle;
    else high = middle - 1;
  }
  return steps[low]?.[1] ?? null;
}

const NODE_STEPS = ["role", "becomes", "status"];
const LINK_STEPS = ["capacity_bps", "verdict", "cause"];
const LINK_COLUMNS = ["rate_bps", "backlog_bytes", "waited_s"];
const HOME_STEPS = [
  "threshold_tokens",
  "planned_threshold_tokens",
  "planned_rps",
  "planned_share",
  "plan_reason",
];
const HOME_COLUMNS = [
  "waiting",
  "local",
  "remote",
  "failed",
  "prompt_tokens",
  "cached_tokens",
  "stateless_tokens",
];
const TTFT_PARTS = ["first_tokens", "wait_s", "prefill_s", "transfer_s", "decode_s"];

function read(given, k, steps, columns) {
  const found = {};
  for (const key of steps) if (given[key] !== undefined) found[key] = stepAt(given[key], k);
  for (const key of columns) if (given[key] !== undefined) found[key] = given[key][k];
  return found;
}

export class Replay {
  /** `model`: of the report; a run does not repeat it. */
  constructor(run, model) {
    this.run = run;
    this.model = model;
    this.times = run.times_s;
    this.requests = decodeRequests(run.requests);
    this.clusterOfNode = new Map(
      run.clusters.flatMap((cluster) => cluster.nodes.map((node) => [node.name, cluster.name])),
    );
    this.samples = this.times.map((_, k) => sampleOf(this.sceneAt(k, false)));
    this.byId = new Map(this.requests.map((request) => [request.id, request]));
  }

  get span() {
    return [this.times[0], this.times.at(-1)];
  }

  /** `withNodes`: the charts need no nodes, and a run has 600 frames. */
  sceneAt(k, withNodes = true) {
    const { run } = this;
    const nodeAt = (node) => ({
      id: node.id,
      name: node.name,
      slots: node.slots,
      ...read(node, k, NODE_STEPS, ["active", "queued"]),
    });
    const threshold = (home) => ({ has_plan: stepAt(home.planned_rps ?? [], k) !== null });
    return completeScene({
      at_s: this.times[k],
      model: this.model,
      policy: run.policy,
      clusters: run.clusters.map(({ name, kind, nodes }) => ({
        name,
        kind,
        nodes: withNodes ? nodes.map(nodeAt) : [],
      })),
      links: run.links.map((link) => ({
        source: link.source,
        target: link.target,
        rtt_s: link.rtt_s,
        ...read(link, k, LINK_STEPS, LINK_COLUMNS),
      })),
      homes: run.homes.map((home) => ({
        cluster: home.cluster,
        ...threshold(home),
        ...read(home, k, HOME_STEPS, HOME_COLUMNS),
      })),
      ttft: read(run.ttft, k, [], TTFT_PARTS),
      in_flight: run.in_flight[k],
    });
  }

  /** The last frame that is not after `at_s`. */
  frameAt(at_s) {
    let low = 0;
    let high = this.times.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.times[middle] <= at_s) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The sampled requests that had arrived, the newest first, at most `most`. */
  requestsAt(at_s, most = 200) {
    let end = this.requests.length;
    while (end > 0 && this.requests[end - 1].at_s > at_s) end -= 1;
    return this.requests.slice(Math.max(0, end - most), end).reverse();
  }

  /** What the router compared, in the form of `/prfaas/v1/explain`; null: it was not kept. */
  explanationOf(request) {
    if (request.alternatives === null) return null;
    const home = this.run.homes.find((one) => one.cluster === request.home);
    const frame = this.frameAt(request.at_s);
    const clusterOf = (name) => this.clusterOfNode.get(name) ?? "";
    return {
      threshold_tokens: home === undefined ? null : stepAt(home.threshold_tokens, frame),
      chosen: {
        wait: false,
        prefill: request.prefill,
        cluster: clusterOf(request.prefill),
        decode: request.decode,
        decode_cluster: clusterOf(request.decode),
        offloaded: request.route === "remote",
        alone: request.route === "alone",
        cached_tokens: request.cached_tokens,
        nbytes: request.nbytes,
        reason: request.reason,
      },
      alternatives: request.alternatives.map((one) => ({ ...one, cluster: clusterOf(one.node) })),
    };
  }
}

/** Requests from columns: a number that names something is an index into `names`. */
export function decodeRequests({ names, columns }) {
  const named = (kind, index) => (index === null || index < 0 ? "" : names[kind][index]);
  return columns.id.map((id, row) => {
    const request = completeRequest({ id: String(id) });
    for (const [key, column] of Object.entries(columns)) {
      if (key !== "id" && key !== "alternatives") request[key] = column[row];
    }
    for (const key of ["home", "route", "outcome", "reason"])
      request[key] = named(key, columns[key][row]);
    for (const key of ["prefill", "decode"]) request[key] = named("node", columns[key][row]);
    const compared = columns.alternatives?.[row] ?? null;
    request.alternatives = compared?.map((one) => decodeAlternative(one, named)) ?? null;
    return request;
  });
}

/** The columns of `_alternatives` in `simulation_report.py`. */
function decodeAlternative([node, cached_tokens, cost_s, ...parts], named) {
  const [wait_s, prefill_s, transfer_s, decode_s] = parts;
  const name = named("node", node);
  return { node: name, cached_tokens, cost_s, wait_s, prefill_s, transfer_s, decode_s };
}

/** The window over which charts of a run average: a sixtieth of it, and at least 15 s. */
export function windowOf(times) {
  return Math.max(15, Math.round((times.at(-1) - times[0]) / 60));
}
