"""The work of a simulated request does not grow with the number of nodes. Lines of Python count the
work, because they are the same in every run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from prfaas.config.deployment import SchedulerSection
from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow
from prfaas.planner.problem import Path, Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson, replay
from prfaas.sim.config import CacheConfig, SimConfig
from prfaas.sim.world import World
from tests.planner.builders import problem

FEW, MANY = 24, 240
WARM_UP, REQUESTS = 10, 70
SHARED = [1, 2, 3]  # blocks that every prompt begins with


def sized(nodes: int) -> Problem:
    given = problem(fabric=Path(1e10, 0.0))
    (remote,) = given.remotes
    factor = nodes / 6
    remote = replace(
        remote,
        pool=replace(remote.pool, instances=round(2 * factor)),
        path=replace(remote.path, bps=remote.path.bps * factor),
    )
    pool = replace(given.local.pool, instances=round(4 * factor))
    return replace(given, remotes=(remote,), local=replace(given.local, pool=pool))


class LineCount:
    def __init__(self) -> None:
        self.lines = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        self.lines += event == "line"
        return self.trace


@contextmanager
def counted_lines() -> Iterator[LineCount]:
    count, before = LineCount(), sys.gettrace()
    sys.settrace(count.trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def run(world: World, arrivals: Arrivals, first: int, stop: int) -> None:
    for index, at_s in enumerate(arrivals.at_s[first:stop].tolist(), start=first):
        world.events.run_before(at_s)
        world.arrive(index)


def lines_per_request(nodes: int, policy: str, *, caches: bool) -> float:
    given = sized(nodes)
    load_rps = 0.8 * find_optimum(given).capacity_rps
    arrivals = poisson(given.workload, load_rps, REQUESTS, seed=0)
    cache = None
    if caches:
        cache = CacheConfig(bytes_per_node=1e12)
        rows = [
            TraceRow(1e3 * at_s, 6 * TRACE_BLOCK_TOKENS, 20, [*SHARED, number, number, number])
            for number, at_s in enumerate(arrivals.at_s.tolist(), start=10)
        ]
        arrivals = replay(rows, 0, bucket_s=0.0)
    rules = SchedulerSection(policy=policy)  # type: ignore[arg-type]
    world = World(given, arrivals, SimConfig(scheduler=rules, cache=cache))
    if world.caches is not None:
        for node in world.nodes:  # every node holds what prompts have in common
            assert arrivals.hashes is not None
            world.caches.store_copy(node, arrivals.hashes[0][: len(SHARED)])
            world.caches.store_handoff(node, arrivals.hashes[0][: len(SHARED)], 3 * 512 + 1)
        world.events.run_before(1.0)
        arrivals = replace(arrivals, at_s=arrivals.at_s + 1.0)
    run(world, arrivals, 0, WARM_UP)  # the first decision ranks all nodes
    with counted_lines() as count:
        run(world, arrivals, WARM_UP, REQUESTS)
        while world.in_flight:
            world.events.run_before(world.events.now_s + 1.0)
    return count.lines / (REQUESTS - WARM_UP)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("policy", ["paper", "adaptive"])
def test_a_request_costs_the_same_among_many_nodes(policy: str, caches: bool) -> None:
    few = lines_per_request(FEW, policy, caches=caches)
    many = lines_per_request(MANY, policy, caches=caches)
    assert many < 1.5 * few, f"{few:.0f} lines among {FEW} nodes, {many:.0f} among {MANY}"
