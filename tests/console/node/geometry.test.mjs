import assert from "node:assert/strict";
import { test } from "node:test";

import * as geometry from "prfaas/geometry";

const box = (side, y, height = 100) => ({
  side,
  x: side === "left" ? 0 : 600,
  y,
  width: 200,
  height,
});

test("PrfaaS clusters are on the left", () => {
  const clusters = [
    { name: "west", kind: "pd" },
    { name: "north", kind: "prfaas" },
  ];
  const { left, right } = geometry.columnsOf(clusters);
  assert.deepEqual(
    [left, right].map((column) => column.map((c) => c.name)),
    [["north"], ["west"]],
  );
});

test("a cluster alone has the whole map, and PD clusters alone face each other", () => {
  const pd = (name) => ({ name, kind: "pd" });
  assert.equal(geometry.columnsOf([pd("a")]).left.length, 0);
  assert.equal(geometry.columnsOf([pd("a"), pd("b"), pd("c")]).left.length, 2);
  assert.equal(geometry.columnsOf([{ name: "n", kind: "prfaas" }]).right.length, 1);
});

test("labels do not overlap, and keep their order", () => {
  const heights = [40, 40, 40, 40];
  const placed = geometry.spread([100, 90, 100, 110], heights, 8, 0, 400);
  const sorted = [...placed].sort((one, other) => one - other);
  for (let index = 1; index < 4; index += 1) assert.ok(sorted[index] - sorted[index - 1] >= 48);
  assert.ok(placed[1] < placed[0] && placed[2] < placed[3]);
});

test("labels stay within the map where they fit", () => {
  const placed = geometry.spread([390, 395, 398], [40, 40, 40], 8, 0, 400);
  assert.ok(Math.max(...placed) <= 380 && Math.min(...placed) >= 20);
  // Without enough room they go on below instead of above the top.
  const crowded = geometry.spread([50, 50, 50], [40, 40, 40], 8, 0, 60);
  assert.equal(Math.min(...crowded), 20);
});

test("each line goes from box to box through its label", () => {
  const boxes = new Map([
    ["north", box("left", 0)],
    ["west", box("right", 0)],
  ]);
  const links = [{ key: "k", source: "north", target: "west" }];
  const places = geometry.placeLinks(
    boxes,
    links,
    { width: 100, height: 40 },
    { width: 800, height: 100 },
  );
  const { x, y, path, arrow } = places.get("k");
  assert.deepEqual([x, y], [400, 50]);
  assert.match(path, /^M200\.0 50\.0C.* 350\.0 50\.0M450\.0 50\.0C.* 600\.0 50\.0$/);
  assert.equal(arrow, "600.0,50.0 589.0,44.0 589.0,56.0");
});

test("a link in both directions has two places, and an unknown cluster has none", () => {
  const boxes = new Map([
    ["a", box("left", 0)],
    ["b", box("right", 0)],
  ]);
  const links = [
    { key: "1", source: "a", target: "b" },
    { key: "2", source: "b", target: "a" },
    { key: "3", source: "a", target: "gone" },
  ];
  const places = geometry.placeLinks(
    boxes,
    links,
    { width: 100, height: 40 },
    { width: 800, height: 120 },
  );
  assert.deepEqual([...places.keys()], ["1", "2"]);
  assert.ok(Math.abs(places.get("1").y - places.get("2").y) >= 48);
  assert.match(places.get("2").arrow, /^200\.0,.* 211\.0,/);
});

test("links between clusters of one side bend into the middle", () => {
  const boxes = new Map([
    ["a", box("right", 0)],
    ["b", box("right", 200)],
  ]);
  const places = geometry.placeLinks(
    boxes,
    [{ key: "k", source: "a", target: "b" }],
    { width: 100, height: 40 },
    { width: 800, height: 300 },
  );
  assert.match(places.get("k").path, /^M600\.0 .* 350\.0 150\.0M350\.0 150\.0C.* 600\.0 250\.0$/);
});

test("arrow keys move within the grid", () => {
  assert.equal(geometry.moveInGrid(0, 10, 4, "ArrowRight"), 1);
  assert.equal(geometry.moveInGrid(1, 10, 4, "ArrowDown"), 5);
  assert.equal(geometry.moveInGrid(8, 10, 4, "ArrowDown"), 8);
  assert.equal(geometry.moveInGrid(3, 10, 4, "Home"), 0);
  assert.equal(geometry.moveInGrid(3, 10, 4, "Tab"), null);
});

test("cells shrink, and the load of a node is a share", () => {
  assert.deepEqual([1, 20, 100, 300].map(geometry.cellSize), ["large", "medium", "small", "tiny"]);
  const node = { status: "in use", role: "decode", active: 16, slots: 64, wait_s: 0 };
  assert.equal(geometry.loadOf(node), 0.25);
  assert.equal(geometry.loadOf({ ...node, role: "prefill", wait_s: 5, queued: 1 }), 0.75);
  assert.equal(geometry.loadOf({ ...node, role: "prefill", active: 0, queued: 0 }), 0);
  assert.equal(geometry.loadOf({ ...node, status: "lost" }), 0);
  assert.equal(geometry.lineWidth({ capacity_bps: 10, rate_bps: 20 }), 8);
});
