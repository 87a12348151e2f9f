"""Each home gets its share of the PrfaaS clusters: holds requests of a home that is ahead of it.

The rule is `scheduler/homes/fair_shares.py`. This module knows what this gateway has dispatched,
and asks what the other gateways have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prfaas.clock import Clock
from prfaas.contracts.gateway_api import ClusterUse
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.placement import PlacementRequest, home_of
from prfaas.scheduler.homes.fair_shares import (
    LEAST_WEIGHT,
    SharedCluster,
    ShareUses,
    planned_together,
    share_hold,
    waits_for_link,
    weights_by_cluster,
)
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import Route
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import NodeView
from prfaas.scheduler.waiting import Hold, WaitingRoom
from prfaas.types import ClusterId, NodeId

# What other gateways take of a PrfaaS cluster at a time, by home.
OtherUses = Callable[[ClusterId, float], Mapping[ClusterId, ClusterUse]]


def nobody_else(cluster: ClusterId, now_s: float) -> Mapping[ClusterId, ClusterUse]:
    return {}


class FairAccess:
    def __init__(
        self,
        fleet: Fleet,
        waiting_room: WaitingRoom[PlacementRequest],
        queue_s: float,
        clock: Clock,
        other_uses: OtherUses = nobody_else,
    ) -> None:
        """`queue_s`: prefill work that keeps a node busy."""
        self._fleet = fleet
        self._waiting_room = waiting_room
        self._queue_s = queue_s
        self._clock = clock
        self._other_uses = other_uses
        self._uses = ShareUses()
        self._weights: Mapping[ClusterId, Mapping[ClusterId, float]] = {}

    def follow(self, plans: Mapping[ClusterId, Plan]) -> None:
        """The plans' flows are the shares from now on. A home that was lost when the others were
        planned has none: its plan is kept for its return."""
        self._weights = weights_by_cluster(planned_together(plans), self._fleet.remotes)

    def find_hold(
        self, placement: PlacementRequest, found: Route, now_s: float, drain_s: float
    ) -> Hold | None:
        """The hold of a request whose home is ahead of its share; None: it may go. `drain_s`: how
        long the link to the home needs for what was dispatched to it."""
        wanting = self._wanting(found.cluster)
        shared = self._shared(found.cluster, placement.home, wanting, now_s)
        if shared is None:
            return None
        return share_hold(
            found,
            placement.request,
            placement.home,
            shared,
            self._node(found.prefill),
            now_s,
            stated_s=self._stated_s(placement, found),
            queue_s=self._queue_s,
            drain_s=drain_s,
        )

    def waits_for_link(
        self,
        cluster: ClusterId,
        home: ClusterId,
        prefill_s: float,
        state: ShortTermState,
        now_s: float,
    ) -> bool:
        """Whether a request that waits for a PrfaaS cluster waits for the link from there."""
        shared = self._shared(cluster, home, (), now_s)
        link_id = (cluster, home)
        link = self._fleet.board.link(link_id)
        return shared is not None and waits_for_link(home, shared, prefill_s, link_id, link, state)

    def _shared(
        self, cluster: ClusterId, home: ClusterId, wanting: Iterable[ClusterId], now_s: float
    ) -> SharedCluster | None:
        """A PrfaaS cluster as a home shares it. `wanting`: by this gateway. None before the first
        plan."""
        weights = self._weights_at(cluster, home)
        if not weights:
            return None
        used_s = dict(self._uses.of_homes(cluster, now_s))
        wants = set(wanting)
        for other, use in self._other_uses(cluster, now_s).items():
            if other in weights:
                used_s[other] = used_s.get(other, 0.0) + use.used_s
                if use.wants:
                    wants.add(other)
        return SharedCluster(cluster, weights, used_s, wants & weights.keys())

    def weight(self, cluster: ClusterId, queue: str) -> float:
        """The weight at a cluster of the home to which a queue belongs."""
        return self._weights.get(cluster, {}).get(home_of(queue), 1.0)

    def _weights_at(self, cluster: ClusterId, home: ClusterId) -> Mapping[ClusterId, float]:
        """Empty before the first plan. A home without a plan has the least weight."""
        weights = self._weights.get(cluster, {})
        if not weights or home in weights:
            return weights
        return {**weights, home: LEAST_WEIGHT * max(weights.values())}

    def record(self, placement: PlacementRequest, found: Route, now_s: float) -> float:
        """Counts a dispatch towards the share of its home. Returns the home's weight."""
        stated_s = self._stated_s(placement, found)
        self._uses.record(found.cluster, placement.home, stated_s, now_s)
        return self.weight(found.cluster, placement.queue)

    def uses_of(self, homes: Iterable[ClusterId], now_s: float) -> dict[str, ClusterUse]:
        """What these homes take of each PrfaaS cluster by this gateway."""
        counted = list(homes)
        found = {}
        for cluster in self._fleet.remotes:
            used_s = sum(self._uses.used_s(cluster, home, now_s) for home in counted)
            wants = any(home in counted for home in self._wanting(cluster))
            if used_s or wants:
                found[str(cluster)] = ClusterUse(used_s, wants)
        return found

    def _node(self, name: NodeId) -> NodeView:
        """The node as the board knows it, but not idle while its latest prefill is overdue."""
        node = self._fleet.board.node(name)
        if not self._fleet.work.is_busy(name):
            return node
        return node._replace(free_at_s=max(node.free_at_s, self._clock.now()))

    def _wanting(self, cluster: ClusterId) -> Iterable[ClusterId]:
        return (home_of(queue) for queue in self._waiting_room.wanting(cluster))

    def _stated_s(self, placement: PlacementRequest, found: Route) -> float:
        new = placement.request.prompt_tokens - found.cached_tokens
        return self._fleet.pace.stated_s(found, max(new, 0), found.cached_tokens)
