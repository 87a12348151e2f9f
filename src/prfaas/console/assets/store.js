// The scene as the page has it: what the stream or a report said last, and the history of it.
//
// The fields are those of `prfaas/console/scene.py`. The sender omits fields that have their
// default, so every object is completed here, and no other module needs to know the defaults.

import { linkName } from "prfaas/format";
import { History, sampleOf } from "prfaas/history";

const MOST_EVENTS = 300;
const MOST_REQUESTS = 400;

const NODE = {
  role: null,
  becomes: null,
  status: "in use",
  why: null,
  queued: 0,
  active: 0,
  slots: 0,
  wait_s: 0,
  used_bytes: 0,
  evictable_bytes: 0,
  capacity_bytes: 0,
};
const LINK = {
  verdict: "clear",
  cause: "",
  capacity_bps: 0,
  rate_bps: 0,
  backlog_bytes: 0,
  waited_s: 0,
  rtt_s: 0,
  lost_segments: 0,
};
const HOME = {
  has_plan: false,
  threshold_tokens: 0,
  planned_threshold_tokens: 0,
  planned_rps: 0,
  planned_share: 0,
  plan_reason: "",
  waiting: 0,
  local: 0,
  remote: 0,
  failed: 0,
  prompt_tokens: 0,
  cached_tokens: 0,
  stateless_tokens: 0,
  service: "served",
  service_reason: "",
};
const TTFT = { first_tokens: 0, wait_s: 0, prefill_s: 0, transfer_s: 0, decode_s: 0 };
const REQUEST = {
  reason: "",
  prefill: "",
  decode: "",
  prompt_tokens: 0,
  cached_tokens: 0,
  output_tokens: 0,
  nbytes: 0,
  attempts: 1,
  ttft_s: null,
  wait_s: 0,
  prefill_s: 0,
  transfer_s: 0,
  decode_s: 0,
  total_s: 0,
};

export const completeRequest = (request) => ({ ...REQUEST, ...request });
export const completeLink = (link) => ({ ...LINK, ...link });

function completeCluster(cluster, nodes) {
  return { name: cluster.name, kind: cluster.kind, drained: cluster.drained ?? false, nodes };
}

/** A scene with maps: clusters by name, nodes by id, links by "source -> target". */
export function completeScene(scene) {
  const nodesOf = (cluster) => new Map((cluster.nodes ?? []).map((n) => [n.id, { ...NODE, ...n }]));
  return {
    at_s: scene.at_s,
    model: scene.model ?? "",
    policy: scene.policy ?? "",
    clusters: new Map(scene.clusters.map((c) => [c.name, completeCluster(c, nodesOf(c))])),
    links: new Map((scene.links ?? []).map((link) => [linkName(link), completeLink(link)])),
    homes: new Map((scene.homes ?? []).map((home) => [home.cluster, { ...HOME, ...home }])),
    ttft: { ...TTFT, ...scene.ttft },
    in_flight: scene.in_flight ?? 0,
    gateways: scene.gateways ?? [],
  };
}

/** The scene after a delta. Does not change `scene`; what the delta does not name is shared. */
export function applyDelta(scene, delta) {
  const next = { ...scene, at_s: delta.at_s };
  if (delta.clusters !== undefined) {
    next.clusters = new Map(
      delta.clusters.map((c) => [
        c.name,
        completeCluster(c, scene.clusters.get(c.name)?.nodes ?? new Map()),
      ]),
    );
  }
  if (delta.nodes !== undefined) {
    next.clusters = new Map(next.clusters);
    for (const [name, changed] of Object.entries(delta.nodes)) {
      const cluster = next.clusters.get(name);
      if (cluster === undefined) continue;
      const nodes = new Map(cluster.nodes);
      for (const [id, node] of Object.entries(changed)) {
        if (node === null) nodes.delete(id);
        else nodes.set(id, { ...NODE, ...node });
      }
      next.clusters.set(name, { ...cluster, nodes });
    }
  }
  if (delta.links !== undefined) {
    next.links = new Map(scene.links);
    for (const link of delta.links) next.links.set(linkName(link), completeLink(link));
    // A link to a cluster that has gone is not drawn again.
    for (const [key, link] of next.links) {
      if (!next.clusters.has(link.source) || !next.clusters.has(link.target))
        next.links.delete(key);
    }
  }
  if (delta.homes !== undefined) {
    next.homes = new Map(scene.homes);
    for (const home of delta.homes) next.homes.set(home.cluster, { ...HOME, ...home });
  }
  if (delta.ttft !== undefined) next.ttft = { ...TTFT, ...delta.ttft };
  for (const key of ["in_flight", "gateways", "model", "policy"]) {
    if (delta[key] !== undefined) next[key] = delta[key];
  }
  return next;
}

/** Newest first, one for each id, at most `most`. A later message about a request replaces it. */
export function mergeRequests(kept, added, most = MOST_REQUESTS) {
  if (added.length === 0) return kept;
  const changed = new Map(added.map((request) => [request.id, completeRequest(request)]));
  const known = new Set(kept.map((request) => request.id));
  const fresh = [...changed.values()].filter((request) => !known.has(request.id));
  fresh.sort((one, other) => other.at_s - one.at_s);
  return [...fresh, ...kept.map((request) => changed.get(request.id) ?? request)].slice(0, most);
}

/** Oldest first, one for each id, at most `most`. */
export function mergeEvents(kept, added, most = MOST_EVENTS) {
  if (added.length === 0) return kept;
  const newest = kept.length > 0 ? kept[kept.length - 1].id : -Infinity;
  return [...kept, ...added.filter((event) => event.id > newest)].slice(-most);
}

/** Holds the scene and tells subscribers when it, or the selection, has changed. */
export class Store {
  constructor() {
    this.scene = null;
    this.history = new History();
    this.events = [];
    this.requests = [];
    this.tenants = [];
    this.selection = null;
    this.listeners = [];
  }

  subscribe(listener) {
    this.listeners.push(listener);
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  /** The first message of a stream. After a reconnection the history before it is kept. */
  replace(message) {
    this.scene = completeScene(message.scene);
    // A gateway that has restarted counts its events from the beginning again.
    this.events = mergeEvents([], message.events ?? []);
    this.requests = mergeRequests([], message.requests ?? []);
    this.tenants = message.tenants ?? [];
    const sample = sampleOf(this.scene);
    if (this.history.samples.length === 0) this.history.begin(sample, this.requests);
    else this.history.push(sample);
    this.changed();
  }

  apply(delta) {
    if (this.scene === null) return;
    this.scene = applyDelta(this.scene, delta);
    this.events = mergeEvents(this.events, delta.events ?? []);
    this.requests = mergeRequests(this.requests, delta.requests ?? []);
    this.history.push(sampleOf(this.scene));
    this.changed();
  }

  /** {about: "node" | "link" | "request", id}; `null` selects nothing. */
  select(selection) {
    this.selection = selection;
    this.changed();
  }

  /** The node with this id, and its cluster; `undefined` where the scene does not have it. */
  findNode(id) {
    for (const cluster of this.scene?.clusters.values() ?? []) {
      const node = cluster.nodes.get(id);
      if (node !== undefined) return { node, cluster };
    }
    return undefined;
  }
}
