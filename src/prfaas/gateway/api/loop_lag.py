"""Event-loop lag: how much later than due the loop runs a callback. Every stream waits as long.

A lag has two causes: this process computes for too long, or other processes have the CPU. The first
is measured separately, by the CPU time that this process used meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

PROBE_EVERY_S = 0.01
_WINDOW_S = 60.0


class Lag(NamedTuple):
    lag_s: float
    own_s: float  # the part of it that this process's own CPU time explains


class LargestLag:
    """The largest lag of this minute and the one before. Pure."""

    def __init__(self) -> None:
        self._minute = 0
        self._this_s = self._before_s = 0.0

    def observe(self, lag_s: float, now_s: float) -> None:
        self._turn(now_s)
        self._this_s = max(self._this_s, lag_s)

    def at(self, now_s: float) -> float:
        self._turn(now_s)
        return max(self._this_s, self._before_s)

    def _turn(self, now_s: float) -> None:
        minute = int(now_s // _WINDOW_S)
        if minute != self._minute:
            self._before_s = self._this_s if minute == self._minute + 1 else 0.0
            self._minute, self._this_s = minute, 0.0


@asynccontextmanager
async def measure_lag(observe: Callable[[Lag, float], None]) -> AsyncIterator[None]:
    """Calls `observe` with the lag of each probe and the loop's time, until the block ends."""
    probing = asyncio.create_task(_probe(observe))
    try:
        yield
    finally:
        probing.cancel()


async def _probe(observe: Callable[[Lag, float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s, used_s = loop.time() + PROBE_EVERY_S, time.process_time()
        await asyncio.sleep(PROBE_EVERY_S)
        now_s = loop.time()
        lag_s = max(0.0, now_s - due_s)
        observe(Lag(lag_s, min(lag_s, time.process_time() - used_s)), now_s)
