"""The decision for one request: at its home, or in another PD cluster where its home cannot serve.

Combines the scheduler's parts (`route`, sets of KV formats) with the fleet's present state. Books
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prfaas.cache.index import NodeMatch
from prfaas.clock import Clock
from prfaas.config.deployment import SchedulerSection
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.placement import PlacementRequest
from prfaas.scheduler.explain import Explanation, explain
from prfaas.scheduler.homes.elsewhere import HomeContext, route_elsewhere, route_from
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request
from prfaas.scheduler.sets import Choice, only_nodes, route_in_sets
from prfaas.scheduler.short_term import adjust, has_room_at, route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import LinkId, View, exclude_nodes
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.types import ClusterId, NodeId


class Decisions:
    def __init__(
        self,
        fleet: Fleet,
        rules: SchedulerSection,
        waiting_room: WaitingRoom[PlacementRequest],
        clock: Clock,
    ) -> None:
        self.plans: Mapping[ClusterId, Plan] = {}  # in force, by PD cluster
        self.states = {home: ShortTermState(rules) for home in fleet.homes}
        # Between PD clusters that may decode for one another.
        self.round_trips: Mapping[LinkId, float] = {}
        self._fleet = fleet
        self._waiting_room = waiting_room
        self._clock = clock

    def choose(
        self,
        placement: PlacementRequest,
        cached: Mapping[NodeId, NodeMatch],
        *,
        fair: bool,
    ) -> Choice | None:
        """`fair`: the work that waits before the request is what its own queue has before it, and
        not all that waits. None while neither the request's home nor another PD cluster that may
        decode for it has a plan."""

        def decide(request: Request, view: View, plan: Plan, state: ShortTermState) -> Choice:
            return self._decide(request, view, plan, state, placement.avoid)

        queue = placement.queue if fair else None

        def others() -> Iterator[HomeContext]:
            for other in self.plans:
                round_trip_s = self.round_trips.get((placement.home, other))
                if round_trip_s is not None:
                    context = self._context(other, cached, queue)
                    yield context._replace(round_trip_s=round_trip_s)

        if placement.home not in self.plans:
            return route_elsewhere(placement.request, others(), decide)
        home = self._context(placement.home, cached, queue)
        if len(self._fleet.homes) == 1:
            return decide(placement.request, home.view, home.plan, home.state)
        return route_from(placement.request, home, others, decide)

    def explain(
        self, placement: PlacementRequest, cached: Mapping[NodeId, NodeMatch]
    ) -> Explanation | None:
        choice = self.choose(placement, cached, fair=False)
        return None if choice is None else self.explain_choice(choice, placement.request, cached)

    def explain_choice(
        self, choice: Choice, request: Request, cached: Mapping[NodeId, NodeMatch]
    ) -> Explanation:
        """Explains a decision, before the board changes."""
        decided = choice.view.local.cluster
        views = self._by_set(self.view(decided, cached))
        return explain(choice, views, request, self.plans[decided], self.states[decided])

    def adjust(self) -> None:
        """Adjusts the state of every PD cluster to the fleet's latest reports."""
        now_s = self._clock.now()
        for home, state in self.states.items():
            self.states[home] = adjust(state, self.view(home, {}), now_s)

    def has_room_in_a_set(self, home: ClusterId) -> bool:
        """Whether the requests that wait for a PD cluster are worth a retry, because a set of its
        nodes has room. A set may lack prefill nodes, and then its decode nodes serve alone."""
        if len(self._fleet.sets) < 2:
            return False
        now_s, rules = self._clock.now(), self.states[home].rules
        views = self._by_set(self.view(home, {}))
        return any(has_room_at(view.local, now_s, rules) for view in views)

    def view(
        self, home: ClusterId, cached: Mapping[NodeId, NodeMatch], queue: str | None = None
    ) -> View:
        """`queue`: the waiting work is what is before the requests of this queue."""
        room = self._waiting_room
        held = room.work if queue is None else room.work_before(queue)
        return self._fleet.board.view(self._clock.now(), cached, held, home)

    def _context(
        self, home: ClusterId, cached: Mapping[NodeId, NodeMatch], queue: str | None
    ) -> HomeContext:
        return HomeContext(self.view(home, cached, queue), self.plans[home], self.states[home])

    def _decide(
        self,
        request: Request,
        view: View,
        plan: Plan,
        state: ShortTermState,
        avoid: Collection[NodeId],
    ) -> Choice:
        """The decision for one PD cluster, or of each set where the nodes in use have several KV
        formats."""
        decide = self._decide_in_sets if len(self._fleet.sets) > 1 else self._decide_in_all
        choice = decide(request, exclude_nodes(view, avoid), plan, state)
        if isinstance(choice.taken, Hold) and choice.taken.cluster is None and avoid:
            # Avoiding a node is a preference: nodes that do not answer are not usable anyway.
            choice = decide(request, view, plan, state)
        return choice

    def _decide_in_all(
        self, request: Request, view: View, plan: Plan, state: ShortTermState
    ) -> Choice:
        return Choice(route(request, view, plan, state), view)

    def _decide_in_sets(
        self, request: Request, view: View, plan: Plan, state: ShortTermState
    ) -> Choice:
        return route_in_sets(request, self._by_set(view), plan, state)

    def _by_set(self, view: View) -> list[View]:
        sets = self._fleet.sets
        return [view] if len(sets) < 2 else [only_nodes(view, nodes) for nodes in sets]
