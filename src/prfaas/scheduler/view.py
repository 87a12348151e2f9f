"""The router's view of the deployment: a frozen snapshot, the same for gateway and simulator.

It combines the latest reports with this router's dispatches since then, so that requests between
two reports do not all choose the same node. `board` keeps it up to date. A hit on a *prefill* node
saves compute, a hit on the *decode* node saves bytes: the view has both. The types are named
tuples, because each request replaces a node's view several times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from prfaas.scheduler.costs import Costs
from prfaas.scheduler.plan import Role
from prfaas.scheduler.waiting import HeldWork
from prfaas.types import ClusterId, LinkStats, NodeId

LinkId: TypeAlias = tuple[ClusterId, ClusterId]  # from, to


class CachedPrefix(Protocol):
    """What one node holds of the prompt to be routed (`cache.NodeMatch` implements it)."""

    @property
    def tokens(self) -> int:
        """A prefill can resume after this many tokens: every kind of state is present."""

    @property
    def attention_tokens(self) -> int:
        """Growing KV of this many tokens is present: a hand-off to this node can omit it."""

    @property
    def pool_tokens(self) -> int | None:
        """Other nodes of its cluster can copy this many tokens from it. None: all of `tokens`. An
        engine's own cache counts in `tokens`, and no other node can copy from it."""

    @property
    def remote_pool_tokens(self) -> int | None:
        """The same for nodes of other clusters. None: as `pool_tokens`."""


class NodeView(NamedTuple):
    """One node. Every node can prefill and decode; its role decides which work it gets."""

    node: NodeId
    role: Role
    usable: bool  # live, and not draining before a change of role
    free_at_s: float  # when its prefills will have ended; in the past: idle
    queued: int  # prefills dispatched to it and not finished
    active: int  # requests that it decodes or will decode
    slots: int  # limit of its decode batch
    free_kv_bytes: float  # decode memory that is not reserved
    next_remainder_s: float = -math.inf  # when it may prefill a remainder beside its decodes


class ClusterView(NamedTuple):
    cluster: ClusterId
    nodes: tuple[NodeView, ...]


class LinkView(NamedTuple):
    """A path between clusters."""

    up: bool
    capacity_bps: float  # as configured
    rtt_s: float
    stats: LinkStats | None  # the last report
    pending_bytes: float  # of own dispatches whose hand-off is not in place yet


class View(NamedTuple):
    """The state that one routing decision uses. `cached` is about the prompt to be routed and omits
    nodes without any of it."""

    now_s: float
    local: ClusterView  # decodes every request, and prefills those that are not offloaded
    remotes: tuple[ClusterView, ...]  # prefill only, in the order of the plan's `shares`
    links: Mapping[LinkId, LinkView]
    costs: Costs
    cached: Mapping[NodeId, CachedPrefix]
    held: Mapping[ClusterId, HeldWork]  # prefill work in the waiting room, per cluster


def exclude_nodes(view: View, nodes: Collection[NodeId]) -> View:
    """The same view with these nodes not usable: for a request that has failed on them."""
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
