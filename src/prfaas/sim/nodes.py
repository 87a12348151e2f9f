"""A simulated node: one prefill at a time, first come first served, and a decode batch.

The batch steps as its profile says for its present size; its requests advance together, so one
counter of tokens serves them all and a heap says who ends next. Where every step takes the same
time, the end is known from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from prfaas.planner.profile import DecodeRate
from prfaas.scheduler.plan import Role
from prfaas.sim.events import Events
from prfaas.sim.job import Job
from prfaas.types import ClusterId, NodeId


class Batch:
    """Decode slots of one node. `ended(job)` is called after the last token."""

    __slots__ = (
        "_at_s",
        "_constant_s",
        "_ended",
        "_ends",
        "_events",
        "_serial",
        "_step_s",
        "_tokens",
        "_wake",
        "running",
    )

    def __init__(self, events: Events, rate: DecodeRate, ended: Callable[[Job], None]) -> None:
        self._events = events
        self._ended = ended
        # One step per batch size, looked up; equal ones need no counting.
        self._step_s = [rate.step_s(batch) for batch in range(rate.bs_max + 1)]
        constant = len(set(self._step_s)) == 1
        self._constant_s = self._step_s[0] if constant else None
        self.running = 0
        self._tokens = 0.0  # each running request has got so many since the node began
        self._at_s = 0.0
        self._ends: list[tuple[float, int, Job]] = []
        self._serial = 0
        self._wake = 0

    def start(self, job: Job, tokens: int) -> float:
        """Takes a slot; the time of the first token."""
        now = self._events.now_s
        if self._constant_s is not None:
            self.running += 1
            self._events.at(now + tokens * self._constant_s, self._on_end, job)
            return now + self._constant_s
        self._advance()
        self.running += 1
        self._serial += 1
        heappush(self._ends, (self._tokens + tokens, self._serial, job))
        self._plan()
        return now + self._step_s[self.running]

    def clear(self) -> None:
        """The node is lost; whoever was running is over."""
        self.running = 0
        self._ends.clear()
        self._wake += 1

    def _on_end(self, job: Job) -> None:
        if not job.over:
            self.running -= 1
            self._ended(job)

    def _advance(self) -> None:
        now = self._events.now_s
        if self.running:
            self._tokens += (now - self._at_s) / self._step_s[self.running]
        self._at_s = now

    def _plan(self) -> None:
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
        self._plan()
        for job in finished:
            self._ended(job)


class SimNode:
    __slots__ = (
        "alive",
        "batch",
        "cluster",
        "decodes",
        "for_memory",
        "for_slot",
        "free_kv_bytes",
        "name",
        "prefills",
        "queue",
        "queued_s",
        "role",
        "running",
        "switching",
    )

    def __init__(
        self, name: NodeId, cluster: ClusterId, role: Role, batch: Batch, kv_bytes: float
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.role: Role = role
        self.alive = True
        self.switching = False  # drained, and on its way to another role
        self.batch = batch
        self.free_kv_bytes = kv_bytes
        self.queue: deque[Job] = deque()  # waiting to be prefilled here
        self.queued_s = 0.0
        self.running: Job | None = None
        self.for_slot: deque[Job] = deque()  # KV is here, no slot is free
        self.for_memory: deque[Job] = deque()  # not granted yet
        # Attempts that depend on this node, in order: what a failure ends.
        self.prefills: dict[Job, None] = {}
        self.decodes: dict[Job, None] = {}

    @property
    def drained(self) -> bool:
        return not self.prefills and not self.decodes

    def work_s(self, now_s: float) -> float:
        """Prefill work, queued (as the router expects it) and left of the running one."""
        left = max(0.0, self.queued_s)
        if self.running is not None:
            left += self.running.started_s + self.running.service_s - now_s
        return left
