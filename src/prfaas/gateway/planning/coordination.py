"""Which gateway plans, and how the others get its plans: the interface, and a gateway on its own.

`gateway/peers/among.py` has the gateway among others, which the long-term loop cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Protocol

from prfaas.gateway.planning.kept_plans import KeptPlans
from prfaas.scheduler.long_term.traffic import TrafficHistory, TrafficWindow
from prfaas.scheduler.plan import Plan
from prfaas.types import ClusterId, NodeId


class Coordination(Protocol):
    @property
    def plans(self) -> bool:
        """Whether this gateway makes plans and assigns roles now."""

    @property
    def epoch(self) -> int:
        """Of the gateway that plans; 0 where there is only this one. Role changes name it."""

    @property
    def term(self) -> int:
        """Another one when this gateway has ceased to plan and plans again."""

    @property
    def follows(self) -> bool:
        """Whether plans come from another gateway while this one makes none."""

    @property
    def is_informed(self) -> bool:
        """Whether this gateway knows which plan and which orders to drain the kvds keep."""

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        """Plans that another gateway, or an earlier process of this one, has made since the
        previous call."""

    def draining(self) -> Collection[NodeId]:
        """Nodes that the gateway that plans is about to give another role."""

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        """Has the kvds keep what this gateway follows, for the others and for a restart."""

    def has_left(self, node: NodeId) -> bool:
        """Whether the other gateways have stopped using a node that drains."""

    def window(
        self,
        home: ClusterId,
        now_s: float,
        live_remotes: tuple[int, ...],
        live_local: Set[NodeId],
        paces: Mapping[ClusterId, float],
    ) -> TrafficWindow:
        """The traffic of a PD cluster at all gateways."""


class Alone:
    """The only gateway, or one of several that the deployment file tells whether to plan."""

    epoch = 0
    term = 0
    follows = False

    def __init__(
        self,
        traffic: Mapping[ClusterId, TrafficHistory],
        kept: KeptPlans,
        *,
        plans: bool,
        resumes: bool = True,
    ) -> None:
        """`resumes`: it starts with the plan that the kvds keep."""
        self.plans = plans
        self._resumes = resumes
        self._kept = kept
        self._traffic = traffic

    @property
    def is_informed(self) -> bool:
        return self._kept.is_informed

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        if not self.plans:
            return self._kept.newer()
        if not self._resumes or self._kept.followed is not None:
            return None  # once it has a plan, its own count
        # That of an earlier process is good while the file says the same.
        return self._kept.newer(same_inputs=True)

    def draining(self) -> Collection[NodeId]:
        return () if self.plans else self._kept.draining

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        self._kept.share(plans, draining, None)

    def has_left(self, node: NodeId) -> bool:
        return True

    def window(
        self,
        home: ClusterId,
        now_s: float,
        live_remotes: tuple[int, ...],
        live_local: Set[NodeId],
        paces: Mapping[ClusterId, float],
    ) -> TrafficWindow:
        return self._traffic[home].window(now_s, live_remotes, live_local, paces)
