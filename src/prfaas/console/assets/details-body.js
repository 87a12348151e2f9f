// What the panel shows of a node, a link and a request. Each function returns
// {title(), element, draw()}; `draw` writes the current numbers.

import { Facts, splitWithNumbers } from "prfaas/bars";
import { Chart } from "prfaas/chart";
import { html, KeyedList, replaceChildren, setAttribute, setText } from "prfaas/dom";
import { explanationView } from "prfaas/explanation";
import * as format from "prfaas/format";
import * as history from "prfaas/history";
import * as words from "prfaas/words";

const MOST_REQUESTS = 8;

/** A list of requests as buttons; `passes(request)` chooses them. */
function requestList(store, page, passes) {
  const list = html("ul", { class: "request-list" });
  const title = html("h3", {}, "Latest requests there");
  const items = new KeyedList(
    list,
    (request) =>
      html(
        "li",
        {},
        html("button", {
          type: "button",
          class: "plain",
          on: { click: () => store.select({ about: "request", id: request.id }) },
        }),
      ),
    (item, request) => {
      const first =
        request.ttft_s === null
          ? request.outcome
          : `first token after ${format.duration(request.ttft_s)}`;
      setText(
        item.firstElementChild,
        [
          page.formatTime(request.at_s),
          format.tokens(request.prompt_tokens),
          request.route,
          first,
        ].join(", "),
      );
    },
  );
  const draw = () => {
    const found = store.requests.filter(passes).slice(0, MOST_REQUESTS);
    setAttribute(title, "hidden", found.length === 0);
    items.draw(found, (request) => request.id);
  };
  return { element: html("div", {}, title, list), draw };
}

export function nodeBody(id, store, page) {
  const facts = new Facts();
  const problem = html("p", { class: "problem" });
  let name = store.findNode(id)?.node.name ?? id;
  const requests = requestList(
    store,
    page,
    (request) => request.prefill === name || request.decode === name,
  );
  return {
    title: () => `Node ${name}`,
    element: html("div", {}, problem, facts.element, requests.element),
    draw() {
      const found = store.findNode(id);
      setAttribute(problem, "hidden", found !== undefined && found.node.why === null);
      if (found === undefined) {
        setText(problem, "The node is no longer part of the deployment.");
        return;
      }
      const { node, cluster } = found;
      name = node.name;
      setText(problem, node.why === null ? "" : `It gets no requests: ${node.why}.`);
      facts.draw(nodeFacts(node, cluster, id));
      requests.draw();
    },
  };
}

function nodeFacts(node, cluster, id) {
  const free = node.capacity_bytes - node.used_bytes - node.evictable_bytes;
  const hasMemory = node.capacity_bytes > 0;
  return [
    ["cluster", `${cluster.name}, a ${cluster.kind === "pd" ? "PD" : "PrfaaS"} cluster`],
    ["status", node.status],
    ["role", node.role ?? "none yet"],
    ["becomes", node.becomes],
    ["requests", words.nodeLoad(node)],
    [
      "next prefill",
      node.role === "prefill" && node.status === "in use"
        ? node.wait_s > 0
          ? `in ${format.duration(node.wait_s)}`
          : "at once"
        : null,
    ],
    [
      "KV in use",
      hasMemory ? `${format.bytes(node.used_bytes)} of ${format.bytes(node.capacity_bytes)}` : null,
    ],
    ["KV to evict", hasMemory ? `${format.bytes(node.evictable_bytes)}: cached prefixes` : null],
    ["KV free", hasMemory ? format.bytes(Math.max(0, free)) : null],
    ["address", id === node.name ? null : id],
  ];
}

export function linkBody(id, store, page) {
  const facts = new Facts();
  const state = html("p", { class: "link-state" });
  const chartOf = (given) =>
    new Chart({ formatTime: page.formatTime, zone: page.zone ?? null, ...given });
  const rate = chartOf({ id: "link-rate", title: "Rate", format: format.rate });
  const queue = chartOf({ id: "link-queue", title: "Queue", format: format.bytes });
  const title = id.replace(" -> ", " → ");
  const passes = (request) => {
    const link = store.scene.links.get(id);
    return request.route === "remote" && link !== undefined && usesLink(store, request, link);
  };
  const requests = requestList(store, page, passes);
  return {
    title: () => `Link ${title}`,
    element: html("div", {}, state, facts.element, rate.element, queue.element, requests.element),
    draw() {
      const link = store.scene.links.get(id);
      setText(
        state,
        link === undefined
          ? "The link is no longer part of the deployment."
          : `${words.linkState(link)}.`,
      );
      setAttribute(state, "data-verdict", link?.verdict);
      if (link === undefined) return;
      facts.draw(linkFacts(link));
      const { samples, span } = store.history;
      for (const chart of [rate, queue]) setAttribute(chart.element, "hidden", samples.length < 2);
      const read = (key) => history.direct(samples, (sample) => sample[key][id] ?? null);
      const common = { from: span[0], to: span[1], cursor: page.cursor?.() ?? null };
      rate.draw({
        series: [
          { name: "rate", tone: "transfer", points: read("links") },
          { name: "capacity", tone: "plan", dashed: true, points: read("capacities") },
        ],
        ...common,
      });
      queue.draw({
        series: [{ name: "not yet arrived", tone: "warn", points: read("backlogs") }],
        ...common,
      });
      requests.draw();
    },
  };
}

