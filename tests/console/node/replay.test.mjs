import assert from "node:assert/strict";
import { test } from "node:test";

import { xScale } from "prfaas/curve";
import { flowTable, plannedScene } from "prfaas/plan";
import { Replay, stepAt, windowOf } from "prfaas/replay";

const RUN = {
  name: "adaptive",
  policy: "adaptive",
  times_s: [0, 10, 25],
  clusters: [
    {
      name: "north",
      kind: "prfaas",
      nodes: [
        {
          id: "n0",
          name: "n0",
          slots: 0,
          role: [[0, "prefill"]],
          becomes: [[0, null]],
          status: [
            [0, "in use"],
            [2, "lost"],
          ],
          active: [0, 1, 0],
          queued: [0, 4, 0],
        },
      ],
    },
    { name: "west", kind: "pd", nodes: [] },
  ],
  links: [
    {
      source: "north",
      target: "west",
      rtt_s: 0.02,
      capacity_bps: [
        [0, 1e9],
        [2, 0],
      ],
      verdict: [
        [0, "clear"],
        [2, "cut"],
      ],
      cause: [[0, ""]],
      rate_bps: [0, 5e8, 0],
      backlog_bytes: [0, 10, 99],
      waited_s: [0, 0, 3],
    },
  ],
  homes: [
    {
      cluster: "west",
      threshold_tokens: [
        [0, 1000],
        [1, 2000],
      ],
      planned_threshold_tokens: [[0, 1000]],
      planned_rps: [[0, 3]],
      planned_share: [[0, 0.5]],
      plan_reason: [[0, "start"]],
      waiting: [0, 1, 0],
      local: [0, 5, 5],
      remote: [0, 5, 20],
      failed: [0, 0, 0],
      prompt_tokens: [0, 100, 200],
      cached_tokens: [0, 10, 20],
      stateless_tokens: [0, 0, 0],
    },
  ],
  ttft: {
    first_tokens: [0, 1, 2],
    wait_s: [0, 1, 2],
    prefill_s: [0, 1, 2],
    transfer_s: [0, 1, 2],
    decode_s: [0, 1, 2],
  },
  in_flight: [0, 2, 0],
  events: [],
  requests: {
    of: 2,
    names: {
      home: ["west"],
      route: ["local", "remote"],
      outcome: ["completed"],
      reason: ["long"],
      node: ["n0", "w0"],
    },
    columns: {
      id: [0, 1],
      at_s: [3, 12],
      home: [0, 0],
      route: [0, 1],
      outcome: [0, 0],
      reason: [0, 0],
      prefill: [-1, 0],
      decode: [1, 1],
      prompt_tokens: [5, 6],
      ttft_s: [null, 2],
      alternatives: [null, [[0, 3, 4.5, 1, 1, 0.5, 0.1]]],
    },
  },
};

test("steps hold until the next entry", () => {
  const steps = [
    [0, "a"],
    [3, "b"],
    [7, "c"],
  ];
  assert.deepEqual(
    [0, 2, 3, 6, 7, 99].map((k) => stepAt(steps, k)),
    ["a", "a", "b", "b", "c", "c"],
  );
  assert.equal(stepAt([], 4), null);
});

test("a frame is a scene", () => {
  const replay = new Replay(RUN, "m");
  const scene = replay.sceneAt(1);
  assert.equal(scene.at_s, 10);
  assert.equal(scene.clusters.get("north").nodes.get("n0").queued, 4);
  assert.equal(scene.links.get("north -> west").rate_bps, 5e8);
  assert.equal(scene.homes.get("west").threshold_tokens, 2000);
  assert.equal(replay.sceneAt(2).clusters.get("north").nodes.get("n0").status, "lost");
  assert.equal(replay.sceneAt(2).links.get("north -> west").verdict, "cut");
  assert.equal(replay.samples.length, 3);
  assert.equal(replay.samples[2].remote, 20);
});

test("times lead to frames", () => {
  const replay = new Replay(RUN, "m");
  assert.deepEqual(
    [-1, 0, 9.9, 10, 24, 25, 99].map((at) => replay.frameAt(at)),
    [0, 0, 0, 1, 1, 2, 2],
  );
  assert.deepEqual(
    replay.requestsAt(11).map(({ id }) => id),
    ["0"],
  );
  assert.deepEqual(
    replay.requestsAt(12).map(({ id }) => id),
    ["1", "0"],
  );
  assert.equal(windowOf([0, 3600]), 60);
});

test("requests and their alternatives have names", () => {
  const replay = new Replay(RUN, "m");
  const [first, second] = replay.requests;
  assert.deepEqual([first.prefill, first.decode, first.route], ["", "w0", "local"]);
  assert.equal(replay.explanationOf(first), null);
  const explanation = replay.explanationOf(second);
  assert.equal(explanation.threshold_tokens, 2000);
  assert.equal(explanation.chosen.cluster, "north");
  assert.equal(explanation.alternatives[0].cluster, "north");
  assert.equal(explanation.alternatives[0].cost_s, 4.5);
  assert.equal(explanation.alternatives[0].transfer_s, 0.5);
});

test("a plan's flows are a table, and its nodes are as busy as planned", () => {
  const table = flowTable({
    sources: ["north"],
    targets: ["west", "east"],
    rps: [[2, null]],
    bps: [[5e9, null]],
    link_bps: [[1e10, null]],
    local_rps: [2, 1],
  });
  assert.deepEqual(table.rows, [
    ["at north", "2/s (50%), 5 of 10 Gbps", "no link"],
    ["at the PD cluster itself", "2/s (50%)", "1/s (100%)"],
  ]);
  const scene = plannedScene({
    scene: {
      at_s: 0,
      clusters: [
        { name: "north", kind: "prfaas", nodes: [{ id: "n", name: "n", role: "prefill" }] },
      ],
    },
    busy: { north: { prefill: 0.9 } },
  });
  assert.equal(scene.clusters.get("north").nodes.get("n").busy, 0.9);
});

test("a logarithmic axis has equal steps for equal factors", () => {
  const x = xScale([0, 1, 10, 100], true, 1000);
  assert.ok(Math.abs(x(10) - x(1) - (x(100) - x(10))) < 1e-9);
});
