"""The path that the relay emulates: rate, delay, jitter and a schedule of faults.

Pure: no socket, no clock. A byte that arrives at `now` is serialised at the path's rate, after the
bytes before it, and then travels for the delay:

    arrival ──► waits for the lane ──► bits / rate ──► delay + jitter ──► departure
                 (bounded: QUEUE_S)
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass

from prfaas.errors import InputError

CHUNK_BYTES = 256 * 1024
_SMALLEST_CHUNK_BYTES = 16 * 1024
# The longest time that a chunk may occupy the lane: small messages then wait less on a slow lane.
_CHUNK_S = 2e-3
# How far ahead of now a lane may be booked. This must be longer than a late wake-up on a busy
# machine, or the relay does not reach the rate. It is also the longest queue that the relay adds.
QUEUE_S = 10e-3
# What one connection may hold in the relay in addition to the bandwidth-delay product: what the
# path carries in this time, as in a router, but no less and no more than these bytes.
_SPARE_S = 0.1
_LEAST_SPARE_BYTES = 256 * 1024
_MOST_SPARE_BYTES = 4 * 1024 * 1024
# Without a rate there is no bandwidth-delay product: enough for 10 Gbit/s at 100 ms.
_UNLIMITED_HELD_BYTES = 128 * 1024 * 1024


class PathState(enum.IntEnum):
    """A worse state has a greater value."""

    UP = 0
    STALLED = 1  # nothing moves, connections stay
    OUT = 2  # nothing moves, new connections are refused


@dataclass(frozen=True, slots=True)
class Recurring:
    """Begins `every_s` after the start and again after each further `every_s`; lasts `for_s`."""

    every_s: float
    for_s: float

    def __post_init__(self) -> None:
        if not (0 < self.for_s < self.every_s < math.inf):
            raise InputError(
                f"every {self.every_s:g} s for {self.for_s:g} s",
                fix="give two values above 0, the second less than the first",
            )

    def active(self, elapsed_s: float) -> bool:
        return elapsed_s >= self.every_s and elapsed_s % self.every_s < self.for_s

    def until_change_s(self, elapsed_s: float) -> float:
        if elapsed_s < self.every_s:
            return self.every_s - elapsed_s
        phase_s = elapsed_s % self.every_s
        return (self.for_s if phase_s < self.for_s else self.every_s) - phase_s


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the path does to bytes. Rate and delay apply to each direction separately."""

    rate_bps: float | None = None  # shared by all connections; None: unlimited
    rtt_s: float = 0.0  # half of it in each direction
    jitter_s: float = 0.0  # maximum extra delay per chunk and direction; the order is kept
    stall: Recurring | None = None
    outage: Recurring | None = None
    cut_every_s: float | None = None

    def __post_init__(self) -> None:
        for name, value, unit, positive in (
            ("rate", self.rate_bps, "bit/s", True),
            ("round trip", self.rtt_s, "s", False),
            ("jitter", self.jitter_s, "s", False),
            ("time between cuts", self.cut_every_s, "s", True),
        ):
            if value is None:
                continue
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                least = "more than 0" if positive else "0 or more"
                raise InputError(f"the {name} is {value:g} {unit}", fix=f"give {least}")

    @property
    def delay_s(self) -> float:
        return self.rtt_s / 2

    @property
    def chunk_bytes(self) -> int:
        """How many bytes to read at once."""
        if self.rate_bps is None:
            return CHUNK_BYTES
        wanted = int(self.rate_bps / 8 * _CHUNK_S)
        return min(CHUNK_BYTES, max(_SMALLEST_CHUNK_BYTES, wanted))

    @property
    def held_bytes(self) -> int:
        """How many bytes one connection may hold in one direction before its sender must wait. A
        single connection can reach the rate with them."""
        if self.rate_bps is None:
            return _UNLIMITED_HELD_BYTES
        travelling_s = self.delay_s + self.jitter_s + QUEUE_S
        spare = int(self.rate_bps / 8 * _SPARE_S)
        spare = min(_MOST_SPARE_BYTES, max(_LEAST_SPARE_BYTES, spare))
        return int(self.rate_bps / 8 * travelling_s) + spare

    def scheduled_state(self, elapsed_s: float) -> PathState:
        if self.outage and self.outage.active(elapsed_s):
            return PathState.OUT
        if self.stall and self.stall.active(elapsed_s):
            return PathState.STALLED
        return PathState.UP

    def until_change_s(self, elapsed_s: float) -> float:
        """The time to the next change of `scheduled_state` or the next cut; inf without either."""
        times = [r.until_change_s(elapsed_s) for r in (self.stall, self.outage) if r]
        if self.cut_every_s is not None:
            times.append(self.cut_every_s - elapsed_s % self.cut_every_s)
        return min(times, default=math.inf)

    def cuts_until(self, elapsed_s: float) -> int:
        """How many cuts are due until `elapsed_s`."""
        return 0 if self.cut_every_s is None else int(elapsed_s / self.cut_every_s)


