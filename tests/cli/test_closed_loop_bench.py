"""What `bench closed_loop` concludes from what it saw, and that its loop is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from prfaas.clock import MonotonicClock
from prfaas.measure.client import connect
from tests.benches import bench
from tests.measure.servers import DONE, serving, stream, token

closed_loop = bench("closed_loop")
NODES = ("near-0", "far-0")


def served(policy: str, ttft_s: float, **changed: Any) -> Any:
    fields = {"prefills": {"near-0": 20, "far-0": 20}, "failures": {}, **changed}
    return closed_loop.Served(policy, [ttft_s] * 40, **fields)


def held(*runs: Any) -> list[bool]:
    names = ("adaptive", "paper")
    found = {
        name: closed_loop.figures([run for run in runs if run.policy == name]) for name in names
    }
    return list(closed_loop.checks(found, names, NODES).values())


def test_both_nodes_and_a_lower_median() -> None:
    alone = {"near-0": 40}
    assert held(served("adaptive", 0.8), served("paper", 1.0, prefills=alone)) == [True] * 3
    assert held(served("adaptive", 0.81), served("paper", 1.0)) == [True, False, True]
    one_sided = served("adaptive", 0.5, prefills=alone)
    assert held(one_sided, served("paper", 1.0)) == [False, True, True]
    failed = served("paper", 1.0, failures={"HTTP 500": 1})
    assert held(served("adaptive", 0.5), failed) == [True, True, False]


def test_rounds_are_added_up() -> None:
    rounds = [[served("adaptive", 0.5), served("paper", 1.0)] for _ in range(2)]
    runs = [run for served_ in rounds for run in served_ if run.policy == "adaptive"]
    assert closed_loop.figures(runs).prefills == {"near-0": 40, "far-0": 40}
    assert closed_loop.ratio([0.5], [1.0]) == pytest.approx(0.5)
    assert closed_loop.ratio([], [1.0]) is None


async def test_no_more_requests_than_streams_are_under_way() -> None:
    under_way, most, prompts = 0, 0, set()

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        prompts.add(tuple(body["prompt"]))
        await asyncio.sleep(0)
        response = await stream(request, token(1))
        under_way -= 1
        await response.write(DONE)
        return response

    load = closed_loop.Load(3, 20, 50, 4)
    async with serving(handler) as url, connect(url, MonotonicClock()) as target:
        answers = await closed_loop.closed_loop(target, load)
    assert len(answers) == 20 and len(prompts) == 20 and most <= 3
