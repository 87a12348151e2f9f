"""Shared by both parts of `prfaas demo`: checks, the relay's counters, a watch on the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from prfaas.config import Deployment
from prfaas.launch.children import Child, Children
from prfaas.wan.stats import RelayStats

T = TypeVar("T")
Policy = Literal["paper", "adaptive", "local", "remote"]
ANSWER_S = 60.0  # timeout of a relay's response; only a hanging relay takes longer


@dataclass(frozen=True, slots=True)
class Check:
    """A claim of the demo, and whether the measurements support it."""

    claim: str
    held: bool | None  # None: not judged
    seen: str

    @property
    def mark(self) -> str:
        if self.held is None:
            return "not judged"
        return "ok" if self.held else "FAILED"


@dataclass(slots=True)
class RelayReader:
    """Asks a relay for its counters, and reads them from the lines that the relay prints."""

    _waiting: list[asyncio.Future[RelayStats]] = field(default_factory=list)

    def read_line(self, line: str) -> None:
        try:
            stats = msgspec.json.decode(line, type=RelayStats)
        except msgspec.MsgspecError:
            return  # a line about something else
        if self._waiting:
            waiting = self._waiting.pop(0)
            if not waiting.done():
                waiting.set_result(stats)

    async def stats(self, relay: Child[Any]) -> RelayStats:
        future: asyncio.Future[RelayStats] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        relay.write_line("stats")
        async with asyncio.timeout(ANSWER_S):
            return await future

    async def carried_bytes(self, relay: Child[Any]) -> int:
        """Bytes towards the PD cluster since the relay's start."""
        return (await self.stats(relay)).to_target_bytes


def with_policy(deployment: Deployment, policy: Policy) -> Deployment:
    rules = msgspec.structs.replace(deployment.scheduler, policy=policy)
    return msgspec.structs.replace(deployment, scheduler=rules)


async def run_watched(children: Children, work: Coroutine[Any, Any, T]) -> T:
    """Returns the work's result. Raises `ChildDied` when a process exits before the work ends."""
    working = asyncio.create_task(work)
    dying = asyncio.create_task(children.until_one_dies())
    either: set[asyncio.Task[Any]] = {working, dying}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            raise dying.result()
        return working.result()
    finally:
        for task in either:
            task.cancel()
        await asyncio.gather(*either, return_exceptions=True)
