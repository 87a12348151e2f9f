"""A gateway among others: one of them plans, and all follow its plans (`Coordination`).

The gateway that holds the planning lease makes plans, with its epoch. Every gateway reports the
plan that it follows, and takes over a plan with a higher epoch or number from any other. So a
gateway that returns learns the plan from whichever gateway it reaches first, and when the gateway
that plans is lost, the others serve on with its last plan.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Set
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.config.deployment import ReplanSection
from prfaas.contracts.gateway_api import SharedPlan
from prfaas.errors import InputError
from prfaas.gateway.homes.traffic import HomeTraffic
from prfaas.gateway.peers.peers import PeerGateways
from prfaas.gateway.peers.plan_codec import aged, decode_plans, encode_plans
from prfaas.gateway.planning.election import Election
from prfaas.planner.problem import Problem
from prfaas.scheduler.long_term.traffic import TrafficWindow
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)


class _Followed(NamedTuple):
    """The plan that this gateway follows."""

    shared: SharedPlan
    at_s: float  # when its ages were those of `shared`
    plans: Mapping[ClusterId, Plan]

    @property
    def number(self) -> tuple[int, int]:
        return self.shared.epoch, self.shared.number


class AmongGateways:
    def __init__(
        self,
        peers: PeerGateways,
        election: Election,
        problems: Mapping[ClusterId, Problem],
        rules: ReplanSection,
        traffic: HomeTraffic,
        clock: Clock,
    ) -> None:
        """`problems`: of each PD cluster, as the policy uses its hardware."""
        self._peers = peers
        self._election = election
        self._problems = problems
        self._rules = rules
        self._traffic = traffic
        self._clock = clock
        self._followed: _Followed | None = None
        self._refused: tuple[int, int] | None = None  # a plan with an impossible value

    @property
    def plans(self) -> bool:
        # A gateway that has heard of a higher epoch has lost its lease, or is about to.
        return self._election.plans and self._election.epoch >= self._peers.highest_epoch()

    @property
    def follows(self) -> bool:
        return not self.plans

    @property
    def epoch(self) -> int:
        if self.plans or self._followed is None:
            return self._election.epoch
        return self._followed.shared.epoch

    @property
    def highest_epoch(self) -> int:
        return max(self._election.highest_epoch, self._peers.highest_epoch())

    @property
    def followed(self) -> tuple[int, int] | None:
        """Epoch and number of the plan that this gateway follows."""
        return None if self._followed is None else self._followed.number

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        newest = self._peers.newest_number
        if newest is None or (self._followed is not None and newest <= self._followed.number):
            return None
        shared = self._peers.newest_plan()
        assert shared is not None
        now_s = self._clock.now()
        try:
            plans = decode_plans(shared, self._problems, self._rules, now_s)
        except InputError as error:
            if newest != self._refused:
                log.warning("the plan %d.%d of another gateway is ignored: %s", *newest, error)
            self._refused = newest
            return None
        self._followed = _Followed(shared, now_s, plans)
        return plans

    def draining(self) -> Collection[NodeId]:
        if self._followed is None or self.plans:
            return ()
        return [NodeId(node) for node in self._followed.shared.draining]

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        now_s, known = self._clock.now(), self._followed
        epoch, number = self._election.epoch, 1
        if known is not None and known.shared.epoch == epoch:
            same = _contents(plans) == _contents(known.plans)
            if same and set(draining) == set(known.shared.draining):
                return
            number = known.shared.number + 1
        shared = encode_plans(plans, epoch, number, sorted(draining), now_s)
        self._followed = _Followed(shared, now_s, dict(plans))

    def shared_plan(self) -> SharedPlan | None:
        """The plan that this gateway follows, for its report. Its ages are those of now."""
        if self._followed is None:
            return None
        return aged(self._followed.shared, max(self._clock.now() - self._followed.at_s, 0.0))

    def has_left(self, node: NodeId) -> bool:
        known = self._followed
        if known is None or node not in known.shared.draining:
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


def _contents(plans: Mapping[ClusterId, Plan]) -> dict[ClusterId, tuple[object, ...]]:
    return {home: plan.content for home, plan in plans.items()}
