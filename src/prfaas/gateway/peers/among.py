"""A gateway among others: one of them plans, and all follow its plans (`Coordination`).

The gateway that holds the planning lease makes plans, with its epoch, and has the kvds keep them;
every gateway follows what a majority of the kvds keeps. So a gateway that returns finds the plan,
and when the gateway that plans is lost, the others serve on with its last plan.

What only counts while a gateway lives, it reports itself: its requests at each node, and the nodes
that it no longer uses. A node changes its role when no gateway that is alive has requests there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from prfaas.clock import Clock
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.peers.peers import PeerGateways
from prfaas.gateway.planning.election import Election
from prfaas.gateway.planning.kept_plans import KeptPlans
from prfaas.scheduler.long_term.traffic import TrafficWindow
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId


class AmongGateways:
    def __init__(
        self,
        peers: PeerGateways,
        election: Election,
        kept: KeptPlans,
        traffic: HomeTraffic,
        clock: Clock,
    ) -> None:
        self._peers = peers
        self._election = election
        self._kept = kept
        self._traffic = traffic
        self._clock = clock

    @property
    def plans(self) -> bool:
        # A lease is worth nothing where a majority keeps the plan of a later one, which only a kvd
        # that grants two leases at once, or the restart of most kvds, brings about.
        return self._election.plans and self._election.epoch >= self._kept.epoch

    @property
    def follows(self) -> bool:
        return not self.plans

    @property
    def is_informed(self) -> bool:
        return self._kept.is_informed

    @property
    def epoch(self) -> int:
        known = self._kept.followed
        return self._election.epoch if self.plans or known is None else known[0]

    @property
    def term(self) -> int:
        return self._election.first_epoch

    @property
    def majority_epoch(self) -> int:
        return self._election.majority_epoch

    @property
    def followed(self) -> tuple[int, int] | None:
        """Epoch and number of the plan that this gateway follows."""
        return self._kept.followed

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        return self._kept.newer()

    def draining(self) -> Collection[NodeId]:
        return () if self.plans else self._kept.draining

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        self._kept.share(plans, draining, self._election.epoch)

    def has_left(self, node: NodeId) -> bool:
        if node not in self._kept.draining:
            return False  # the others do not know yet that it drains
        others = self._peers.others_at(node, self._clock.now())
        if others.prefills or others.decodes:
            return False
        return all(node in peer.draining for peer in self._peers.living())

    def window(
        self,
        home: ClusterId,
        now_s: float,
        live_remotes: tuple[int, ...],
        live_local: Set[NodeId],
        paces: Mapping[ClusterId, float],
    ) -> TrafficWindow:
        # Every home has one gateway, which knows its traffic.
        history = self._peers.traffic.get(home) or self._traffic.histories[home]
        return history.window(now_s, live_remotes, live_local, paces)
