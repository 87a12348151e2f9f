"""What to add to a time of a process's clock, to have the time since the epoch."""

from __future__ import annotations

import time
from collections.abc import Callable

from prfaas.clock import Clock

_READINGS = 3  # at the start; the narrowest one counts


class EpochOffset:
    """The difference between two clocks that cannot be read at once.

    Each reading of the wall clock lies between two of the process's clock, so it bounds the
    difference from below and from above. A process that is interrupted between them learns wide
    bounds, which contain the difference that it knows, and its spans stay where they are. When the
    wall clock is set or drifts, they do not contain it any more, and it moves to the nearest
    bound."""

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        readings = [self._bounds_s() for _ in range(_READINGS)]
        low_s, high_s = min(readings, key=lambda bounds: bounds[1] - bounds[0])
        self._seconds = (low_s + high_s) / 2

    def seconds(self) -> float:
        low_s, high_s = self._bounds_s()
        self._seconds = min(max(self._seconds, low_s), high_s)
        return self._seconds

    def _bounds_s(self) -> tuple[float, float]:
        before_s = self._clock.now()
        wall_s = self._wall()
        return wall_s - self._clock.now(), wall_s - before_s
