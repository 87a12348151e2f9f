import assert from "node:assert/strict";
import { test } from "node:test";

import { choiceInWords, comparisonInWords } from "prfaas/explanation";
import { completeRequest, completeScene } from "prfaas/store";
import { EventParser, textOf } from "prfaas/sse";
import * as words from "prfaas/words";

const scene = (nodes, links = [], homes = []) =>
  completeScene({
    at_s: 0,
    clusters: [
      { name: "north", kind: "prfaas", nodes },
      { name: "west", kind: "pd" },
    ],
    links,
    homes,
  });

test("the worst problem is first, and names what is wrong", () => {
  const found = words.problems(
    scene(
      [{ id: "n0", name: "n0", status: "not in use", why: "it has no role yet" }],
      [
        {
          source: "north",
          target: "west",
          verdict: "congested",
          cause: "loss",
          backlog_bytes: 3e9,
          waited_s: 2,
        },
        { source: "west", target: "north", verdict: "cut", cause: "waiting" },
      ],
      [{ cluster: "west", has_plan: true, waiting: 2 }],
    ),
  );
  assert.deepEqual(
    found.map(({ severity, text }) => [severity, text]),
    [
      ["bad", "Link west → north is cut"],
      [
        "warn",
        "Link north → west is congested (segments are lost): 3.00 GB wait, the oldest for 2 s",
      ],
      ["warn", "Node n0 of north is not in use: it has no role yet"],
      ["note", "2 requests wait for a node at west"],
    ],
  );
});

const LOST = "no node of west decodes: both are lost";
const unserved = { cluster: "west", has_plan: true, service: "unserved", service_reason: LOST };
const ALONE = "the PrfaaS cluster north is drained: decode nodes prefill for themselves";
const degraded = { ...unserved, service: "degraded", service_reason: ALONE };

test("a home that is not served is the worst problem", () => {
  const link = { source: "north", target: "west", verdict: "cut" };
  const [first, second] = words.problems(scene([], [link], [unserved]));
  assert.deepEqual([first.severity, first.text], ["bad", `west is not served: ${LOST}`]);
  assert.equal(second.text, "Link north → west is cut");
  const [alone, ...others] = words.problems(scene([], [], [degraded]));
  assert.deepEqual(
    [alone.severity, alone.text, others],
    ["warn", `west is served, but not as planned: ${ALONE}`, []],
  );
  const unplanned = { ...unserved, has_plan: false };
  assert.equal(words.problems(scene([], [], [unplanned])).length, 1, "the reason says it");
});

test("the statement says first that nothing can be served", () => {
  const figures = { requests: 0 };
  assert.match(words.statement(scene([], [], [unserved]), figures), /^No request can be served\. /);
  const east = { cluster: "east" };
  assert.match(
    words.statement(scene([], [], [unserved, east]), figures),
    /^Requests of west cannot be served\. No request has finished/,
  );
  assert.match(words.statement(scene([], [], [degraded]), figures), /^No request has finished/);
});

test("a change of the service is said", () => {
  const well = scene([], [], [{ cluster: "west", has_plan: true }]);
  const lost = scene([], [], [unserved]);
  assert.deepEqual(words.changes(well, lost), [`west is not served: ${LOST}.`]);
  assert.deepEqual(words.changes(lost, well), ["west is served as planned again."]);
  assert.deepEqual(words.changes(lost, lost), []);
});

test("many nodes with one problem are counted", () => {
  const nodes = Array.from({ length: 5 }, (_, index) => ({
    id: `n${index}`,
    name: `n${index}`,
    status: "lost",
  }));
  assert.deepEqual(
    words.problems(scene(nodes)).map(({ text }) => text),
    ["5 nodes of north are lost"],
  );
});

test("the statement says what the system does", () => {
  const figures = { requests: 12.5, ttft: 1.2, offloaded: 0.4 };
  assert.equal(
    words.statement(scene([], [{ source: "north", target: "west" }]), figures),
    "12.5 requests/s are served. The first token comes after 1.2 s on average. 40% of the requests are prefilled in another cluster.",
  );
  assert.match(
    words.statement(scene([]), { requests: 0 }),
    /^No request has finished in the last 15 s\.$/,
  );
});

test("names without what they share", () => {
  assert.deepEqual(words.shortNames(["west-p-1", "west-p-2", "west-p-10"]), ["1", "2", "10"]);
  assert.deepEqual(words.shortNames(["a", "b"]), ["a", "b"]);
  assert.deepEqual(words.shortNames(["host:8000"]), ["host:8000"]);
  assert.deepEqual(words.shortNames(["node-", "node-1"]), ["node-", "1"]);
});

test("routes and choices are sentences", () => {
  const request = completeRequest({
    id: "r",
    route: "remote",
    prefill: "n0",
    decode: "w0",
    nbytes: 2e9,
  });
  assert.equal(
    words.routeWords(request),
    "Node n0 prefilled it in another cluster and handed its KV of 2.00 GB to node w0, which decoded it.",
  );
  assert.equal(words.routeWords(completeRequest({ id: "r", route: "none" })), "No node served it.");
  assert.equal(
    choiceInWords({ wait: true, reason: "all are busy", for: "west" }),
    "The request waits for a node of west: all are busy.",
  );
});

test("what spoke for a choice that is not the earliest", () => {
  const parts = { wait_s: 0, prefill_s: 1, transfer_s: 0, decode_s: 0 };
  const explanation = {
    chosen: { wait: false, prefill: "w0", cluster: "west", cached_tokens: 10 },
    threshold_tokens: 500,
    alternatives: [
      { ...parts, node: "n0", cluster: "north", cost_s: 4 },
      { ...parts, node: "w0", cluster: "west", prefill_s: 2, cost_s: 3 },
    ],
  };
  assert.deepEqual(comparisonInWords(explanation, 110), [
    "Predicted first token: after 2 s this way, after 1 s by way of north.",
    "With the delay that it causes to later requests: 3 s this way, 4 s by way of north.",
    "100 of its 110 tokens are uncached there, at most the plan's threshold of 500.",
  ]);
  const without = explanation.alternatives.map((one) => ({ ...one, cost_s: null }));
  assert.deepEqual(comparisonInWords({ ...explanation, alternatives: without }, null), [
    "Predicted first token: after 2 s this way, after 1 s by way of north.",
  ]);
});

test("server-sent events arrive in pieces", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push('data: {"a"'), []);
  assert.deepEqual(parser.push(":1}\n\nevent: route\r\ndata: x\r\n\r\n: comment\n\n"), [
    { event: "message", data: '{"a":1}' },
    { event: "route", data: "x" },
  ]);
  assert.equal(textOf({ choices: [{ text: "t" }] }), "t");
  assert.equal(textOf({ choices: [{ delta: { content: "c" } }] }), "c");
  assert.equal(textOf({ choices: [] }), "");
});
