import assert from "node:assert/strict";
import { test } from "node:test";

import * as scale from "prfaas/scale";

test("ticks are round and reach the highest value", () => {
  assert.deepEqual(scale.valueTicks(1), [0, 0.5, 1]);
  assert.deepEqual(scale.valueTicks(0.3), [0, 0.1, 0.2, 0.3]);
  assert.deepEqual(scale.valueTicks(0), [0, 1]);
  for (const highest of [0.007, 3.3, 19412, 8e10]) {
    const ticks = scale.valueTicks(highest);
    assert.ok(ticks.at(-1) >= highest * 0.999 && ticks.length <= 5, String(ticks));
  }
});

test("times are round in the reader's time zone", () => {
  assert.deepEqual(scale.timeTicks(10, 130, 5), [30, 60, 90, 120]);
  assert.deepEqual(scale.timeTicks(0, 7200, 2, 1800), [1800, 5400]);
});

test("parameters have round values between their ends", () => {
  assert.deepEqual(scale.parameterTicks([1, 2, 5], false, 4), [1, 2, 3, 4, 5]);
  assert.deepEqual(
    scale.parameterTicks([1000, 128_000], true, 4),
    [1000, 3000, 10_000, 30_000, 100_000],
  );
});

test("a gap interrupts lines and areas", () => {
  const points = [
    [0, 1],
    [1, 2],
    [2, null],
    [3, 4],
  ];
  assert.equal(scale.linePath(points), "M0.0 1.0L1.0 2.0M3.0 4.0");
  const floor = points.map(([x]) => [x, 0]);
  assert.equal(scale.areaPath(points, floor), "M0.0 1.0L1.0 2.0L1.0 0.0L0.0 0.0ZM3.0 4.0L3.0 0.0Z");
});

test("series are stacked on those before them", () => {
  const stacked = scale.stacked([
    [
      [0, 1],
      [1, null],
    ],
    [
      [0, 2],
      [1, 2],
    ],
  ]);
  assert.deepEqual(stacked, [
    [
      [0, 1],
      [1, null],
    ],
    [
      [0, 3],
      [1, null],
    ],
  ]);
});

test("the newest point is kept when points are left out", () => {
  const points = Array.from({ length: 1000 }, (_, index) => [index, index]);
  const kept = scale.thinned(points, 300);
  assert.equal(kept.length, 300);
  assert.deepEqual(kept.at(-1), [999, 999]);
});

test("the value of the nearest sample", () => {
  const points = [
    [0, "a"],
    [1, "b"],
    [2, "c"],
  ];
  assert.equal(scale.valueNear([], 1), null);
  const found = [-5, 1.4, 1.6, Infinity].map((at) => scale.valueNear(points, at));
  assert.deepEqual(found, ["a", "b", "c", "c"]);
});
