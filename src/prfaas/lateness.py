"""How late this process is: the time in which it had work to do and could not run.

A sensor that measures a path also measures its own process. When the machine is busy, a thread
wakes late and reports its own delay as a slow network. `Lateness` records how late a regular
heartbeat was; `LatenessMonitor` is the thread with that heartbeat. Sensors subtract the lateness
from their reports.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from prfaas.clock import Clock, MonotonicClock

BEAT_S = 0.05
# Any timer is a few milliseconds late. Only a longer delay shows that the process could not run.
TOLERANCE_S = 0.01
MEMORY_S = 60.0  # longer than any transfer may wait before it fails


class LateSince(Protocol):
    """How many of the seconds between `since_s` and now this process was late."""

    def __call__(self, since_s: float, /) -> float: ...


def never_late(_since_s: float, /) -> float:
    """For owners without a heartbeat, such as tests with a fake clock."""
    return 0.0


class Lateness:
    """The delays of the last minute. Thread-safe; callers pass the time."""

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        self._beat_s = now
        self._delays: deque[tuple[float, float]] = deque()  # from, to

    def beat(self, now: float) -> None:
        """The heartbeat ran. It was due `BEAT_S` after the previous one."""
        with self._lock:
            due_s = self._beat_s + BEAT_S
            if now - due_s > TOLERANCE_S:
                self._delays.append((due_s, now))
            self._beat_s = now
            while self._delays and self._delays[0][1] < now - MEMORY_S:
                self._delays.popleft()

    def since(self, since_s: float, now: float) -> float:
        """Seconds of lateness between the two times, including a heartbeat that is overdue now."""
        with self._lock:
            late_s = 0.0
            for began_s, ended_s in reversed(self._delays):
                if ended_s <= since_s:
                    break
                late_s += ended_s - max(began_s, since_s)
            overdue_from_s = max(self._beat_s + BEAT_S + TOLERANCE_S, since_s)
            return late_s + max(0.0, now - overdue_from_s)


class LatenessMonitor:
    """A thread with a heartbeat until `close`; `since` returns how late this process was."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._lateness = Lateness(self._clock.now())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prfaas-lateness", daemon=True)
        self._thread.start()

    def since(self, since_s: float, /) -> float:
        return self._lateness.since(since_s, self._clock.now())

    def within(self, seconds: float) -> float:
        """How late this process was in the last `seconds`."""
        return self.since(self._clock.now() - seconds)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=BEAT_S + 1.0)

    def _run(self) -> None:
        while not self._closing.wait(BEAT_S):
            self._lateness.beat(self._clock.now())
