"""How well the gateway can serve each PD cluster now: reads fleet and plans for `judge_service`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from prfaas.clock import Clock
from prfaas.gateway.exposition.nodes import NodeState, state_of
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.service import ClusterNodes, Service, judge_service
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId

_STATES: Final[Mapping[NodeState, str]] = {
    "unused": "waiting for a role",
    "leaving": "restarting",
    "incompatible": "incompatible",
    "lost": "lost",
}


class HomeServices:
    """Judges anew at each call; keeps nothing."""

    def __init__(
        self,
        fleet: Fleet,
        plans: Callable[[], Mapping[ClusterId, Plan]],
        clock: Clock,
        helpers: Collection[LinkId] = (),
    ) -> None:
        """`helpers`: pairs of PD clusters, the second of which may decode for the first."""
        self._fleet = fleet
        self._plans = plans
        self._clock = clock
        self._helpers = helpers

    def why_unserved(self, home: ClusterId) -> str:
        """Why no request of the PD cluster can be served now; empty where one can be."""
        service = self.all()[home]
        return service.reason if service.level == "unserved" else ""

    def all(self) -> dict[ClusterId, Service]:
        """By PD cluster."""
        fleet, plans = self._fleet, self._plans()
        nodes = self._nodes()
        remotes = {home: self._remotes(home, nodes) for home in fleet.homes}

        def judge(home: ClusterId, helpers: Collection[ClusterId] = ()) -> Service:
            plan = plans.get(home)
            return judge_service(nodes[home], remotes[home], plan, helpers)

        alone = {home: judge(home) for home in fleet.homes}

        def helpers(home: ClusterId) -> list[ClusterId]:
            others = [other for one, other in self._helpers if one == home]
            return [other for other in others if alone[other].level != "unserved"]

        return {
            home: judge(home, helpers(home)) if service.level == "unserved" else service
            for home, service in alone.items()
        }

    def remotes(self) -> dict[ClusterId, list[ClusterNodes]]:
        """The PrfaaS clusters that may prefill for each PD cluster."""
        nodes = self._nodes()
        return {home: self._remotes(home, nodes) for home in self._fleet.homes}

    def _remotes(
        self, home: ClusterId, nodes: Mapping[ClusterId, ClusterNodes]
    ) -> list[ClusterNodes]:
        view = self._fleet.board.view(self._clock.now(), {}, {}, home)
        return [
            nodes[remote.cluster]._replace(link_up=view.links[remote.cluster, home].up)
            for remote in view.remotes
        ]

    def _nodes(self) -> dict[ClusterId, ClusterNodes]:
        fleet, now_s = self._fleet, self._clock.now()
        roles: dict[ClusterId, Counter[str]] = {}
        others: dict[ClusterId, Counter[str]] = {}
        for member in fleet.members:
            state = state_of(fleet, member, now_s)
            if state == "in_use":
                assert member.node is not None
                used = roles.setdefault(member.cluster, Counter())
                used[fleet.board.node(member.node).role] += 1
            else:
                others.setdefault(member.cluster, Counter())[_STATES[state]] += 1
        return {
            cluster: ClusterNodes(
                cluster,
                roles.get(cluster, Counter())["prefill"],
                roles.get(cluster, Counter())["decode"],
                others.get(cluster, {}),
                drained=cluster in fleet.drained,
            )
            for cluster in (*fleet.homes, *fleet.remotes)
        }