/** Whether the request's KV crossed the link, from its prefill node to its decode node. */
function usesLink(store, request, link) {
  const has = (cluster, name) =>
    [...(store.scene.clusters.get(cluster)?.nodes.values() ?? [])].some(
      (node) => node.name === name,
    );
  return has(link.source, request.prefill) && has(link.target, request.decode);
}

function linkFacts(link) {
  const used =
    link.capacity_bps > 0 ? ` (${format.percent(link.rate_bps / link.capacity_bps)})` : "";
  return [
    ["verdict", link.verdict],
    ["cause", words.linkCause(link)],
    ["rate", `${format.rateOf(link.rate_bps, link.capacity_bps)}${used}`],
    ["queue", `${format.bytes(link.backlog_bytes)} not yet arrived`],
    ["oldest waits", link.backlog_bytes > 0 ? format.duration(link.waited_s) : null],
    ["round trip", link.rtt_s > 0 ? format.duration(link.rtt_s) : null],
    ["sent again", format.plural(link.lost_segments, "segment")],
  ];
}

export function requestBody(id, store, page) {
  const answer = html("div", {});
  const shown = { request: null, loaded: null };
  const redraw = () => {
    const request = shown.loaded?.request ?? shown.request;
    if (request !== null) replaceChildren(answer, requestParts(request, shown.loaded, page));
  };
  const load = () =>
    page.loadRequest(id).then(
      (loaded) => {
        shown.loaded = loaded;
        redraw();
      },
      (error) => {
        shown.loaded = { request: null, failures: [error.message], explanation: null };
        redraw();
      },
    );
  load();
  return {
    title: () => `Request ${id}`,
    element: answer,
    draw() {
      const request = store.requests.find((one) => one.id === id) ?? shown.request;
      if (request === shown.request) return;
      // It has ended since: what was loaded before is out of date.
      if (shown.request !== null) load();
      shown.request = request;
      redraw();
    },
  };
}

function requestParts(request, loaded, page) {
  const first =
    request.ttft_s === null
      ? "It has no first token."
      : `Its first token came after ${format.duration(request.ttft_s)}:`;
  const failures = loaded?.failures ?? [];
  return [
    html("p", { class: "choice" }, words.routeWords(request)),
    html("p", {}, first),
    request.ttft_s === null ? null : splitWithNumbers(request),
    html("h3", {}, "Why it went there"),
    whyParts(request, loaded),
    html("h3", {}, "The request"),
    new Facts().draw(requestFacts(request, page)),
    failures.length > 0 ? html("h3", {}, "Failures") : null,
    failures.map((text) => html("p", { class: "problem" }, text)),
  ];
}

function whyParts(request, loaded) {
  const reason = request.reason
    ? html("p", { class: "reason" }, html("b", {}, "Why: "), `${request.reason}.`)
    : null;
  if (loaded === null) return [reason, html("p", { class: "hint" }, "The explanation is loading.")];
  const { explanation } = loaded;
  // The explanation has the reason, too, where there is one.
  return [explanation ? null : reason, explanationView(explanation, request.prompt_tokens, false)];
}

function requestFacts(request, page) {
  const [prompt, cached] = [request.prompt_tokens, request.cached_tokens].map(format.count);
  return [
    ["arrived", `${page.formatTime(request.at_s)} at ${request.home || "an unknown cluster"}`],
    ["outcome", request.outcome],
    ["prefilled by", request.prefill],
    ["decoded by", request.decode],
    ["prompt", `${prompt} tokens, ${cached} of them cached`],
    ["answer", `${format.count(request.output_tokens)} tokens`],
    ["handed over", request.nbytes > 0 ? format.bytes(request.nbytes) : null],
    ["attempts", request.attempts > 1 ? format.count(request.attempts) : null],
    ["total", request.total_s ? format.duration(request.total_s) : null],
  ];
}
