from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from aiohttp import web

from prfaas.clock import MonotonicClock
from prfaas.config.trace import TraceRow
from prfaas.measure.client import TIMED_OUT, connect
from prfaas.measure.open_loop import RequestResult, RequestTemplate, offer_load, prompt_parts
from prfaas.measure.prompts import PromptGenerator
from prfaas.sim.arrivals import Arrivals, replay
from tests.measure.servers import DONE, event, serving, stream, token


def arrivals(at_s: list[float], prompt: int, cached: int, output: int) -> Arrivals:
    ones = np.ones(len(at_s), dtype=np.int64)
    return Arrivals(np.array(at_s), ones * prompt, ones * cached, ones * output)


def test_prompts_share_what_is_cached_and_nothing_else() -> None:
    stated = arrivals([0.0, 1.0], prompt=100, cached=40, output=1)
    first, second = prompt_parts(stated, 0), prompt_parts(stated, 1)
    assert first[0] == second[0] and first[0].tokens == 40
    assert first[1].tokens == 60 and first[1].key != second[1].key
    assert prompt_parts(stated, 0, seed=1)[1].key != first[1].key


def test_equal_hash_ids_are_equal_tokens() -> None:
    rows = [TraceRow(0, 1100, 5, [1, 2, 3]), TraceRow(1, 1030, 5, [1, 2, 9])]
    traced = replay(rows, seed=0, bucket_s=0.0)
    one, other = prompt_parts(traced, 0), prompt_parts(traced, 1)
    assert [run.tokens for run in one] == [512, 512, 76]
    assert one[:2] == other[:2] and one[2].key != other[2].key


async def test_every_arrival_is_sent_and_accounted_for() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        bodies.append(body)
        if len(bodies) == 2:
            return web.json_response({"error": {"code": "overloaded"}}, status=429)
        usage = event(choices=[], usage={"prompt_tokens": 50, "completion_tokens": 2})
        return await stream(request, token(1), token(2), usage, DONE)

    counts: list[int] = []

    async with serving(handler) as url, connect(url, MonotonicClock()) as target:
        load = arrivals([0.0, 0.001, 0.002], prompt=50, cached=0, output=16)
        template = RequestTemplate("m", salt="s", output_scale=0.125)
        results = await offer_load(
            target, load, template, PromptGenerator(), MonotonicClock(), done=counts.append
        )
    assert counts == [1, 2, 3] and len({tuple(body["prompt"]) for body in bodies}) == 3
    assert {(len(b["prompt"]), b["max_tokens"], b["cache_salt"]) for b in bodies} == {(50, 2, "s")}
    good = [one for one in results if one.error is None]
    assert [one.error for one in results if one.error] == ["HTTP 429 overloaded"]
    assert [(one.prompt_tokens, one.output_tokens) for one in good] == [(50, 2)] * 2
    assert all(one.ttft_s is not None and one.per_token_s is not None for one in good)
    assert all(one.late_s >= 0 and one.took_s > 0 for one in results)


async def test_slow_responses_do_not_delay_other_requests() -> None:
    """The first answer comes only when the last request has arrived."""
    last = asyncio.Event()
    seen = 0

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen == 20:
            last.set()
        await last.wait()
        return await stream(request, token(1), DONE)

    async with serving(handler) as url, connect(url, MonotonicClock()) as target:
        load = arrivals([0.001 * n for n in range(20)], prompt=10, cached=0, output=1)
        results = await offer_load(
            target, load, RequestTemplate("m"), PromptGenerator(), MonotonicClock()
        )
    assert [one.error for one in results] == [None] * 20


async def run_until_given_up(first_tokens_s: float, *, silent: bool) -> list[RequestResult]:
    """Two requests; the first token of the second one comes only after the time to give up, or
    never. No answer ends."""
    over = asyncio.Event()
    seen = 0

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if seen == 1:
            await response.write(token(1))
        elif not silent:
            await asyncio.sleep(0.2)  # later than the load's end
            await response.write(token(1))
        await over.wait()
        return response

    async with serving(handler) as url, connect(url, MonotonicClock()) as target:
        load = arrivals([0.0, 0.05], prompt=10, cached=0, output=8)
        try:
            return await offer_load(
                target, load, RequestTemplate("m"), PromptGenerator(), MonotonicClock(),
                give_up_s=0.05, first_tokens_s=first_tokens_s,
            )  # fmt: skip
        finally:
            over.set()


async def test_requests_are_given_up_when_each_has_a_first_token() -> None:
    results = await run_until_given_up(60.0, silent=False)
    assert [one.error for one in results] == [TIMED_OUT] * 2
    assert all(one.ttft_s is not None for one in results)


async def test_a_request_that_never_gets_a_token_is_given_up_all_the_same() -> None:
    results = await run_until_given_up(0.1, silent=True)
    assert [one.error for one in results] == [TIMED_OUT] * 2
    assert sum(one.ttft_s is None for one in results) >= 1
