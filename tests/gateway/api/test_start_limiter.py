from __future__ import annotations

import asyncio

from prfaas.gateway.api.start_limiter import EACH, StartLimiter
from tests.waiting import HANG_S


async def test_a_burst_begins_a_few_in_each_turn_in_its_order() -> None:
    turns = StartLimiter()
    turn = 0
    begun: list[tuple[int, int]] = []

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    async def begin(number: int) -> None:
        await turns.mine()
        begun.append((turn, number))

    loop = asyncio.get_running_loop()
    loop.call_soon(count)
    await asyncio.gather(*(begin(number) for number in range(11)))
    assert [number for _, number in begun] == list(range(11))
    per_turn = [sum(1 for t, _ in begun if t == at) for at in range(turn + 1)]
    assert max(per_turn) <= EACH and sum(per_turn) == 11


async def test_one_alone_waits_for_nobody() -> None:
    turns = StartLimiter()
    for _ in range(5):
        task = asyncio.ensure_future(turns.mine())
        await asyncio.sleep(0)
        assert task.done()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_who_leaves_the_queue_takes_nobodys_place() -> None:
    turns = StartLimiter()
    tasks = [asyncio.ensure_future(turns.mine()) for _ in range(EACH + 4)]
    await asyncio.sleep(0)
    for task in tasks[EACH : EACH + 2]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    assert [task.cancelled() for task in tasks] == [False] * EACH + [True] * 2 + [False] * 2