class PathClock:
    """The time of bytes on the path. It stops while the path is stalled, so that a stalled byte
    continues where it was instead of arriving in a burst."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._stopped_at_s: float | None = None

    def read(self, now_s: float) -> float:
        return (now_s if self._stopped_at_s is None else self._stopped_at_s) - self._lost_s

    def stop(self, now_s: float) -> None:
        if self._stopped_at_s is None:
            self._stopped_at_s = now_s

    def go(self, now_s: float) -> None:
        if self._stopped_at_s is not None:
            self._lost_s += now_s - self._stopped_at_s
            self._stopped_at_s = None


class Lane:
    """One direction of the path: serialises the bytes of all connections one after another.

    An idle lane does not save up capacity: over any interval it passes at most rate x interval,
    plus the bytes that were booked ahead (QUEUE_S and one chunk).
    """

    def __init__(self, conditions: Conditions, seed: int) -> None:
        self.conditions = conditions
        self._random = random.Random(seed)
        self._free_at_s = -math.inf

    def wait_s(self, now_s: float) -> float:
        """The time until the lane accepts another chunk; 0 when it accepts one now."""
        return max(0.0, self._free_at_s - QUEUE_S - now_s)

    def admit(self, size_bytes: int, now_s: float) -> float:
        """Books `size_bytes`. Returns when their last bit leaves the far end."""
        conditions = self.conditions
        self._free_at_s = max(now_s, self._free_at_s)
        if conditions.rate_bps is not None:
            self._free_at_s += size_bytes * 8 / conditions.rate_bps
        extra_s = self._random.uniform(0, conditions.jitter_s) if conditions.jitter_s else 0.0
        return self._free_at_s + conditions.delay_s + extra_s


class EmulatedPath:
    """The path as a whole: its conditions, one lane per direction, its clock and its state."""

    def __init__(self, conditions: Conditions, seed: int, now_s: float) -> None:
        self.conditions = conditions
        self.lanes = (Lane(conditions, seed), Lane(conditions, seed + 1))
        self.clock = PathClock()
        self.state = PathState.UP
        self.manual_state = PathState.UP  # the schedule can only make the state worse
        self._started_s = now_s
        self._cuts_done = 0

    def change(self, conditions: Conditions, now_s: float) -> None:
        """The schedule of faults starts again."""
        self.conditions = conditions
        for lane in self.lanes:
            lane.conditions = conditions
        self._started_s = now_s
        self._cuts_done = 0

    def take_due_cut(self, now_s: float) -> bool:
        """Returns True once for each scheduled cut; cuts that are due together count as one."""
        cuts_due = self.conditions.cuts_until(now_s - self._started_s)
        if cuts_due <= self._cuts_done:
            return False
        self._cuts_done = cuts_due
        return True

    def update_state(self, now_s: float) -> bool:
        """Sets `state` to the worse of the manual and the scheduled state. Returns whether it
        changed."""
        scheduled = self.conditions.scheduled_state(now_s - self._started_s)
        state = max(self.manual_state, scheduled)
        if state is self.state:
            return False
        if state is PathState.UP:
            self.clock.go(now_s)
        else:
            self.clock.stop(now_s)
        self.state = state
        return True

    def until_change_s(self, now_s: float) -> float:
        """The time to the next scheduled change or cut; inf when there is none."""
        return self.conditions.until_change_s(now_s - self._started_s)
