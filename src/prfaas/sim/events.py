"""The event heap: callbacks in order of time, and at equal times in the order of scheduling.

A run is deterministic because nothing else decides the order of events.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    __slots__ = ("_heap", "_scheduled", "now_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0
        self.now_s = 0.0

    def at(self, when_s: float, do: Callable[[Any], None], what: Any = None) -> None:
        """Schedules `do(what)` at `when_s`, which must not be in the past."""
        self._scheduled += 1
        heappush(self._heap, (when_s, self._scheduled, do, what))

    def __bool__(self) -> bool:
        return bool(self._heap)

    def run_before(self, when_s: float) -> None:
        """Runs every event due before `when_s`. The clock then shows `when_s` or, for infinity, the
        time of the last event."""
        heap = self._heap
        while heap and heap[0][0] < when_s:
            self.now_s, _, do, what = heappop(heap)
            do(what)
        if when_s != float("inf"):
            self.now_s = when_s
