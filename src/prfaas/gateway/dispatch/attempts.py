"""What one request has been through, and whether and where it may be tried again."""

from __future__ import annotations

import asyncio

from prfaas.clock import Clock
from prfaas.errors import RequestError
from prfaas.gateway.dispatch.booking import Booking
from prfaas.gateway.dispatch.handoff import Failed, Later
from prfaas.gateway.dispatch.retry_budget import RetryBudget
from prfaas.gateway.request import RequestTrace
from prfaas.gateway.router import Router
from prfaas.types import NodeId

PATIENCE_S = 60.0  # a request waits so long for a place, all attempts together
RETRY_S = 1.0  # what a client is told whose request has failed too often


class Attempts:
    def __init__(
        self, router: Router, budget: RetryBudget, clock: Clock, story: RequestTrace
    ) -> None:
        self._router = router
        self._budget = budget
        self._clock = clock
        self._story = story
        self._until_s = clock.now() + PATIENCE_S
        self._failed_at: set[NodeId] = set()
        self._full: set[NodeId] = set()
        self._rest_s = 0.0

    @property
    def avoid(self) -> frozenset[NodeId]:
        return frozenset(self._failed_at | self._full)

    def patience_s(self) -> float:
        return max(0.0, self._until_s - self._clock.now())

    def failed(self, failure: Failed, booking: Booking) -> None:
        """Raises `RequestError` when that was the last attempt."""
        self._story.failures.append(str(failure))
        if not self._budget.take(self._story.attempts):
            raise RequestError(
                503,
                "upstream_failed",
                f"tried {self._story.attempts} times: {failure}",
                retry_after_s=RETRY_S,
            ) from None
        self._failed_at.update(failure.avoid)
        if failure.prefill and booking.route.offloaded:
            self._failed_at.update(self._router.remote_nodes())

    def put_off(self, later: Later) -> None:
        """Nothing was computed, so this costs no retry: another decode node, or a rest."""
        self._story.attempts -= 1
        self._full.add(later.node)
        if self._router.decodes_elsewhere(self._full):
            return
        self._full.clear()
        self._rest_s = later.retry_after_s
        if self._rest_s > self.patience_s():
            raise RequestError(503, "overloaded", str(later), retry_after_s=self._rest_s) from None

    async def rest(self) -> None:
        if self._rest_s:
            await asyncio.sleep(self._rest_s)
            self._rest_s = 0.0
