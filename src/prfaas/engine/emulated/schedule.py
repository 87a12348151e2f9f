"""When the emulated engine's work is due to end.

The schedule is absolute: work begins when the work before it was due to end, so that late wake-ups
do not add up.
"""

from __future__ import annotations

from prfaas.clock import Clock
from prfaas.engine.api import StepTiming


class Schedule:
    """Owned by the engine's thread; any thread may read `timing`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.free_s = clock.now()  # when the work that has begun is due to end
        self.timing = StepTiming()  # replaced as a whole, so that any thread may read it

    def start_after(self, submitted_s: float) -> None:
        """The engine was idle until a job arrived."""
        self.free_s = max(self.free_s, submitted_s)

    def add(self, seconds: float) -> float:
        """Appends work of that length and returns when it begins."""
        begin_s = self.free_s
        self.free_s += seconds
        return begin_s

    def abandon(self) -> None:
        """The current work ends now: the engine does not compute the rest."""
        self.free_s = min(self.free_s, self._clock.now())

    def count_step(self, wanted_s: float) -> None:
        """A chunk or a decode step, due to end at `free_s`, has ended now."""
        self.timing = self.timing.plus_step(wanted_s, self._clock.now() - self.free_s)
