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

A request may also be what its nodes die of. An engine that is lost *alone*, while the kvd of its
host goes on answering, may have been lost because of the request; one that is lost with its host,
its site or its link was not. A request that has lost two engines alone is refused, and so is the
same request for a while (`kept_out`). One whose fields two engines did not check in time is refused
as well, but may come again: other requests may have kept them busy.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field

from prfaas.clock import Clock
from prfaas.config.gateway import DEFAULTS
from prfaas.errors import RequestError
from prfaas.gateway.dispatch.handoff import AttemptFailed, DecodeNodeFull
from prfaas.gateway.dispatch.kept_out import KEPT_OUT_S, KeptOut, digest_of, hashed_bytes
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.supervision import one_line
from prfaas.types import NodeId

_LOG = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0  # sent to a client whose request has failed too often
LOSSES_S = 0.5  # in which all processes of a cluster die
MOST_LOST_ALONE = 2  # engines of one request, or late checks of its fields
_KVD_POLLS = 1.5  # after which a kvd that lives has been heard
_LOOK_S = 0.05  # how often it is looked up whether it has
_HASHED_AT_ONCE_BYTES = 1 << 20  # hashing more would block the event loop: a thread does it


@dataclass(slots=True)
class RetryBudget:
    """The retries that all requests together may make. Of several tenants, which a gateway names by
    tags, one may take half of what is saved up, and what its own requests add: its requests cannot
    take the retries of others. Pure."""

    per_request: float = 0.2
    limit: float = 20.0  # the most that a quiet time saves up, and the amount at the start
    left: float = 20.0
    spent: int = 0
    denied: int = 0
    refused_grants: int = 0  # after which a request tries again without taking a retry
    nodes_lost: int = 0  # requests that were refused because they have cost two nodes
    max_attempts: int = DEFAULTS.max_attempts  # of one request, including the first
    # Of the tenants that have taken a part of their half.
    _left_each: dict[str, float] = field(default_factory=dict)

    def add_request(self, tenant: str = "") -> None:
        self.left = min(self.limit, self.left + self.per_request)
        if tenant in self._left_each:
            self._set_left(tenant, self._left_each[tenant] + self.per_request)

    def take(self, attempts: int, *, tenant: str = "", known_fault: bool = False) -> bool:
        """Whether a request that has made `attempts` attempts may make one more. `known_fault`: the
        latest has ended with others, because a node fell silent or died."""
        mine = self._left_each.get(tenant, self.limit / 2) if tenant else self.left
        if attempts >= self.max_attempts or (min(self.left, mine) < 1 and not known_fault):
            self.denied += 1
            return False
        if not known_fault:
            self.left -= 1
            if tenant:
                self._set_left(tenant, mine - 1)
        self.spent += 1
        return True

    def _set_left(self, tenant: str, left: float) -> None:
        if left < self.limit / 2:
            self._left_each[tenant] = left
        else:
            self._left_each.pop(tenant, None)


@dataclass(frozen=True, slots=True)
class _Loss:
    """An engine that was lost while it had the request."""

    node: NodeId
    member: Member
    instance: str | None  # of its kvd then
    lost_s: float

    def was_alone(self) -> bool:
        """Whether its kvd has gone on answering. A host that is lost loses both within a moment,
        and one that comes back has another kvd."""
        is_same = self.member.instance == self.instance
        return is_same and self.member.kvd_seen_s > self.lost_s + LOSSES_S

    def is_undecided(self, now_s: float) -> bool:
        waited_s = LOSSES_S + _KVD_POLLS * self.member.timeouts.kvd_poll_s
        is_same = self.member.instance == self.instance
        return is_same and not self.was_alone() and now_s < self.lost_s + waited_s


