// What the scene means, in sentences: for the headline, the list of problems, the status line that
// a screen reader speaks, and the names of buttons. Pure.

import * as format from "prfaas/format";

const MOST_NAMED = 3; // nodes of one cluster with the same problem; more of them are counted

/** What the system is doing: one or two sentences. */
export function statement(scene, figures, windowSeconds = 15) {
  return `${unservedWords(scene)}${figureWords(scene, figures, windowSeconds)}`;
}

function unservedWords(scene) {
  const homes = [...scene.homes.values()];
  const unserved = homes.filter((home) => home.service === "unserved");
  if (unserved.length === 0) return "";
  if (unserved.length === homes.length) return "No request can be served. ";
  const names = unserved.map((home) => home.cluster).join(", ");
  return `Requests of ${names} cannot be served. `;
}

function figureWords(scene, figures, windowSeconds) {
  const recently = `in the last ${format.duration(windowSeconds)}`;
  if (figures.requests === null) return "The first figures come within a few seconds.";
  if (figures.requests === 0 && scene.in_flight === 0)
    return `No request has finished ${recently}.`;
  if (figures.requests === 0) {
    const flying = format.plural(scene.in_flight, "request is", "requests are");
    return `${flying} in flight; none has finished ${recently}.`;
  }
  const first =
    figures.ttft === null
      ? ""
      : ` The first token comes after ${format.duration(figures.ttft)} on average.`;
  const served = format.perSecond(figures.requests).replace("/s", " requests/s");
  return `${served} are served.${first}${shareWords(scene, figures)}`;
}

function shareWords(scene, figures) {
  if (figures.offloaded === null || scene.links.size === 0) return "";
  if (figures.offloaded === 0) return " Every request is prefilled in its own cluster.";
  return ` ${format.percent(figures.offloaded)} of the requests are prefilled in another cluster.`;
}

// The signals of `scheduler/congestion.py`, in words.
const CAUSES = new Map([
  ["loss", "segments are lost"],
  ["queueing", "its round trip is longer than when it is idle"],
  ["waiting", "bytes wait to be sent"],
  ["utilisation", "it is nearly full"],
]);

/** Why a link has its verdict; a link that is cut needs no reason. */
export function linkCause(link) {
  return link.verdict === "cut" ? "" : (CAUSES.get(link.cause) ?? link.cause);
}

/** "north → west is congested (segments are lost): 3.1 GB wait, the oldest for 2.4 s" */
export function linkState(link) {
  const cause = linkCause(link) ? ` (${linkCause(link)})` : "";
  const [waiting, oldest] = [format.bytes(link.backlog_bytes), format.duration(link.waited_s)];
  const isWaiting = link.backlog_bytes > 0 && link.verdict !== "clear";
  const waits = isWaiting ? `: ${waiting} wait, the oldest for ${oldest}` : "";
  return `${format.linkLabel(link)} is ${link.verdict}${cause}${waits}`;
}

/** The full text of a link's label, for a screen reader. */
export function linkDescription(link) {
  const parts = [
    `Link ${linkState({ ...link, verdict: link.verdict, backlog_bytes: 0 })}`,
    `${format.rateOf(link.rate_bps, link.capacity_bps)} in use`,
    `${format.bytes(link.backlog_bytes)} not yet arrived`,
    `${format.plural(link.lost_segments, "segment")} sent again`,
  ];
  return `${parts.join(", ")}.`;
}

/**
 * Names without the beginning that all of them share, up to a separator: small cells have room for
 * the rest only. "west-prefill-1", "west-prefill-2" become "1", "2".
 */
export function shortNames(names) {
  if (names.length < 2) return names;
  let shared = names[0].length;
  for (const name of names) {
    while (!name.startsWith(names[0].slice(0, shared))) shared -= 1;
  }
  const start = names[0].slice(0, shared).search(/[^-_.:/]*$/); // after the last separator
  return names.map((name) => name.slice(start) || name);
}

/** Busy decode slots, or the prefills there. */
export function nodeLoad(node) {
  if (typeof node.busy === "number") return `${format.percent(node.busy)} busy`; // of a plan
  if (node.role === "prefill") {
    const waits = node.queued > 0 ? `, ${format.count(node.queued)} queued` : "";
    return `${format.count(node.active)} active${waits}`;
  }
  return node.slots > 0
    ? `${node.active} of ${node.slots} slots`
    : `${format.count(node.active)} active`;
}

/** The full text of a node's button, for a screen reader. */
export function nodeDescription(node, cluster) {
  const parts = [`Node ${node.name} of ${cluster}`, node.role ?? "no role", node.status];
  if (node.becomes) parts.push(`becomes ${node.becomes}`);
  if (node.why) parts.push(node.why);
  parts.push(nodeLoad(node));
  if (node.capacity_bytes > 0) {
    parts.push(`memory ${format.percent(node.used_bytes / node.capacity_bytes)} in use`);
  }
  return `${parts.join(", ")}.`;
}

