"""The PD clusters of a run: their plans, their short-term state, and the routes from them.

It holds what the gateway's router holds in a live deployment. With one PD cluster it adds nothing
to `scheduler.short_term.route`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prfaas.planner.network.problem import NetworkProblem
from prfaas.scheduler.board import Board
from prfaas.scheduler.explain import Explanation, explain
from prfaas.scheduler.homes.elsewhere import HomeContext, route_from
from prfaas.scheduler.homes.fair_shares import (
    SharedCluster,
    ShareUses,
    planned_together,
    share_hold,
    time_to_drain_s,
    waits_for_link,
    weights_by_cluster,
)
from prfaas.scheduler.homes.plans import first_plans, home_name
from prfaas.scheduler.lookup.prefixes import NOTHING_CACHED, CachedPrefixes
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.sets import Choice
from prfaas.scheduler.short_term import adjust, has_room_at, route
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import LinkId
from prfaas.scheduler.waiting import HeldWork, Hold, WaitingRoom
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import PlanChange
from prfaas.types import ClusterId, NodeId


class SimHomes:
    def __init__(
        self,
        network: NetworkProblem,
        nodes: Mapping[ClusterId, Sequence[NodeId]],
        config: SimConfig,
    ) -> None:
        """`nodes`: of every PD cluster."""
        self.names = [home_name(home) for home in network.homes]
        self._rules = config.scheduler
        self.plans = first_plans(network, nodes, self._rules.replan, self._rules.policy)
        self.changes = [PlanChange(0.0, plan) for plan in self.plans.values()]
        self._states = {name: ShortTermState(self._rules) for name in self.names}
        self._round_trips = {
            name: [
                (other, config.round_trips[name, other])
                for other in self.names
                if (name, other) in config.round_trips
            ]
            for name in self.names
        }
        self._prfaas = [ClusterId(name) for name in network.prfaas_pools]
        self._uses = ShareUses()
        self._weigh()

    def _weigh(self) -> None:
        """With one PD cluster, no weight is needed."""
        shared = self._prfaas if len(self.names) > 1 else []
        self._weights = weights_by_cluster(planned_together(self.plans), shared)

    def weight(self, cluster: ClusterId, home: str) -> float:
        """The weight of a home at a cluster. Equal ones at clusters that no plan shares."""
        weights = self._weights.get(cluster)
        return 1.0 if weights is None else weights[ClusterId(home)]

    def route(
        self,
        request: Request,
        home: ClusterId,
        board: Board,
        cached: CachedPrefixes,
        room: WaitingRoom[int],
        now_s: float,
    ) -> Route | Hold:
        """The tenants of the waiting room are the homes."""
        plan, state = self.plans[home], self._states[home]
        if len(self.names) == 1:
            return route(request, board.view(now_s, cached, room.work, home), plan, state)
        held = room.work_before(home)
        view = board.view(now_s, cached, held, home)

        def others() -> Iterator[HomeContext]:
            for other, round_trip_s in self._round_trips[home]:
                there = board.view(now_s, cached, held, other)
                yield HomeContext(there, self.plans[other], self._states[other], round_trip_s)

        choice = route_from(request, HomeContext(view, plan, state), others)
        found = choice.taken
        if isinstance(found, Hold) or found.cluster not in self._weights:
            return found
        cluster = found.cluster
        link_id = (cluster, found.decode_cluster)
        hold = share_hold(
            found,
            request,
            home,
            self._shared(cluster, now_s, [ClusterId(name) for name in room.wanting(cluster)]),
            board.node(found.prefill),
            now_s,
            # The simulator's nodes take as long as their profiles state.
            stated_s=found.prefill_s,
            queue_s=self._rules.adaptive.queue_s,
            drain_s=time_to_drain_s(
                link_id, choice.view.links[link_id], self._states[found.decode_cluster]
            ),
        )
        return found if hold is None else hold

    def explain(
        self,
        request: Request,
        home: ClusterId,
        board: Board,
        cached: CachedPrefixes,
        room: WaitingRoom[int],
        now_s: float,
        taken: Route,
    ) -> Explanation:
        """What the home compared when it chose the route: before the board has the dispatch."""
        held = room.work if len(self.names) == 1 else room.work_before(home)
        view = board.view(now_s, cached, held, home)
        choice = Choice(taken, view)
        return explain(choice, [view], request, self.plans[home], self._states[home])

    def record_dispatch(
        self, taken: Route, home: ClusterId, room: WaitingRoom[int], now_s: float
    ) -> None:
        """Counts a dispatch towards the share of its home."""
        if len(self.names) == 1 or taken.alone:
            return
        weight = 1.0
        if taken.cluster in self._weights:
            self._uses.record(taken.cluster, home, taken.prefill_s, now_s)
            weight = self._weights[taken.cluster][home]
        room.record_dispatch(taken.cluster, taken.prefill_s / weight, home)

    def _shared(
        self, cluster: ClusterId, now_s: float, wanting: Sequence[ClusterId] = ()
    ) -> SharedCluster:
        used_s = self._uses.of_homes(cluster, now_s)
        return SharedCluster(cluster, self._weights[cluster], used_s, wanting)

    def is_blocked(
        self, cluster: ClusterId, home: str, work_s: float, board: Board, now_s: float
    ) -> bool:
        """Whether a request that waits for the cluster waits for the link from there."""
        if cluster not in self._weights:
            return False
        name = ClusterId(home)
        link_id = (cluster, name)
        shared, state = self._shared(cluster, now_s), self._states[name]
        return waits_for_link(name, shared, work_s, link_id, board.link(link_id), state)

    def has_room(self, cluster: ClusterId, board: Board, now_s: float) -> bool:
        return has_room_at(board.cluster(cluster), now_s, self._rules)

    def adjust(self, board: Board, held: Mapping[ClusterId, HeldWork], now_s: float) -> None:
        """Updates the short-term state of every PD cluster after a round of reports."""
        for name, state in self._states.items():
            view = board.view(now_s, NOTHING_CACHED, held, name)
            self._states[name] = adjust(state, view, now_s)

    def threshold_factor(self, home: ClusterId) -> float:
        """By which the short-term loop has raised the threshold of the home's plan."""
        return self._states[home].threshold_factor

    def link_state(self, link_id: LinkId) -> LinkState | None:
        source, target = link_id
        home = target if target in self._states else source
        return self._states[home].links.get(link_id)

    def change_plans(self, plans: Mapping[ClusterId, Plan], now_s: float) -> None:
        self.plans |= plans
        self._weigh()
        self.changes += [PlanChange(now_s, plan) for plan in plans.values()]
