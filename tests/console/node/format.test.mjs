import assert from "node:assert/strict";
import { test } from "node:test";

import * as format from "prfaas/format";

test("rates and capacities share a unit", () => {
  assert.equal(format.rateOf(3.2e9, 10e9), "3.2 of 10 Gbps");
  assert.equal(format.rateOf(0, 100e9), "0 of 100 Gbps");
  assert.equal(format.rateOf(1e6, 100e9), "<0.01 of 100 Gbps");
  assert.equal(format.rateOf(5e6, 0), "5.00 Mbps");
  assert.equal(format.rate(0), "0 bps");
});

test("sizes have three digits", () => {
  assert.equal(format.bytes(0), "0 B");
  assert.equal(format.bytes(999_999), "1.00 MB");
  assert.equal(format.bytes(3.14159e9), "3.14 GB");
});

test("durations choose their unit", () => {
  assert.equal(format.duration(0), "0 s");
  assert.equal(format.duration(0.0123), "12 ms");
  assert.equal(format.duration(1.5), "1.5 s");
  assert.equal(format.duration(125), "2 min 5 s");
  assert.equal(format.duration(7260), "2 h 1 min");
  assert.equal(format.duration(Infinity), "-");
});

test("shares, counts and plurals", () => {
  assert.equal(format.percent(0), "0%");
  assert.equal(format.percent(0.004), "<1%");
  assert.equal(format.percent(0.055), "5.5%");
  assert.equal(format.percent(1), "100%");
  assert.equal(format.plural(1, "node"), "1 node");
  assert.equal(format.plural(1200, "node"), "1,200 nodes");
  assert.equal(format.tokens(19412), "19.4k tokens");
  assert.equal(format.tokens(Infinity), "no limit");
});

test("ticks have no zeros at their end", () => {
  assert.equal(format.rounded("30.0 Gbps"), "30 Gbps");
  assert.equal(format.rounded("2.50"), "2.5");
  assert.equal(format.rounded("100%"), "100%");
  assert.equal(format.rounded("0.05 s"), "0.05 s");
  assert.equal(format.rounded("1.05k"), "1.05k");
});

test("times of a run", () => {
  assert.equal(format.runTime(65), "01:05");
  assert.equal(format.runTime(3725.9), "1:02:05");
});
