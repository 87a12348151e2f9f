"""Which gateway plans, and how the others get its plans: the interface, and a gateway on its own.

`gateway/peers/among.py` has the gateway among others, which the long-term loop cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Protocol

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

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        """Plans that another gateway has made since the previous call."""

    def draining(self) -> Collection[NodeId]:
        """Nodes that the gateway that plans is about to give another role."""

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        """Shows the other gateways what this one follows."""

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

    def __init__(self, traffic: Mapping[ClusterId, TrafficHistory], *, plans: bool) -> None:
        self.plans = plans
        self._traffic = traffic

    def newer_plans(self) -> Mapping[ClusterId, Plan] | None:
        return None

    def draining(self) -> Collection[NodeId]:
        return ()

    def share(self, plans: Mapping[ClusterId, Plan], draining: Collection[NodeId]) -> None:
        """There is no other gateway that follows this one."""

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
