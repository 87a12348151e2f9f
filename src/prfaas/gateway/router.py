"""Decides where requests go: calls `route`, `adjust` and `explain` of the scheduler.

A decision is synchronous, so that it sees one consistent state of the fleet; only `place` waits,
when the scheduler holds a request. The fleet, the requests' outcomes and the polls belong to
other parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from prfaas.cache.hashing import PromptHashes
from prfaas.cache.index import NodeMatch
from prfaas.clock import Clock
from prfaas.config.deployment import SchedulerSection
from prfaas.config.gateway import DEFAULTS, GatewaySection
from prfaas.errors import RequestError
from prfaas.gateway.fair_holds import FairHolds
from prfaas.gateway.fleet.booking import Booking
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.homes.decisions import Decisions
from prfaas.gateway.homes.fair_access import FairAccess
from prfaas.gateway.homes.home_turns import HomeTurns
from prfaas.gateway.placement import PlacementRequest, home_of, tenant_of
from prfaas.gateway.short_term_log import ShortTermLog
from prfaas.gateway.tenants import Tenants
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.homes.fair_shares import time_to_drain_s
from prfaas.scheduler.options import estimated_bps
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request
from prfaas.scheduler.sets import Choice
from prfaas.scheduler.short_term import has_room_at
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import LinkId
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.types import ClusterId, NodeId

_UNPLANNED = Hold("no node decodes yet", None, 0.0, 0.0)


class Router:
    def __init__(
        self,
        fleet: Fleet,
        rules: SchedulerSection,
        clock: Clock,
        limits: GatewaySection = DEFAULTS,
        tenants: Tenants | None = None,
    ) -> None:
        self.tenants = tenants or Tenants(limits)
        self.rules = rules
        self.short_term_log = ShortTermLog()
        self.waiting_room: WaitingRoom[PlacementRequest] = WaitingRoom(self._weight)
        self._decisions = Decisions(fleet, rules, self.waiting_room, clock)
        self._fair_holds = FairHolds(fleet, self.tenants, self.waiting_room, clock)
        self._fleet = fleet
        self._clock = clock
        self._limits = limits
        self._shares: FairAccess | None = None
        self._serving_homes = fleet.homes
        # Set by a console: whether the route of the next request is to be explained.
        self.wants_explanation: Callable[[], bool] | None = None
        # Why no request of a PD cluster can be served now; empty where one can be.
        self.why_unserved: Callable[[ClusterId], str] = lambda home: ""
        fleet.call_on_change(self.retry_waiting)

    @property
    def plans(self) -> Mapping[ClusterId, Plan]:
        """The plans in force, by PD cluster. A PD cluster has none until a node can decode."""
        return self._decisions.plans

    @property
    def states(self) -> Mapping[ClusterId, ShortTermState]:
        """The state of the short-term loop, by PD cluster."""
        return self._decisions.states

    def follow(self, plans: Mapping[ClusterId, Plan]) -> None:
        """Decisions from now on follow these plans. Other PD clusters keep theirs."""
        self._decisions.plans = {**self.plans, **plans}
        if self._shares is not None:
            self._shares.follow(self.plans)

    @property
    def serving_homes(self) -> list[ClusterId]:
        """The PD clusters that may decode the requests of this gateway."""
        return self._serving_homes

    def serve_several(
        self,
        shares: FairAccess,
        round_trips: Mapping[LinkId, float],
        own: ClusterId | None = None,
    ) -> None:
        """There are several PD clusters. `shares` divides the PrfaaS clusters between them;
        `round_trips` are those between PD clusters that may decode for one another. `own`: the PD
        cluster whose requests this gateway receives; None: those of all."""
        if own is not None:
            others = [other for home, other in round_trips if home == own]
            self._serving_homes = [own, *(others if self.rules.decode_elsewhere else ())]
        self._shares = shares
        self.waiting_room.share = shares.weight
        self.waiting_room.is_blocked = self._is_blocked
        self._decisions.round_trips = round_trips

    async def place(self, placement: PlacementRequest, patience_s: float) -> Booking:
        """Books nodes for the request now, or as soon as there is room. Raises `RequestError`."""
        hold = self.try_dispatch(placement)
        if hold is not None:
            await self._wait(placement, hold, patience_s)
        assert placement.booking is not None
        return placement.booking

    async def _wait(self, placement: PlacementRequest, hold: Hold, patience_s: float) -> None:
        self.tenants.waiting.take(placement.tenant)
        self._record_wait(placement, hold)
        self.waiting_room.put(placement, hold, placement.queue)
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
                message = f"no node could take the request within {patience_s:.0f} s: "
                message += placement.waits[-1].reason
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
        now = self._clock.now()
        request, manager = placement.request, self._fleet.manager
        match = manager.match(placement.prompt)
        cached = self._fleet.prefixes.by_node(match)
        fair = self.tenants.several or len(self._fleet.homes) > 1
        choice = self._decisions.choose(placement, cached, fair=fair)
        if choice is None:
            return _UNPLANNED._replace(precedence=request.arrived_s)
        found = choice.taken
        if isinstance(found, Hold):
            return found
        state = self.states[found.decode_cluster]
        hold = self._fair_holds.find(placement, found, state)
        if hold is None and self._shares is not None and found.offloaded:
            link_id = (found.cluster, found.decode_cluster)
            drain_s = time_to_drain_s(link_id, choice.view.links[link_id], state)
            hold = self._shares.find_hold(placement, found, now, drain_s)
        if hold is not None:
            return hold
        manager.observe(placement.prompt, match, now)
        if match.nodes:
            placement.stateless_tokens = match.lost_tokens
        if found.offloaded:
            link_id = (found.cluster, found.decode_cluster)
            bps = estimated_bps(link_id, choice.view.links[link_id], state)
            placement.transfer_s = found.nbytes * 8 / bps
        wants = self.wants_explanation
        if wants is not None and (placement.explains or wants()):
            taken = choice._replace(taken=found)
            # A console must not fail a request.
            self._fleet.failures.contain(
                "console", partial(self._record_explanation, placement, taken, cached)
            )
        placement.booking = self._fleet.book(
            found,
            request.prompt_tokens,
            self._retry_if_waiting,
            streams=placement.streams,
            sequences=placement.sequences,
            tenant=placement.tenant,
        )
        weight = 1.0
        if self._shares is not None and found.offloaded:
            weight = self._shares.record(placement, found, now)
        self.waiting_room.record_dispatch(found.cluster, found.prefill_s / weight, placement.queue)
        return None

    def _record_explanation(
        self, placement: PlacementRequest, choice: Choice, cached: Mapping[NodeId, NodeMatch]
    ) -> None:
        placement.explanation = self._decisions.explain_choice(choice, placement.request, cached)

    def close(self, booking: Booking) -> None:
        """The attempt is over. What it held is free for the requests that wait."""
        booking.close(self._clock.now())
        if self.tenants.several:
            self._retry_if_waiting()

    def begins_soon(self, booking: Booking) -> bool:
        """Whether the prefill node has no more work before the request than a queue may have."""
        route = booking.route
        before_s = self._fleet.board.node(route.prefill).free_at_s - route.prefill_s
        return before_s - self._clock.now() <= self.rules.adaptive.queue_s

    def choose_home(self, prompt: PromptHashes, turns: HomeTurns, *, take: bool) -> ClusterId:
        """The home of a request that names none. `take`: the request goes there."""
        cached: dict[ClusterId, int] = {}
        for node, held in self._fleet.prefixes.by_node(self._fleet.manager.match(prompt)).items():
            member = self._fleet.members.named(node)
            if member is not None:
                cached[member.cluster] = max(cached.get(member.cluster, 0), held.tokens)
        serving = [h for h in self.plans if self._fleet.has_free_decode_node(h, ())]
        chosen = turns.choose(cached, serving)
        if take:
            turns.take(chosen, serving)
        return chosen

    def _has_room(self, cluster: ClusterId) -> bool:
        """Whether the requests held for a cluster are worth a retry: every placed request has
        changed the queues."""
        now_s = self._clock.now()
        if has_room_at(self._fleet.board.cluster(cluster), now_s, self.rules):
            if not self.tenants.several:
                return True
            homes = [cluster] if cluster in self.states else self._fleet.homes
            tenants = {tenant_of(queue) for queue in self.waiting_room.tenants(cluster)}
            return any(self._fair_holds.has_slot(h, tenant) for h in homes for tenant in tenants)
        return cluster in self.states and self._decisions.has_room_in_a_set(cluster)

    def _is_blocked(self, cluster: ClusterId, queue: str, work_s: float) -> bool:
        """Whether a request that waits for the cluster waits for the link from there."""
        home = home_of(queue)
        state = self.states.get(home)
        if state is None or self._shares is None:
            return False
        return self._shares.waits_for_link(cluster, home, work_s, state, self._clock.now())

    def explain(
        self, request: Request, prompt: PromptHashes, home: ClusterId
    ) -> Explanation | None:
        """Where the request would go now. None while no plan serves its home. Books nothing."""
        cached = self._fleet.prefixes.by_node(self._fleet.manager.match(prompt))
        return self._decisions.explain(PlacementRequest(request, prompt, home=home), cached)

    def adjust(self) -> None:
        """One step of the short-term loop: adjusts to the fleet's latest reports."""
        self._decisions.adjust()
        self.short_term_log.record(self.states)
        self._retry_if_waiting()

    def _retry_if_waiting(self) -> None:
        if self.waiting_room:
            self.retry_waiting()

    def _weight(self, queue: str) -> float:
        return self.tenants.weight(tenant_of(queue))

    def _try_again(self, placement: PlacementRequest) -> Hold | None:
        hold = self.try_dispatch(placement)
        if hold is not None and hold.cluster != placement.waits_for:
            self._record_wait(placement, hold)
        return hold

    def _record_wait(self, placement: PlacementRequest, hold: Hold) -> None:
        reason = hold.reason
        if hold.cluster is None:
            reason = self.why_unserved(placement.home) or reason
        placement.record_wait(hold.cluster, reason, self._clock.now())
