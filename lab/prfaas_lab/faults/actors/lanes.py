"""Runs the kinds of attack side by side, so that a slow kind does not hold up others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from prfaas_lab.faults.actors.connections import Network

PAUSE_S = 0.05  # between two deeds of a lane: a server that refuses at once is not asked in a loop


class Lane(NamedTuple):
    """One kind of attack. `at_once` of it are under way at any time."""

    kind: str
    act: Callable[[str, random.Random], Awaitable[object]]
    at_once: int = 1
    pause_s: float = PAUSE_S


async def run_lanes(lanes: list[Lane], network: Network, seed: str) -> None:
    """Runs until cancelled. A defect of an actor ends neither its lane nor the others."""
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            for number in range(lane.at_once):
                draw = random.Random(f"{seed} {lane.kind} {number}")
                group.create_task(_run(lane, network, draw))


async def _run(lane: Lane, network: Network, draw: random.Random) -> None:
    while True:
        await network.budget.turn()
        try:
            await lane.act(lane.kind, draw)
        except (OSError, TimeoutError, EOFError):  # EOFError: an incomplete read
            network.census.record(lane.kind, "closed", 0.0)
        except Exception as error:
            network.census.record_failure(lane.kind, error)
        await asyncio.sleep(lane.pause_s)
