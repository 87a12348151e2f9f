"""A log of routing decisions, one JSON line each, and their replay.

A line has all arguments of `route` except those that a deployment fixes: its profiles and the
problem that the plan solves. JSON has no infinity; None stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import IO, NamedTuple

import msgspec

from prfaas.cache.index import NodeMatch
from prfaas.config.deployment import SchedulerSection
from prfaas.scheduler.costs import Costs
from prfaas.scheduler.lookup.prefixes import group_prefixes
from prfaas.scheduler.plan import Plan, Role
from prfaas.scheduler.request import Request, Route
from prfaas.scheduler.sets import Choice
from prfaas.scheduler.short_term import route
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import ClusterView, LinkView, NodeView, View
from prfaas.scheduler.waiting import HeldWork, Hold
from prfaas.types import ClusterId, NodeId


class _Node(NamedTuple):
    node: NodeId
    role: Role
    usable: bool
    free_at_s: float | None  # None: the node never had work
    queued: int
    active: int
    slots: int
    free_kv_bytes: float | None  # None: unbounded
    next_alone_s: float | None = None  # None: it never had one
    pace: float = 1.0


class _Cluster(NamedTuple):
    cluster: ClusterId
    nodes: list[_Node]


class _Link(NamedTuple):
    source: ClusterId
    target: ClusterId
    view: LinkView | None
    state: LinkState | None


class Decision(msgspec.Struct, frozen=True):
    """One line of the log: the input of a routing decision, and its result."""

    now_s: float
    request: Request
    clusters: list[_Cluster]  # the PD cluster first
    links: list[_Link]
    cached: dict[NodeId, NodeMatch]
    held: dict[ClusterId, HeldWork]
    threshold_tokens: int
    roles: dict[NodeId, Role]
    shares: tuple[float, ...]
    rules: SchedulerSection
    threshold_factor: float
    changed_s: float | None
    paces: dict[ClusterId, float] = {}
    shared: bool = False
    route: Route | None = None
    hold: Hold | None = None

    @property
    def taken(self) -> Route | Hold:
        taken = self.route or self.hold
        assert taken is not None
        return taken


class DecisionLog:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, request: Request, choice: Choice, plan: Plan, state: ShortTermState) -> None:
        self._file.write(msgspec.json.encode(_decision(request, choice, plan, state)) + b"\n")


def replay(
    lines: Iterable[bytes], costs: Costs, plan: Plan
) -> Iterator[tuple[Decision, Route | Hold]]:
    """Yields every recorded decision, and what the scheduler decides now. `plan` supplies the
    problem."""
    for line in lines:
        decision = msgspec.json.decode(line, type=Decision)
        recorded_plan = replace(
            plan,
            threshold_tokens=decision.threshold_tokens,
            roles=decision.roles,
            shares=decision.shares,
        )
        view = _view(decision, costs.paced(decision.paces))
        state = _state(decision)
        yield decision, route(decision.request, view, recorded_plan, state)


def _decision(request: Request, choice: Choice, plan: Plan, state: ShortTermState) -> Decision:
    taken, view = choice
    link_ids = {**view.links, **state.links}
    return Decision(
        now_s=view.now_s,
        request=request,
        clusters=[
            _Cluster(cluster.cluster, [_node_record(node) for node in cluster.nodes])
            for cluster in (view.local, *view.remotes)
        ],
        links=[_Link(*one, view.links.get(one), state.links.get(one)) for one in link_ids],
        cached={
            n: NodeMatch(c.tokens, c.attention_tokens, c.pool_tokens, c.remote_pool_tokens)
            for n, c in view.cached.items()
        },
        held=dict(view.held),
        threshold_tokens=plan.threshold_tokens,
        roles=dict(plan.roles),
        shares=plan.shares,
        rules=state.rules,
        threshold_factor=state.threshold_factor,
        changed_s=_finite(state.changed_s),
        paces=dict(view.costs.paces),
        shared=view.shared,
        route=taken if isinstance(taken, Route) else None,
        hold=taken if isinstance(taken, Hold) else None,
    )


def _node_record(node: NodeView) -> _Node:
    return _Node(*node)._replace(
        free_at_s=_finite(node.free_at_s),
        free_kv_bytes=_finite(node.free_kv_bytes),
        next_alone_s=_finite(node.next_alone_s),
    )


def _node_view(node: _Node) -> NodeView:
    return NodeView(
        node.node,
        node.role,
        node.usable,
        -math.inf if node.free_at_s is None else node.free_at_s,
        node.queued,
        node.active,
        node.slots,
        math.inf if node.free_kv_bytes is None else node.free_kv_bytes,
        -math.inf if node.next_alone_s is None else node.next_alone_s,
        node.pace,
    )


def _view(decision: Decision, costs: Costs) -> View:
    local, *remotes = [
        ClusterView(cluster.cluster, tuple(_node_view(node) for node in cluster.nodes))
        for cluster in decision.clusters
    ]
    # In the order of the nodes, by which equal nodes were told apart.
    nodes = [node.node for cluster in decision.clusters for node in cluster.nodes]
    numbers = {node: number for number, node in enumerate(nodes)}
    return View(
        decision.now_s,
        local,
        tuple(remotes),
        {(link.source, link.target): link.view for link in decision.links if link.view is not None},
        costs,
        group_prefixes(decision.cached, numbers),
        decision.held,
        decision.shared,
    )


def _state(decision: Decision) -> ShortTermState:
    return ShortTermState(
        decision.rules,
        {
            (link.source, link.target): link.state
            for link in decision.links
            if link.state is not None
        },
        decision.threshold_factor,
        -math.inf if decision.changed_s is None else decision.changed_s,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
