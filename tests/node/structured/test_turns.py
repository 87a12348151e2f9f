from __future__ import annotations

import asyncio

import pytest

from prfaas.node.structured.turns import Turns


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Waiting:
    """Who has had a turn, in order."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.begun: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, *names: str) -> list[asyncio.Task[None]]:
        """A name is a tenant and a number."""
        tasks = [asyncio.create_task(self._take(name)) for name in names]
        self._tasks += tasks
        await settled()
        return tasks

    async def _take(self, name: str) -> None:
        await self.turns.take(name[0])
        self.begun.append(name)

    async def leave(self, tenant: str) -> None:
        self.turns.leave(tenant)
        await settled()


async def test_tenants_take_turns_and_one_has_never_all_places() -> None:
    waiting = Waiting(Turns(at_once=2, at_once_each=1, waiting=9, waiting_each=3))
    await waiting.join("a1", "a2", "a3", "b1", "c1", "c2", "d1")
    assert waiting.begun == ["a1", "b1"]
    await waiting.leave("b")
    assert waiting.begun[2:] == ["c1"]  # a has a place
    await waiting.leave("c")
    assert waiting.begun[3:] == ["d1"]  # c has had a turn since then
    await waiting.leave("d")
    assert waiting.begun[4:] == ["c2"]
    await waiting.leave("a")
    assert waiting.begun[5:] == ["a2"]
    await waiting.leave("c")
    await waiting.leave("a")
    assert waiting.begun[6:] == ["a3"] and not waiting.turns.waiting


async def test_waiting_is_bounded_for_each_tenant_and_for_all() -> None:
    turns = Turns(at_once=1, at_once_each=1, waiting=3, waiting_each=2)
    waiting = Waiting(turns)
    assert not turns.is_full("a")
    await waiting.join("a1", "a2", "a3")
    assert turns.is_full("a") and not turns.is_full("b")
    tasks = await waiting.join("b1")
    assert turns.is_full("b") and turns.is_full("c")
    tasks[0].cancel()
    await settled()
    assert not turns.is_full("c")
    for _ in range(3):
        await waiting.leave("a")
    assert waiting.begun == ["a1", "a2", "a3"] and not turns.is_full("a")


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_turn_of_a_task_that_is_cancelled_goes_to_the_next(leaves_first: bool) -> None:
    waiting = Waiting(Turns(at_once=1, at_once_each=1, waiting=3, waiting_each=3))
    tasks = await waiting.join("a1", "b1", "c1")
    if leaves_first:
        waiting.turns.leave("a")
        tasks[1].cancel()
    else:
        tasks[1].cancel()
        waiting.turns.leave("a")
    await settled()
    assert waiting.begun == ["a1", "c1"]


async def test_a_turn_is_not_lost_to_a_task_that_was_cancelled() -> None:
    waiting = Waiting(Turns(at_once=1, at_once_each=1, waiting=9, waiting_each=3))
    _, second, _ = await waiting.join("a1", "a2", "a3")
    second.cancel()
    await waiting.leave("a")  # before the cancelled task has run
    assert waiting.begun == ["a1", "a3"]
