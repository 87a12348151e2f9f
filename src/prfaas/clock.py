"""The clock. Code with side effects receives a `Clock`; pure code receives `now` as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back, ignores wall-clock jumps."""


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()
