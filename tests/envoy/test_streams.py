"""Streams through Envoy: 1,000 of them, of which clients abort 100."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle

import pytest

from tests.envoy.answers import LONG, NUMBERS, SHORT, Answer, ask, request_id
from tests.envoy.clients import Client, Http1Client, http2_client
from tests.envoy.deployment import Behind
from tests.envoy.proxy import Envoy
from tests.node.hosts import text_of
from tests.waiting import HANG_S, wait_until

REQUESTS, ABORTED, TOKENS = 1000, 100, 4
AT_ONCE = 32  # more than the decode node has slots
HTTP2_CONNECTIONS = 4
SLOTS = 20  # of the decode node


@asynccontextmanager
async def clients_of(envoy: Envoy, deployment: Behind) -> AsyncIterator[list[Client]]:
    """As many of HTTP/1.1 as of HTTP/2, in turn."""
    async with AsyncExitStack() as stack:
        first = Http1Client(envoy.port, deployment.trust)
        found: list[Client] = []
        for _ in range(HTTP2_CONNECTIONS):
            opened = http2_client(envoy.port, str(deployment.ca))
            found += [first, await stack.enter_async_context(opened)]
        yield found


@pytest.mark.timeout(2 * HANG_S)
async def test_a_thousand_streams(
    envoy: Envoy, deployment: Behind, record_property: Callable[[str, object], None]
) -> None:
    numbers = [next(NUMBERS) for _ in range(REQUESTS)]
    every = REQUESTS // ABORTED
    # After one, two or three of four tokens.
    leaving = {n: 1 + n // every % (TOKENS - 1) for n in numbers[::every]}
    room = asyncio.Semaphore(AT_ONCE)
    began_s = time.monotonic()

    async def ask_one(client: Client, number: int) -> Answer:
        async with room:
            return await ask(
                client,
                deployment,
                number,
                tokens=TOKENS,
                prompt_tokens=LONG if number % 10 == 5 else SHORT,
                leave_after=leaving.get(number),
            )

    async with clients_of(envoy, deployment) as clients, asyncio.TaskGroup() as group:
        asked = [
            group.create_task(ask_one(client, number))
            for client, number in zip(cycle(clients), numbers, strict=False)
        ]
    answers = [task.result() for task in asked]
    record_property("seconds", round(time.monotonic() - began_s, 1))

    assert {answer.status for answer in answers} == {200}
    for answer in answers:
        wanted = leaving.get(answer.number, TOKENS)
        complete = answer.number not in leaving
        assert (answer.tokens, answer.done, answer.cut_off) == (wanted, complete, False), answer
    await asyncio.to_thread(deployment.wait_until_idle)

    # Each of them was served once, by one gateway, and decoded once.
    jobs = Counter(line for held in deployment.hosts for line in held.journal())
    assert {jobs[f"decode {number}"] for number in numbers} == {1}
    assert {jobs[f"prefill {number}"] for number in numbers} == {1}
    wait_until(lambda: len(_lines(deployment, numbers)) == REQUESTS)
    lines = _lines(deployment, numbers)
    assert Counter(lines.elements()).most_common(1)[0][1] == 1
    outcomes = Counter(outcome for _, outcome, _ in lines)
    assert outcomes == {"completed": REQUESTS - ABORTED, "cancelled": ABORTED}
    assert {attempts for _, _, attempts in lines} == {1}
    for gateway in deployment.gateways:
        assert gateway.outcomes(), f"{gateway.name} was not used"
    record_property("retries by Envoy", envoy.counter("upstream_rq_retry"))
    wait_until(lambda: len(envoy.access_log()) == REQUESTS)
    assert Counter(line["protocol"] for line in envoy.access_log()) == {
        "HTTP/1.1": REQUESTS // 2,
        "HTTP/2": REQUESTS // 2,
    }


def _lines(deployment: Behind, numbers: list[int]) -> Counter[tuple[str, str, int]]:
    """Of the gateways' logs: id, outcome and attempts."""
    ids = {request_id(number) for number in numbers}
    return Counter(
        (outcome.id, outcome.outcome, outcome.attempts)
        for gateway in deployment.gateways
        for outcome in gateway.outcomes()
        if outcome.id in ids
    )


@pytest.mark.parametrize("moment", ["before the first token", "after the first token"])
async def test_aborts_free_everything(
    envoy: Envoy,
    deployment: Behind,
    moment: str,
    record_property: Callable[[str, object], None],
) -> None:
    """The engine is held, so that nothing is written to a client while it leaves."""
    numbers = [next(NUMBERS) for _ in range(SLOTS)]
    begun = moment == "after the first token"
    async with clients_of(envoy, deployment) as clients:
        reached = {number: asyncio.Event() for number in numbers}
        never = asyncio.Event()
        asked = [
            asyncio.create_task(
                ask(
                    client,
                    deployment,
                    number,
                    allowed=int(begun),
                    reached=reached[number],
                    go_on=never,
                )
            )
            for client, number in zip(cycle(clients), numbers, strict=False)
        ]
        try:
            async with asyncio.timeout(HANG_S):
                if begun:
                    await asyncio.gather(*(event.wait() for event in reached.values()))
            await asyncio.to_thread(wait_until, lambda: _running(deployment) == SLOTS)
            if not begun:
                assert deployment.held_pages() > 0
            began_s = time.monotonic()
        finally:
            for task in asked:
                task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: _is_free(deployment))
        record_property("seconds until all was free", round(time.monotonic() - began_s, 3))
        await asyncio.to_thread(deployment.wait_until_idle)


def _running(deployment: Behind) -> int:
    """Requests that the engines hold."""
    found = 0.0
    for held in deployment.hosts:
        page = text_of(f"{held.host.url}/metrics")
        for value in re.findall(r"^vllm:num_requests_(?:running|waiting)\{\S* (\S+)$", page, re.M):
            found += float(value)
    return int(found)


def _is_free(deployment: Behind) -> bool:
    return deployment.held_pages() == 0 and _running(deployment) == 0
