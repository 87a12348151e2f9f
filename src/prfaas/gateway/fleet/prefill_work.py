"""Seconds of prefill work that this gateway has sent to one node and that are not done.

A node reports how many requests wait there, not how long they will take. The gateway has the length
of each prefill that it sent, and when each ended. Gateways of one deployment tell each other what
they have at each node. Requests of which nobody tells count with this gateway's average.
"""

from __future__ import annotations

from typing import NamedTuple

from prfaas.gateway.client.node_client import Load
from prfaas.scheduler.board import NodeReport
from prfaas.scheduler.plan import Role

_NEWEST = 0.1  # weight of the newest prefill in the average


class OthersWork(NamedTuple):
    """What other gateways have at one node."""

    prefills: int  # dispatched and not finished
    work_s: float  # seconds of these prefills that are left
    decodes: int  # requests that decode or will decode there


NO_WORK = OthersWork(0, 0.0, 0)


class PrefillWork:
    def __init__(self) -> None:
        self._jobs: dict[object, float] = {}  # in the order in which they were sent
        self._since_s = 0.0  # when the first of them started
        self._mean_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: object, work_s: float, now_s: float) -> None:
        if not self._jobs:
            self._since_s = now_s
        self._jobs[job] = work_s
        self._mean_s += (work_s - self._mean_s) * (_NEWEST if self._mean_s else 1.0)

    def end(self, job: object, now_s: float) -> bool:
        """Returns False when the job has ended before."""
        if job not in self._jobs:
            return False
        first = next(iter(self._jobs)) is job
        del self._jobs[job]
        if first:
            self._since_s = now_s
        return True

    @property
    def ended_s(self) -> float:
        """When the last prefill ended, if there is none now."""
        return self._since_s

    def left_s(self, now_s: float) -> float:
        if not self._jobs:
            return 0.0
        first_s = next(iter(self._jobs.values()))
        return sum(self._jobs.values()) - min(first_s, max(0.0, now_s - self._since_s))

    def node_report(
        self,
        load: Load,
        role: Role,
        own: int,
        own_decodes: int,
        asked_s: float,
        known: OthersWork = NO_WORK,
    ) -> NodeReport:
        """At most `own` prefills of this gateway were at the node while it was polled. `known` is
        what other gateways say that they have there: also requests whose KV is still to arrive, of
        which a decode node does not know yet."""
        requests = load.running + load.waiting
        work_s = self.left_s(asked_s)
        if role == "decode":
            decoding = max(requests - own, own_decodes + known.decodes)
            return NodeReport(asked_s, work_s, max(0, decoding))
        others = max(0, requests - own - own_decodes - known.prefills)
        work_s += known.work_s + others * self._mean_s
        return NodeReport(asked_s, work_s, own_decodes)
