"""A limit on the requests that start in one iteration of the event loop.

An iteration that starts hundreds of requests of a burst delays all streams by as long. A request
does not wait longer than it would wait for the requests before it.
"""

from __future__ import annotations

import asyncio
from collections import deque

STARTS_PER_ITERATION = 2  # about a millisecond of work


class StartLimiter:
    def __init__(self) -> None:
        self._left = STARTS_PER_ITERATION
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def wait(self) -> None:
        """Returns in the first iteration of the event loop that has room, in order of the calls."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_iteration)
        if self._left:
            self._left -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_iteration(self) -> None:
        self._left = STARTS_PER_ITERATION
        while self._waiting and self._left:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a waiter that is done was cancelled: its client has left
                waiter.set_result(None)
                self._left -= 1
        if self._left < STARTS_PER_ITERATION or self._waiting:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        else:
            self._counting = False
