"""Attempts of one request, and whether and where it may be retried.

Retries are a share of the traffic, so that a fault does not double the load: every request adds a
part of a retry to the budget, every retry takes a whole one. Retries that follow a restart on
purpose, or an attempt that no node has received, are free. A node that falls silent is one fault,
however many requests wait for it: their retries take nothing from the budget. They cannot double
the load for long, because the node gets no new requests, and each request has a few attempts only.
The same holds for a node that dies: the first request that loses it takes a retry, and the others
that were under way there take none. When all nodes of a cluster die at once, a request could lose
one after the other before the gateway knows; from the second loss on it waits a moment, after
which the dead ones refuse connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prfaas.clock import Clock
from prfaas.config.gateway import DEFAULTS
from prfaas.errors import RequestError
from prfaas.gateway.dispatch.handoff import AttemptFailed, DecodeNodeFull
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.request import RequestTrace
from prfaas.types import NodeId

RETRY_AFTER_S = 1.0  # sent to a client whose request has failed too often
LOSSES_S = 0.5  # in which all processes of a cluster die


@dataclass(slots=True)
class RetryBudget:
    """The retries that all requests together may make. Pure."""

    per_request: float = 0.2
    limit: float = 20.0  # the most that a quiet time saves up, and the amount at the start
    left: float = 20.0
    spent: int = 0
    denied: int = 0
    refused_grants: int = 0  # after which a request tries again without taking a retry
    max_attempts: int = DEFAULTS.max_attempts  # of one request, including the first

    def add_request(self) -> None:
        self.left = min(self.limit, self.left + self.per_request)

    def take(self, attempts: int, *, known_fault: bool = False) -> bool:
        """Whether a request that has made `attempts` attempts may make one more. `known_fault`: the
        latest has ended with others, because a node fell silent or died."""
        if attempts >= self.max_attempts or (self.left < 1 and not known_fault):
            self.denied += 1
            return False
        self.left -= 0 if known_fault else 1
        self.spent += 1
        return True


class Attempts:
    """The attempts of one request so far."""

    def __init__(
        self, fleet: Fleet, budget: RetryBudget, clock: Clock, trace: RequestTrace
    ) -> None:
        self._fleet = fleet
        self._budget = budget
        self._clock = clock
        self._trace = trace
        self._until_s = clock.now() + fleet.timeouts.queue_s
        self._failed_at: set[NodeId] = set()
        self._full: set[NodeId] = set()
        self.backoff_s = 0.0  # before the next attempt
        self._losses = 0  # connections to nodes that have broken

    @property
    def avoid(self) -> frozenset[NodeId]:
        return frozenset(self._failed_at | self._full)

    def time_left_s(self) -> float:
        return max(0.0, self._until_s - self._clock.now())

    def record_failure(self, failure: AttemptFailed, booking: Booking) -> None:
        """Raises `RequestError` when the request may not be retried. An attempt does not count when
        a node has left on purpose, or when no node has computed anything."""
        self._trace.failures.append(str(failure))
        left = self._has_left_on_purpose(failure)
        # Neither is a fault whose retries have to be limited: a rolling upgrade refuses many
        # requests. It is bounded nevertheless, once for each node.
        is_free = (left or failure.unsent) and not self._failed_at.issuperset(failure.avoid)
        # A decode node that has refused to serve it alone has computed nothing, and does so once.
        is_free = is_free or failure.no_alone
        if is_free:
            self._trace.attempts -= 1
        elif not self._budget.take(self._trace.attempts, known_fault=_is_known(failure)):
            raise RequestError(
                503,
                "upstream_failed",
                f"failed after {self._trace.attempts} attempts: {failure}",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        self._failed_at.update(failure.avoid)
        if failure.prefill and booking.route.offloaded and not left:
            self._failed_at.update(self._fleet.members.remote_nodes())
        if failure.lost is not None and not failure.unsent:
            self._losses += 1
            if self._losses > 1:
                self.backoff_s = min(LOSSES_S, self.time_left_s())

    def _has_left_on_purpose(self, failure: AttemptFailed) -> bool:
        """Whether the attempt failed because a node drains, or has just exited after that."""
        now = self._clock.now()
        members = [self._fleet.members.named(node) for node in failure.avoid]
        return any(m is not None and m.is_expected_back(now) for m in members)

    def record_full(self, full: DecodeNodeFull) -> None:
        """The next attempt uses another decode node or, when all are full, follows a backoff. The
        attempt does not count: nothing was computed. Raises `RequestError` when no time is left."""
        self._trace.attempts -= 1
        self._budget.refused_grants += 1
        self._full.add(full.node)
        if self._fleet.has_free_decode_node(full.cluster, self._full):
            return
        self._full.clear()
        self.backoff_s = full.retry_after_s
        if self.backoff_s > self.time_left_s():
            raise RequestError(503, "overloaded", str(full), retry_after_s=self.backoff_s) from None

    async def back_off(self) -> None:
        if self.backoff_s:
            await asyncio.sleep(self.backoff_s)
            self.backoff_s = 0.0


def _is_known(failure: AttemptFailed) -> bool:
    """Whether other requests have failed of the same fault before, or do so now."""
    return failure.silent or (failure.lost is not None and failure.lost.known)
