"""What the router knows of the world: a frozen snapshot, the same for gateway and simulator.

Last reports plus what this router has dispatched since, so that polling does not herd; `board`
keeps it up to date. A hit on a *prefill* node saves compute, one on the *decode* node saves bytes:
the view carries both. Named tuples, because one node's view is replaced several times a request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from prfaas.scheduler.costs import Costs
from prfaas.scheduler.plan import Role
from prfaas.scheduler.waiting import HeldWork
from prfaas.types import ClusterId, LinkStats, NodeId

LinkId: TypeAlias = tuple[ClusterId, ClusterId]  # from, to


class CachedPrefix(Protocol):
    """What one node holds of the prompt at hand (`cache.NodeMatch` is one)."""

    @property
    def tokens(self) -> int:
        """A prefill can resume here: every kind of state is there."""

    @property
    def attention_tokens(self) -> int:
        """Growing KV of so many tokens is there: a hand-off to this node can leave it out."""


class NodeView(NamedTuple):
    """One node. Every node can prefill and decode; its role says what it is given."""

    node: NodeId
    role: Role
    usable: bool  # alive, and not draining towards another role
    free_at_s: float  # when it will have prefilled all it was given; in the past: idle
    queued: int  # prefills given to it and not finished
    active: int  # requests it decodes, or that are on their way to be decoded there
    slots: int  # decode batch limit
    free_kv_bytes: float  # decode memory not promised to anybody


class ClusterView(NamedTuple):
    cluster: ClusterId
    nodes: tuple[NodeView, ...]


class LinkView(NamedTuple):
    """A path between clusters."""

    up: bool
    capacity_bps: float  # as configured
    rtt_s: float
    stats: LinkStats | None  # the last report
    pending_bytes: float  # of own dispatches whose arrival is not known yet, produced or not


class View(NamedTuple):
    """`cached` is of the prompt to be routed; nodes that hold nothing of it are left out."""

    now_s: float
    local: ClusterView  # decodes, and prefills what stays
    remotes: tuple[ClusterView, ...]  # prefill only, in the order of the plan's `shares`
    links: Mapping[LinkId, LinkView]
    costs: Costs
    cached: Mapping[NodeId, CachedPrefix]
    held: Mapping[ClusterId, HeldWork]  # what the router holds back, per cluster it is for


def exclude_nodes(view: View, nodes: Collection[NodeId]) -> View:
    """The same world, had these nodes no use: for a request that has failed there."""
    if not nodes:
        return view
    local, *remotes = [
        cluster._replace(
            nodes=tuple(
                node._replace(usable=node.usable and node.node not in nodes)
                for node in cluster.nodes
            )
        )
        for cluster in (view.local, *view.remotes)
    ]
    return view._replace(local=local, remotes=tuple(remotes))
