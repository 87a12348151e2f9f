"""A clock that advances only when a test calls `advance`."""

from __future__ import annotations


class FakeClock:
    """Implements `prfaas.clock.Clock`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds
