import assert from "node:assert/strict";
import { test } from "node:test";

import {
  figuresAt,
  History,
  requestRate,
  sampleOf,
  shareOffloaded,
  windowed,
} from "prfaas/history";
import { markedBy, selectionOf } from "prfaas/selection";
import { applyDelta, completeScene, mergeEvents, mergeRequests, Store } from "prfaas/store";
import * as words from "prfaas/words";

export const SCENE = {
  at_s: 100,
  model: "m",
  policy: "adaptive",
  clusters: [
    { name: "north", kind: "prfaas", nodes: [{ id: "n0", name: "n0", role: "prefill" }] },
    { name: "west", kind: "pd", nodes: [{ id: "w0", name: "w0", role: "decode", slots: 8 }] },
  ],
  links: [{ source: "north", target: "west", capacity_bps: 1e9 }],
  homes: [{ cluster: "west", has_plan: true, planned_share: 0.5, local: 1, remote: 1 }],
};

test("fields that the sender omits have their default", () => {
  const scene = completeScene(SCENE);
  const node = scene.clusters.get("north").nodes.get("n0");
  assert.equal(node.status, "in use");
  assert.equal(scene.links.get("north -> west").verdict, "clear");
  assert.equal(scene.ttft.first_tokens, 0);
});

test("a delta changes what it names and shares the rest", () => {
  const before = completeScene(SCENE);
  const after = applyDelta(before, {
    at_s: 101,
    nodes: {
      north: { n0: { id: "n0", name: "n0", status: "lost" }, n1: { id: "n1", name: "n1" } },
    },
    links: [{ source: "north", target: "west", verdict: "cut" }],
  });
  assert.equal(before.clusters.get("north").nodes.get("n0").status, "in use");
  assert.equal(after.clusters.get("north").nodes.get("n0").status, "lost");
  assert.equal(after.clusters.get("west"), before.clusters.get("west"));
  assert.deepEqual(words.changes(before, after), [
    "Link north → west is cut.",
    "Node n0 of north is lost.",
    "Node n1 of north has joined.",
  ]);
});

test("nodes and clusters can go", () => {
  const before = completeScene(SCENE);
  const without = applyDelta(before, { at_s: 101, nodes: { north: { n0: null } } });
  assert.equal(without.clusters.get("north").nodes.size, 0);
  const fewer = applyDelta(before, {
    at_s: 102,
    clusters: [{ name: "west", kind: "pd", drained: true }],
    links: [],
  });
  assert.deepEqual([...fewer.clusters.keys()], ["west"]);
  assert.equal(fewer.clusters.get("west").nodes.size, 1);
  assert.equal(fewer.links.size, 0);
});

test("a request that has ended replaces itself", () => {
  const first = mergeRequests([], [{ id: "a", at_s: 1, outcome: "in progress" }]);
  const second = mergeRequests(first, [
    { id: "b", at_s: 2, outcome: "completed" },
    { id: "a", at_s: 1, outcome: "completed" },
  ]);
  assert.deepEqual(
    second.map(({ id, outcome }) => [id, outcome]),
    [
      ["b", "completed"],
      ["a", "completed"],
    ],
  );
  assert.equal(
    mergeRequests(
      second,
      Array.from({ length: 900 }, (_, i) => ({ id: `x${i}`, at_s: 3 })),
    ).length,
    400,
  );
});

test("events come once", () => {
  const event = (id) => ({ id, at_s: id, kind: "plan", text: "t" });
  const events = mergeEvents(mergeEvents([], [event(1), event(2)]), [event(2), event(3)]);
  assert.deepEqual(
    events.map(({ id }) => id),
    [1, 2, 3],
  );
});

test("history keeps ten minutes and starts again when a clock is set back", () => {
  const history = new History(600);
  for (let at = 0; at <= 2000; at += 1)
    history.push(sampleOf(completeScene({ ...SCENE, at_s: at })));
  assert.ok(history.samples.length < 620);
  assert.deepEqual(history.span, [1400, 2000]);
  history.push(sampleOf(completeScene({ ...SCENE, at_s: 5 })));
  assert.equal(history.samples.length, 1);
});

