"""A simulated node: one prefill at a time, first come first served, and a decode batch.

The time of a batch step comes from the profile, for the batch's present size. The requests of a
batch advance together, so one counter of tokens serves all of them, and a heap yields the request
that ends next. Where every step takes the same time, the end is known at the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from prfaas.planner.profile import DecodeRate
from prfaas.scheduler.plan import Role
from prfaas.sim.attempt import Attempt
from prfaas.sim.events import Events
from prfaas.types import ClusterId, NodeId


class Batch:
    """Decode slots of one node. `ended(attempt)` is called after the last token."""

    __slots__ = (
        "_at_s",
        "_constant_s",
        "_ended",
        "_ends",
        "_events",
        "_serial",
        "_stalled_s",
        "_step_s",
        "_tokens",
        "_wake",
        "running",
    )

    def __init__(self, events: Events, rate: DecodeRate, ended: Callable[[Attempt], None]) -> None:
        self._events = events
        self._ended = ended
        # Step time by batch size. Where all are equal, no tokens need counting.
        self._step_s = [rate.step_s(batch) for batch in range(rate.bs_max + 1)]
        constant = len(set(self._step_s)) == 1
        self._constant_s = self._step_s[0] if constant else None
        self.running = 0
        self._tokens = 0.0  # that a request running since the start of the node would have
        self._at_s = 0.0
        self._ends: list[tuple[float, int, Attempt]] = []
        self._serial = 0
        self._wake = 0
        self._stalled_s = 0.0  # for which decoding was delayed, in all

    def start(self, attempt: Attempt, tokens: int) -> float:
        """Takes a slot. Returns the time of the first token."""
        now = self._events.now_s
        if self._constant_s is not None:
            self.running += 1
            end_s = now + tokens * self._constant_s
            self._events.at(end_s, self._on_end, (attempt, self._stalled_s))
            return now + self._constant_s
        self._advance()
        self.running += 1
        self._serial += 1
        heappush(self._ends, (self._tokens + tokens, self._serial, attempt))
        self._schedule_next_end()
        return now + self._step_s[self.running]

    def clear(self) -> None:
        """Drops every request: the node is lost."""
        self.running = 0
        self._ends.clear()
        self._wake += 1

    def delay(self, seconds: float) -> None:
        """The node computes something else for so long: every running request ends later."""
        if self._constant_s is not None:
            self._stalled_s += seconds
            return
        self._advance()
        if self.running:
            self._tokens -= seconds / self._step_s[self.running]
            self._schedule_next_end()

    def step_s(self) -> float:
        """The present time of a step; 0 where no request runs."""
        return self._step_s[self.running] if self.running else 0.0

    def _on_end(self, expected: tuple[Attempt, float]) -> None:
        attempt, stalled_s = expected
        if attempt.is_over:
            return
        if stalled_s < self._stalled_s:
            later_s = self._events.now_s + self._stalled_s - stalled_s
            self._events.at(later_s, self._on_end, (attempt, self._stalled_s))
            return
        self.running -= 1
        self._ended(attempt)

    def _advance(self) -> None:
        now = self._events.now_s
        if self.running:
            self._tokens += (now - self._at_s) / self._step_s[self.running]
        self._at_s = now

    def _schedule_next_end(self) -> None:
        self._wake += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._tokens)
            when = self._events.now_s + left * self._step_s[self.running]
            self._events.at(when, self._on_wake, self._wake)

    def _on_wake(self, wake: int) -> None:
        if wake != self._wake:
            return
        self._advance()
        finished = []
        while self._ends and self._ends[0][0] <= self._tokens + 1e-6:
            finished.append(heappop(self._ends)[2])
        self.running -= len(finished)
        self._schedule_next_end()
        for attempt in finished:
            self._ended(attempt)


class SimNode:
    __slots__ = (
        "alive",
        "batch",
        "cluster",
        "decodes",
        "for_memory",
        "for_slot",
        "free_kv_bytes",
        "in_use",
        "name",
        "prefills",
        "queue",
        "role",
        "running",
        "slowness",
        "switching",
    )

    def __init__(
        self, name: NodeId, cluster: ClusterId, role: Role, batch: Batch, kv_bytes: float
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.role: Role = role
        self.alive = True
        self.in_use = True  # False: an operator has drained its cluster
        self.slowness = 1.0  # time of its prefills over the stated time
        self.switching = False  # drained, and changing its role
        self.batch = batch
        self.free_kv_bytes = kv_bytes
        self.queue: deque[Attempt] = deque()  # attempts that wait for their prefill
        self.running: Attempt | None = None
        self.for_slot: deque[Attempt] = (
            deque()
        )  # attempts whose KV is here and that wait for a slot
        self.for_memory: deque[Attempt] = deque()  # attempts that wait for their grant
        # Attempts that depend on this node, in order. A failure of the node ends them.
        self.prefills: dict[Attempt, None] = {}
        self.decodes: dict[Attempt, None] = {}

    @property
    def drained(self) -> bool:
        return not self.prefills and not self.decodes
