"""What the scenes of `prfaas demo` have in common: checks, a relay to ask and order, a watch on the
processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prfaas.launch.children import Child, Children

T = TypeVar("T")
_COUNTER = re.compile(r"([\d,]+) bytes to the target")
ANSWER_S = 10.0  # for a relay to say its counters


@dataclass(frozen=True, slots=True)
class Check:
    """Something the demo claims, and whether it held this time."""

    claim: str
    held: bool
    seen: str


@dataclass(slots=True)
class RelayEar:
    """Hears a relay's lines; whoever has asked for its counters gets them."""

    _waiting: list[asyncio.Future[int]] = field(default_factory=list)

    def heard(self, line: str) -> None:
        found = _COUNTER.search(line)
        if found and self._waiting:
            waiting = self._waiting.pop(0)
            if not waiting.done():
                waiting.set_result(int(found[1].replace(",", "")))

    async def carried_bytes(self, relay: Child) -> int:
        """Since its start, towards the PD cluster."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        relay.tell("stats")
        async with asyncio.timeout(ANSWER_S):
            return await future


async def watched(children: Children, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises `ChildDied` when a process ends under it."""
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
