"""Whose grammar is compiled next: tenants take turns, and one of them never has all places."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator


class Turns:
    """Use it on one event loop."""

    def __init__(self, *, at_once: int, at_once_each: int, waiting: int, waiting_each: int) -> None:
        """Limits of all tenants, and of each."""
        self._at_once, self._at_once_each = at_once, at_once_each
        self._most_waiting, self._most_waiting_each = waiting, waiting_each
        self._working: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in turn

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_full(self, tenant: str) -> bool:
        """Whether the tenant would have to wait, and may not."""
        if self._is_free(tenant):
            return False
        mine = len(self._waiting.get(tenant, ()))
        return mine >= self._most_waiting_each or self.waiting >= self._most_waiting

    async def take(self, tenant: str) -> None:
        """Waits for a turn; give it back with `leave`. Check `is_full` first."""
        if self._is_free(tenant):
            self._working[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(tenant)
            else:
                self._forget(tenant, turn)
            raise

    def leave(self, tenant: str) -> None:
        self._working[tenant] -= 1
        if not self._working[tenant]:
            del self._working[tenant]
        for name in list(self._waiting):
            if not self._is_free(name):
                continue
            queue = self._waiting.pop(name)
            # Those that are done were cancelled, and their tasks have not run since.
            turn = next((turn for turn in _popped(queue) if not turn.done()), None)
            if turn is not None:
                self._working[name] += 1
                turn.set_result(None)
            if queue:  # after all others
                self._waiting[name] = queue

    def _is_free(self, tenant: str) -> bool:
        return self._working.total() < self._at_once and self._working[tenant] < self._at_once_each

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(tenant, None)


def _popped(queue: deque[asyncio.Future[None]]) -> Iterator[asyncio.Future[None]]:
    while queue:
        yield queue.popleft()