/** What an operator should look at: {severity, text, select}, the worst first. */
export function problems(scene) {
  const found = [...scene.homes.values()].flatMap(serviceProblems);
  for (const [key, link] of scene.links) {
    if (link.verdict === "clear") continue;
    found.push({
      severity: link.verdict === "cut" ? "bad" : "warn",
      text: `Link ${linkState(link)}`,
      select: { about: "link", id: key },
    });
  }
  for (const cluster of scene.clusters.values()) found.push(...clusterProblems(cluster));
  for (const home of scene.homes.values()) {
    if (!home.has_plan && home.service === "served") {
      found.push({ severity: "warn", text: `${home.cluster} has no plan yet`, select: null });
    }
    if (home.waiting > 0) {
      const waiting = format.plural(home.waiting, "request waits", "requests wait");
      const text = `${waiting} for a node at ${home.cluster}`;
      found.push({ severity: "note", text, select: null });
    }
  }
  const rank = { bad: 0, warn: 1, note: 2 };
  return found.sort((one, other) => rank[one.severity] - rank[other.severity]);
}

/** "west is not served: no node of west decodes: both are lost" */
function serviceWords(home) {
  if (home.service === "served") return `${home.cluster} is served as planned again`;
  const level = home.service === "unserved" ? "is not served" : "is served, but not as planned";
  return `${home.cluster} ${level}: ${home.service_reason}`;
}

function serviceProblems(home) {
  if (home.service === "served") return [];
  const severity = home.service === "unserved" ? "bad" : "warn";
  return [{ severity, text: serviceWords(home), select: null }];
}

function clusterProblems(cluster) {
  const found = [];
  if (cluster.drained) {
    found.push({ severity: "note", text: `Cluster ${cluster.name} is drained`, select: null });
  }
  for (const [status, severity] of [
    ["lost", "bad"],
    ["not in use", "warn"],
    ["drains", "note"],
  ]) {
    // The nodes of a drained cluster are not in use because of that, which is said already.
    if (cluster.drained && status === "not in use") continue;
    const nodes = [...cluster.nodes.values()].filter((node) => node.status === status);
    if (nodes.length > MOST_NAMED) {
      const words = status === "drains" ? "drain" : `are ${status}`;
      found.push({
        severity,
        text: `${nodes.length} nodes of ${cluster.name} ${words}`,
        select: { about: "node", id: nodes[0].id },
      });
      continue;
    }
    for (const node of nodes) {
      const words = status === "drains" ? "drains" : `is ${status}`;
      found.push({
        severity,
        text: `Node ${node.name} of ${cluster.name} ${words}${node.why ? `: ${node.why}` : ""}`,
        select: { about: "node", id: node.id },
      });
    }
  }
  return found;
}

/** What changed between two scenes, as sentences for the status line. */
export function changes(before, after) {
  if (before === null) return [];
  const said = [];
  for (const [cluster, home] of after.homes) {
    const was = before.homes.get(cluster);
    if (was !== undefined && was.service !== home.service) said.push(`${serviceWords(home)}.`);
  }
  for (const [key, link] of after.links) {
    const was = before.links.get(key);
    if (was !== undefined && was.verdict !== link.verdict) {
      said.push(`Link ${format.linkLabel(link)} is ${link.verdict}.`);
    }
  }
  for (const [name, cluster] of after.clusters) {
    const was = before.clusters.get(name);
    if (was === undefined) said.push(`Cluster ${name} has joined.`);
    else said.push(...clusterChanges(was, cluster));
  }
  for (const name of before.clusters.keys()) {
    if (!after.clusters.has(name)) said.push(`Cluster ${name} has left.`);
  }
  return said;
}

function clusterChanges(before, after) {
  if (before === after) return []; // shared by `applyDelta`: nothing in it has changed
  const said = [];
  if (before.drained !== after.drained) {
    said.push(`Cluster ${after.name} is ${after.drained ? "drained" : "in use again"}.`);
  }
  for (const [id, node] of after.nodes) {
    const was = before.nodes.get(id);
    if (was === node) continue;
    if (was === undefined) said.push(`Node ${node.name} of ${after.name} has joined.`);
    else if (was.status !== node.status) {
      const words = node.status === "drains" ? "drains" : `is ${node.status}`;
      said.push(`Node ${node.name} of ${after.name} ${words}.`);
    } else if (was.role !== node.role && node.role !== null) {
      said.push(`Node ${node.name} of ${after.name} is a ${node.role} node now.`);
    }
  }
  for (const [id, node] of before.nodes) {
    if (!after.nodes.has(id)) said.push(`Node ${node.name} of ${after.name} has left.`);
  }
  return said;
}

/** Where a request went, in one sentence. */
export function routeWords(request) {
  if (!request.prefill && !request.decode) {
    return request.route === "none" ? "No node served it." : `It was routed ${request.route}.`;
  }
  if (request.route === "alone" || request.prefill === request.decode) {
    return `Node ${request.decode || request.prefill} prefilled and decoded it.`;
  }
  const size = request.nbytes > 0 ? ` of ${format.bytes(request.nbytes)}` : "";
  const over = request.route === "remote" ? "in another cluster " : "";
  const handed = `handed its KV${size} to node ${request.decode}, which decoded it`;
  return `Node ${request.prefill} prefilled it ${over}and ${handed}.`;
}
