"""Decides where requests go: calls `route`, `adjust` and `explain` of the scheduler.

A decision is synchronous, so that it sees one consistent state of the fleet; only `place` waits,
when the scheduler holds a request. The fleet, the requests' outcomes and the polls belong to
other parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from prfaas.cache.hashing import PromptHashes
from prfaas.cache.index import NodeMatch
from prfaas.clock import Clock
from prfaas.config.deployment import SchedulerSection
from prfaas.config.gateway import DEFAULTS, GatewaySection
from prfaas.errors import RequestError
from prfaas.gateway.decision_log import DecisionLog
from prfaas.gateway.fair_holds import FairHolds
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.placement import PlacementRequest
from prfaas.gateway.short_term_log import ShortTermLog
from prfaas.gateway.tenants import Tenants
from prfaas.scheduler.explain import Explanation, explain, explain_in_sets
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, is_offloadable, local_only_reason
from prfaas.scheduler.sets import (
    Choice,
    has_room_alone,
    only_nodes,
    route_in_sets,
    serve_alone,
)
from prfaas.scheduler.short_term import adjust, has_room, route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import View, exclude_nodes
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.types import ClusterId, NodeId

_UNPLANNED = Hold("no node decodes yet", None, 0.0, 0.0)


class Router:
    def __init__(
        self,
        fleet: Fleet,
        rules: SchedulerSection,
        clock: Clock,
        decision_log: DecisionLog | None = None,
        limits: GatewaySection = DEFAULTS,
        tenants: Tenants | None = None,
    ) -> None:
        self.tenants = tenants or Tenants(limits)
        self.state = ShortTermState(rules)
        self.short_term_log = ShortTermLog()
        self.waiting_room: WaitingRoom[PlacementRequest] = WaitingRoom(self.tenants.weight)
        self._fair_holds = FairHolds(fleet, self.tenants, self.waiting_room, clock)
        self._fleet = fleet
        self._clock = clock
        self._decision_log = decision_log
        self._limits = limits
        self._plan: Plan | None = None
        fleet.call_on_change(self.retry_waiting)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None until a node can decode."""
        return self._plan

    def follow(self, plan: Plan) -> None:
        """Decisions from now on follow this plan."""
        self._plan = plan

    async def place(self, placement: PlacementRequest, patience_s: float) -> Booking:
        """Books nodes for the request now, or as soon as there is room. Raises `RequestError`."""
        hold = self.try_dispatch(placement)
        if hold is not None:
            await self._wait(placement, hold, patience_s)
        assert placement.booking is not None
        return placement.booking

    async def _wait(self, placement: PlacementRequest, hold: Hold, patience_s: float) -> None:
        self.tenants.waiting.take(placement.tenant)
        placement.waits_for = hold.cluster
        self.waiting_room.put(placement, hold, placement.tenant)
        try:
            if hold.cluster is not None and self._has_room(hold.cluster):
                # The request waits because others are before it: the free node is theirs now.
                self.retry_waiting()
            async with asyncio.timeout(patience_s):
                await placement.placed.wait()
        except BaseException as error:
            # The request may have been placed in the very moment in which it was cancelled.
            if not self.waiting_room.remove(placement) and placement.booking is not None:
                placement.booking.close(self._clock.now())
            if isinstance(error, TimeoutError):
                message = f"no node could take the request within {patience_s:.0f} s: {hold.reason}"
                retry_after_s = self._limits.timeouts.queue_retry_after_s
                raise RequestError(
                    503, "overloaded", message, retry_after_s=retry_after_s
                ) from None
            raise
        finally:
            self.tenants.waiting.release(placement.tenant)

    def retry_waiting(self) -> None:
        """Tries the waiting requests, as far as there is room."""
        self.waiting_room.retry(
            self._try_again,
            self._has_room,
            lambda placement: placement.placed.set(),
        )

    def try_dispatch(self, placement: PlacementRequest) -> Hold | None:
        """Routes the request and books its nodes. Returns the hold when the request has to wait;
        then nothing is booked."""
        if self._plan is None:
            return _UNPLANNED._replace(precedence=placement.request.arrived_s)
        now = self._clock.now()
        request, manager = placement.request, self._fleet.manager
        match = manager.match(placement.prompt)
        view = self._view(self._fleet.prefixes.by_node(match), placement.tenant)
        choice = self._choose(placement, view, self._plan)
        found = choice.taken
        if self._decision_log is not None:
            self._decision_log.write(request, choice, self._plan, self.state)
        if isinstance(found, Hold):
            return found
        stays = local_only_reason(request)
        if request.prompt_tokens == 1 or stays:
            # Nothing to hand off, or nothing that may be: the decode node prefills, too.
            found = found._replace(
                reason=stays or found.reason,
                cluster=self._fleet.local,
                prefill=found.decode,
                offloaded=False,
                transfer_tokens=0,
                nbytes=0,
                copies=(),
            )
        one_node = choice.alone or found.is_remainder
        hold = self._fair_holds.find(placement, found, self.state, alone=one_node)
        if hold is not None:
            return hold
        manager.observe(placement.prompt, match, now)
        on_prefill_end = partial(self._on_prefill_end, found.prefill)
        placement.booking = self._fleet.book(found, request.prompt_tokens, on_prefill_end)
        self.waiting_room.record_dispatch(found.cluster, found.prefill_s, placement.tenant)
        return None

    def close(self, booking: Booking) -> None:
        """The attempt is over. What it held is free for the requests that wait."""
        booking.close(self._clock.now())
        if self.tenants.several:
            self._retry_if_waiting()

    def _choose(self, placement: PlacementRequest, view: View, plan: Plan) -> Choice:
        """The decision of the scheduler, or of each set where the nodes in use have several KV
        formats."""
        request, avoid = placement.request, placement.avoid
        decide = self._choose_in_sets if len(self._fleet.sets) > 1 else self._choose_in_all
        choice = decide(request, exclude_nodes(view, avoid), plan)
        if isinstance(choice.taken, Hold) and choice.taken.cluster is None and avoid:
            # Avoiding a node is a preference: nodes that do not answer are not usable anyway.
            choice = decide(request, view, plan)
        return choice

    def _choose_in_all(self, request: Request, view: View, plan: Plan) -> Choice:
        found = route(request, view, plan, self.state)
        if (
            isinstance(found, Hold)
            and found.cluster is None
            and (self._is_restarting() or not is_offloadable(request))
        ):
            # The restart of the only prefill or the only decode node is no reason to wait for it.
            # Neither is a PD cluster without a prefill node, for what no other one may prefill.
            alone = serve_alone(request, view, self.state)
            if alone is not None:
                return Choice(alone, view, True)
        return Choice(found, view, False)

    def _choose_in_sets(self, request: Request, view: View, plan: Plan) -> Choice:
        return route_in_sets(request, self._by_set(view), plan, self.state)

    def _by_set(self, view: View) -> list[View]:
        sets = self._fleet.sets
        return [view] if len(sets) < 2 else [only_nodes(view, nodes) for nodes in sets]

    def _has_room(self, cluster: ClusterId) -> bool:
        """Whether the requests held for a cluster are worth a retry. The view is a new one for each
        check: every placed request has changed the queues."""
        view = self._view({})
        if has_room(cluster, view, self.state):
            return not self.tenants.several or self._fair_holds.can_decode(self.state)
        if cluster != self._fleet.local or not (len(self._fleet.sets) > 1 or self._is_restarting()):
            return False
        return any(has_room_alone(part, self.state) for part in self._by_set(view))

    def _is_restarting(self) -> bool:
        return self._fleet.members.is_restarting(self._clock.now())

    def explain(self, request: Request, prompt: PromptHashes) -> Explanation | None:
        """Where the request would go now. None while there is no plan. Books nothing."""
        if self._plan is None:
            return None
        match = self._fleet.manager.match(prompt)
        view = self._view(self._fleet.prefixes.by_node(match))
        if len(self._fleet.sets) < 2:
            return explain(request, view, self._plan, self.state)
        return explain_in_sets(request, self._by_set(view), self._plan, self.state)

    def adjust(self) -> None:
        """One step of the short-term loop: adjusts to the fleet's latest reports."""
        self.state = adjust(self.state, self._view({}), self._clock.now())
        self.short_term_log.record(self.state)
        self._retry_if_waiting()

    def _retry_if_waiting(self) -> None:
        if self.waiting_room:
            self.retry_waiting()

    def _view(self, cached: Mapping[NodeId, NodeMatch], tenant: str | None = None) -> View:
        """`tenant`: the waiting work is what this tenant has before it."""
        room = self.waiting_room
        fair = tenant is not None and self.tenants.several
        held = room.work_before(tenant) if fair and tenant is not None else room.work
        return self._fleet.board.view(self._clock.now(), cached, held)

    def _on_prefill_end(self, node: NodeId) -> None:
        if self.tenants.several and node in self._fleet.board:
            member = self._fleet.members.named(node)
            if member is not None and not self._fleet.prefills_at(member):
                # The node has done all that this gateway sent. If its prefills took less time than
                # predicted, it would seem busy until its next report, and requests would wait.
                self._fleet.board.forget_work(node)
        self._retry_if_waiting()

    def _try_again(self, placement: PlacementRequest) -> Hold | None:
        hold = self.try_dispatch(placement)
        if hold is not None:
            placement.waits_for = hold.cluster
        return hold