class Attempts:
    """The attempts of one request so far."""

    def __init__(
        self,
        request: GatewayRequest,
        fleet: Fleet,
        budget: RetryBudget,
        kept_out: KeptOut,
        clock: Clock,
        trace: RequestTrace,
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._budget = budget
        self._kept_out = kept_out
        self._clock = clock
        self._trace = trace
        self._until_s = clock.now() + fleet.timeouts.queue_s
        self._failed_at: set[NodeId] = set()
        self._full: set[NodeId] = set()
        self.backoff_s = 0.0  # before the next attempt
        self._broken = 0  # connections to nodes
        self._late = 0  # checks of its fields
        self._losses: list[_Loss] = []
        self._undecided: AttemptFailed | None = None  # `back_off` decides on the next attempt

    @property
    def avoid(self) -> frozenset[NodeId]:
        return frozenset(self._failed_at | self._full)

    def time_left_s(self) -> float:
        return max(0.0, self._until_s - self._clock.now())

    async def begin(self) -> None:
        """Raises `RequestError` when the same request has cost two nodes a while ago."""
        if len(self._kept_out):  # hardly ever: otherwise no request is hashed for it
            left_s = self._kept_out.left_s(await self._digest())
            if left_s:
                raise self._refusal("the same request has cost two nodes", left_s)

    def record_failure(self, failure: AttemptFailed, booking: Booking) -> None:
        """Raises `RequestError` when the request may not be retried; so may `back_off`, which must
        follow. An attempt does not count when a node has left on purpose, or when no node has
        computed anything."""
        self._trace.failures.append(str(failure))
        left = self._has_left_on_purpose(failure)
        # Neither is a fault whose retries have to be limited: a rolling upgrade refuses many
        # requests. It is bounded nevertheless, once for each node.
        is_free = (left or failure.unsent) and not self._failed_at.issuperset(failure.avoid)
        # A decode node that has refused to serve it alone has computed nothing, and does so once.
        is_free = is_free or failure.no_alone or failure.again
        self._late += failure.late
        if is_free:
            self._trace.attempts -= 1
        elif failure.late and self._late >= MOST_LOST_ALONE:
            raise RequestError(
                503, "overloaded", str(failure), retry_after_s=RETRY_AFTER_S
            ) from None
        elif self._record_loss(failure) and len(self._losses) >= MOST_LOST_ALONE:
            self._undecided = failure
        else:
            self._take_retry(failure, known_fault=_is_known(failure))
        self._failed_at.update(failure.avoid)
        if failure.prefill and booking.route.offloaded and not left:
            self._failed_at.update(self._fleet.members.remote_nodes())
        if failure.lost is not None and not failure.unsent:
            self._broken += 1
            if self._broken > 1:
                self.backoff_s = min(LOSSES_S, self.time_left_s())

    def _take_retry(self, failure: AttemptFailed, *, known_fault: bool) -> None:
        tenant = self._request.tenant_tag
        if not self._budget.take(self._trace.attempts, tenant=tenant, known_fault=known_fault):
            raise RequestError(
                503,
                "upstream_failed",
                f"failed after {self._trace.attempts} attempts: {failure}",
                retry_after_s=RETRY_AFTER_S,
            ) from None

    def _record_loss(self, failure: AttemptFailed) -> bool:
        """Whether the attempt has ended with the loss of an engine that had the request."""
        member = None if failure.engine is None else self._fleet.members.named(failure.engine)
        if member is None or failure.engine is None:
            return False
        lost_s = now_s = self._clock.now()
        if failure.silent:
            # It was lost when it was asked in vain. A site that was stopped may go on at any time,
            # so what counts is that the kvd has answered in between.
            lost_s -= member.engine.silence_s(now_s)
            if member.kvd_seen_s <= lost_s + LOSSES_S:
                return False
        self._losses.append(_Loss(failure.engine, member, member.instance, lost_s))
        return True

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
        """Waits before the next attempt. Raises `RequestError` when there is to be none, because
        the request has lost two engines alone."""
        if self._undecided is not None:
            begun_s = self._clock.now()
            await self._decide(self._undecided)
            self._undecided = None
            self.backoff_s -= self._clock.now() - begun_s
        if self.backoff_s > 0:
            await asyncio.sleep(self.backoff_s)
        self.backoff_s = 0.0
        if self._losses:
            await self.begin()  # the same request, sent again beside this one, may be kept out now

    async def _decide(self, failure: AttemptFailed) -> None:
        """On the next attempt after the loss of a second engine, or of one more."""
        while True:
            alone = [loss.node for loss in self._losses if loss.was_alone()]
            now_s = self._clock.now()
            undecided = sum(loss.is_undecided(now_s) for loss in self._losses)
            if not len(alone) < MOST_LOST_ALONE <= len(alone) + undecided or not self.time_left_s():
                break
            await asyncio.sleep(_LOOK_S)
        if len(alone) >= MOST_LOST_ALONE:
            self._kept_out.add(await self._digest())
            cost = f"{' and '.join(alone)} were lost while they had the request ({failure})"
            _LOG.warning("request %s is kept out: %s", self._request.id, one_line(cost))
            raise self._refusal(cost, KEPT_OUT_S)
        # The first retry after a loss is free, so that no request is lost with its node. A request
        # that has lost one alone is suspected.
        self._take_retry(failure, known_fault=_is_known(failure) and not alone)

    def _refusal(self, why: str, left_s: float) -> RequestError:
        self._budget.nodes_lost += 1
        return RequestError(
            503,
            "nodes_lost",
            f"{why}; this request is refused for {math.ceil(left_s)} s",
            retry_after_s=left_s,
        )

    async def _digest(self) -> bytes:
        if hashed_bytes(self._request) <= _HASHED_AT_ONCE_BYTES:
            return digest_of(self._request)
        return await asyncio.to_thread(digest_of, self._request)


def _is_known(failure: AttemptFailed) -> bool:
    """Whether other requests have failed of the same fault before, or do so now."""
    return failure.silent or (failure.lost is not None and failure.lost.known)
