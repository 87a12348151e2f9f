from __future__ import annotations

import asyncio

from prfaas.gateway.api.start_limiter import STARTS_PER_ITERATION, StartLimiter
from tests.waiting import HANG_S


async def test_a_burst_starts_a_few_requests_per_iteration_in_order() -> None:
    limiter = StartLimiter()
    iteration = 0
    started: list[tuple[int, int]] = []

    def count() -> None:
        nonlocal iteration
        iteration += 1
        loop.call_soon(count)

    async def start(number: int) -> None:
        await limiter.wait()
        started.append((iteration, number))

    loop = asyncio.get_running_loop()
    loop.call_soon(count)
    await asyncio.gather(*(start(number) for number in range(11)))
    assert [number for _, number in started] == list(range(11))
    per_iteration = [sum(1 for t, _ in started if t == at) for at in range(iteration + 1)]
    assert max(per_iteration) <= STARTS_PER_ITERATION and sum(per_iteration) == 11


async def test_a_single_request_does_not_wait() -> None:
    limiter = StartLimiter()
    for _ in range(5):
        task = asyncio.ensure_future(limiter.wait())
        await asyncio.sleep(0)
        assert task.done()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_cancelled_request_does_not_use_a_start() -> None:
    limiter = StartLimiter()
    tasks = [asyncio.ensure_future(limiter.wait()) for _ in range(STARTS_PER_ITERATION + 4)]
    await asyncio.sleep(0)
    for task in tasks[STARTS_PER_ITERATION : STARTS_PER_ITERATION + 2]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    cancelled = [task.cancelled() for task in tasks]
    assert cancelled == [False] * STARTS_PER_ITERATION + [True] * 2 + [False] * 2
