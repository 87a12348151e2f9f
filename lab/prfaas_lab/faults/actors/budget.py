"""Keeps this process within a share of one core, by sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

SHARE = 0.25  # of one core
BURST_S = 0.1  # CPU seconds ahead of the share
LONGEST_SLEEP_S = 0.5


class CpuBudget:
    def __init__(
        self,
        share: float = SHARE,
        *,
        used_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`used_s` returns the CPU seconds of this process."""
        self._share = share
        self._used_s = used_s
        self._now_s = now_s
        self._sleep = sleep
        # In the order of the calls: otherwise a call could wait for many minutes, because whichever
        # call wakes up first takes what the process may use.
        self._order = asyncio.Lock()
        self.restart()

    def restart(self) -> None:
        """What the process used until now does not count."""
        self._began_s = self._now_s()
        self._before_s = self._used_s()

    @property
    def used_share(self) -> float:
        """The share of one core since the beginning."""
        elapsed_s = self._now_s() - self._began_s
        return (self._used_s() - self._before_s) / elapsed_s if elapsed_s > 0 else 0.0

    async def turn(self) -> float:
        """Returns when the process is within its share: the seconds that this took. Every actor
        calls this before each piece of work of a few milliseconds."""
        began_s = self._now_s()
        async with self._order:
            while (ahead_s := self._ahead_s()) > 0:
                await self._sleep(min(ahead_s / self._share, LONGEST_SLEEP_S))
        return self._now_s() - began_s

    def _ahead_s(self) -> float:
        earned_s = self._share * (self._now_s() - self._began_s) + BURST_S
        return self._used_s() - self._before_s - earned_s
