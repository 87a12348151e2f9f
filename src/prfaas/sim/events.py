"""The event heap: things that happen later, in order of time; of equal times, as they were planned.

A run is deterministic because nothing else decides what comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    __slots__ = ("_heap", "_planned", "now_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0
        self.now_s = 0.0

    def at(self, when_s: float, do: Callable[[Any], None], what: Any = None) -> None:
        """`do(what)` at `when_s`, which is not in the past."""
        self._planned += 1
        heappush(self._heap, (when_s, self._planned, do, what))

    def __bool__(self) -> bool:
        return bool(self._heap)

    def run_before(self, when_s: float) -> None:
        """Everything due before `when_s`; the clock then stands at `when_s` or, with infinity, at
        the last event."""
        heap = self._heap
        while heap and heap[0][0] < when_s:
            self.now_s, _, do, what = heappop(heap)
            do(what)
        if when_s != float("inf"):
            self.now_s = when_s
