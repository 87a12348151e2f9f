"""The gateway that plans is stopped, not killed: its connections stay open, and it does not know
that it was away. The other gateway serves on and plans, and the stopped one gives way."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.promises.cases import Case, ClusterCase, DeploymentCase, HomeTraffic, LinkCase
from tests.promises.live import Asked, Player, Run
from tests.promises.stand_ins import expected_tokens

HOMES, FAR = ("east", "west"), "far"
CASE = Case(
    DeploymentCase(
        (*(ClusterCase(home, "pd", 1, 2) for home in HOMES), ClusterCase(FAR, "prfaas", 2, 0)),
        tuple(LinkCase(FAR, home, gbps=1.0, rtt_ms=1.0) for home in HOMES),
        measured=True,
        gateway_per_home=True,
    ),
    traffic=tuple(HomeTraffic(home, rate=0.5, lengths="mixed", reuse=0.0) for home in HOMES),
    events=(),
    policy="adaptive",
    seed=42,
)
OUTPUT_TOKENS = 4
LEAST_ASKED = 10
_NUMBERS = count()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def request(home: str) -> Asked:
    number = next(_NUMBERS)
    rng = random.Random(number)
    prompt = rng.choices(range(100_000), k=rng.choice((100, 1000, 6000)))
    return Asked(f"stopped-{number}", home, "calm", 0.0, prompt, OUTPUT_TOKENS, stream=True)


def is_right(one: Asked) -> bool:
    return one.end == "completed" and one.tokens == expected_tokens(one.prompt, OUTPUT_TOKENS)


@asynccontextmanager
async def asking(player: Player, home: str) -> AsyncIterator[list[Asked]]:
    """One request after the other, at least some, until the context is left."""
    asked: list[Asked] = []
    done = asyncio.Event()

    async def ask() -> None:
        while not done.is_set() or len(asked) < LEAST_ASKED:
            asked.append(request(home))
            await player.ask(asked[-1])

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        try:
            yield asked
        finally:
            done.set()


def plans(state: Any) -> bool:
    return bool(state["planner"]["here"])


async def planner_and_other(player: Player) -> tuple[Run, Run]:
    """Once all gateways follow the plan of one of them."""
    found: list[Run] = []

    async def is_one() -> bool:
        states = [await player.state(run) for run in player.runs]
        found[:] = sorted(player.runs, key=lambda run: not plans(states[player.runs.index(run)]))
        followed = {str(own_gateway(state)["followed"]) for state in states}
        return [plans(state) for state in states].count(True) == 1 and len(followed) == 1

    await player.until(is_one, "one gateway plans")
    first, other = found
    return first, other


def own_gateway(state: Any) -> Any:
    return next(one for one in state["gateways"] if one["here"])


async def test_a_stopped_planner_gives_way(tmp_path: Path) -> None:
    player = Player(CASE, tmp_path)
    books = player.world.books
    async with player.serving():
        stopped, other = await planner_and_other(player)
        before: int = (await player.state(stopped))["planner"]["epoch"]
        async with asking(player, other.home) as asked:
            stopped.process.popen.send_signal(signal.SIGSTOP)
            try:
                late = request(stopped.home)
                asking_late = asyncio.create_task(player.ask(late))

                async def takes_over() -> bool:
                    return plans(await player.state(other))

                await player.until(takes_over, "another gateway plans")
                taken_over = len(books.planning_epochs)
                epoch: int = (await player.state(other))["planner"]["epoch"]
                assert epoch > before
                # What has changed meanwhile, and what the stopped gateway knows nothing of.
                await player.order(FAR, drained=True, at=other)

                async def has_changed() -> bool:
                    own = own_gateway(await player.state(other))
                    if own["followed"] is None:  # it plans, and has yet to make a plan
                        return False
                    return own["followed"][0] >= epoch and own["drained"] == [FAR]

                await player.until(has_changed, "the plan and the drain of the other are followed")
                served_meanwhile = sum(map(is_right, asked))
            finally:
                stopped.process.popen.send_signal(signal.SIGCONT)

            async def gives_way() -> bool:
                here, there = await player.state(stopped), await player.state(other)
                same = ("followed", "drained")
                return (
                    (plans(here), plans(there)) == (False, True)
                    and here["planner"]["cluster"] == other.home
                    and [own_gateway(here)[w] for w in same]
                    == [own_gateway(there)[w] for w in same]
                )

            await player.until(gives_way, "the stopped gateway follows the other one")
            await asking_late
        assert served_meanwhile and all(map(is_right, asked)), [one for one in asked if one.problem]
        assert is_right(late), late.problem
        # The kvds have accepted nothing from the stopped gateway since another one planned.
        assert min(books.planning_epochs[taken_over:], default=epoch) >= epoch
        assert not books.violations