function samplesOf(counts) {
  return counts.map(([local, remote], index) =>
    sampleOf(
      completeScene({ ...SCENE, at_s: index * 10, homes: [{ cluster: "west", local, remote }] }),
    ),
  );
}

test("shares and rates are those of a window", () => {
  const samples = samplesOf([
    [0, 0],
    [10, 0],
    [10, 30],
  ]);
  assert.deepEqual(windowed(samples, shareOffloaded, 10), [
    [0, null],
    [10, 0],
    [20, 1],
  ]);
  assert.deepEqual(windowed(samples, requestRate("remote"), 10).at(-1), [20, 3]);
  const figures = figuresAt(samples, 2, 10);
  assert.equal(figures.requests, 3);
  assert.equal(figures.ttft, null);
});

test("the requests that are kept give the minutes before the page was opened", () => {
  const history = new History();
  const sample = sampleOf(
    completeScene({ ...SCENE, at_s: 100, homes: [{ cluster: "west", local: 50, remote: 51 }] }),
  );
  const request = (id, at_s, route) => ({
    id,
    at_s,
    route,
    outcome: "completed",
    total_s: 5,
    ttft_s: null,
  });
  history.begin(
    sample,
    mergeRequests(
      [],
      [request("a", 60, "local"), request("b", 80, "remote"), request("c", 85, "remote")],
    ),
  );
  assert.equal(history.samples[0].at_s, 65);
  const [, share] = windowed(history.samples, shareOffloaded, 60).at(-1);
  assert.equal(share, 1); // "a" had ended when the first of these samples was taken
  assert.deepEqual([history.samples[0].local, history.samples[0].remote], [50, 49]);
  history.begin(sample, []);
  assert.equal(history.samples.length, 1);
});

test("an error of the client is no failure of the deployment", () => {
  const sample = sampleOf(
    completeScene({ ...SCENE, at_s: 100, homes: [{ cluster: "west", local: 9, failed: 9 }] }),
  );
  const ended = (id, outcome, at_s = 90) => ({ id, at_s, outcome, total_s: 1, ttft_s: null });
  const outcomes = ["failed", "broken", "shed", "rejected", "cancelled", "completed"];
  const history = new History();
  const requests = outcomes.map((outcome) => ended(outcome, outcome));
  history.begin(sample, mergeRequests([], [...requests, ended("before", "completed", 60)]));
  assert.deepEqual([history.samples[0].failed, history.samples[0].local], [6, 8]);
});

test("counters that went back are a gap", () => {
  const samples = samplesOf([
    [100, 100],
    [0, 0],
  ]);
  assert.deepEqual(windowed(samples, shareOffloaded).at(-1), [10, null]);
});

test("a selected request marks its nodes and its link", () => {
  const scene = completeScene(SCENE);
  const requests = [{ id: "r", prefill: "n0", decode: "w0" }];
  const marked = markedBy({ about: "request", id: "r" }, requests, scene);
  assert.deepEqual([...marked].sort(), ["link north -> west", "node n0", "node w0", "request r"]);
  assert.deepEqual(selectionOf("north -> west", scene), { about: "link", id: "north -> west" });
  assert.deepEqual(selectionOf("w0", scene), { about: "node", id: "w0" });
  assert.equal(selectionOf("west", scene), null);
});

test("the store tells its subscribers", () => {
  const store = new Store();
  let calls = 0;
  store.subscribe(() => (calls += 1));
  store.apply({ at_s: 1 }); // before the first scene: nothing to change
  store.replace({ scene: SCENE, events: [], requests: [], tenants: [] });
  store.apply({ at_s: 101, in_flight: 3 });
  store.select({ about: "node", id: "w0" });
  assert.equal(calls, 3);
  assert.equal(store.scene.in_flight, 3);
  assert.equal(store.findNode("w0").cluster.name, "west");
});
