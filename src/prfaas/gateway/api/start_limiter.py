"""A burst of requests begins a few at a time: every turn of the event loop that begins hundreds of
them keeps all streams waiting for as long. Nothing waits longer than it would behind the others."""

from __future__ import annotations

import asyncio
from collections import deque

EACH = 2  # about a millisecond of work


class StartLimiter:
    def __init__(self) -> None:
        self._left = EACH
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def mine(self) -> None:
        """Returns in the first turn of the loop that has room."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self) -> None:
        self._left = EACH
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its client has gone
                waiter.set_result(None)
                self._left -= 1
        if self._left < EACH or self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._counting = False
