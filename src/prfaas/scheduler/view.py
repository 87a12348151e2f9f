"""The router's view of the deployment, the same for gateway and simulator.

It combines the latest reports with this router's dispatches since then, so that requests between
two reports do not all choose the same node. `board` keeps it up to date; a view is for the decision
that it was taken for, before the board changes again. A hit on a *prefill* node saves compute, a
hit on the *decode* node saves bytes: the view has both. The types are named tuples, because each
request replaces a node's view several times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from typing import NamedTuple, TypeAlias

from prfaas.scheduler.costs import Costs
from prfaas.scheduler.lookup.prefixes import CachedPrefixes
from prfaas.scheduler.lookup.ranking import Ranking
from prfaas.scheduler.plan import Role
from prfaas.scheduler.waiting import HeldWork
from prfaas.types import ClusterId, LinkStats, NodeId

LinkId: TypeAlias = tuple[ClusterId, ClusterId]  # from, to


class NodeView(NamedTuple):
    """One node. Every node can prefill and decode; its role decides which work it gets."""

    node: NodeId
    role: Role
    usable: bool  # live, and not draining before a change of role
    free_at_s: float  # when its prefills will have ended; in the past: idle
    queued: int  # prefills dispatched to it and not finished
    active: int  # sequences that it decodes or will decode
    slots: int  # limit of its decode batch, the same for all nodes of a cluster
    free_kv_bytes: float  # decode memory that is not reserved
    next_alone_s: float = -math.inf  # when it may next prefill for itself beside its decodes
    pace: float = 1.0  # time of its prefills, over what its cluster's usually take


class NodeRanks:
    """The usable nodes of one cluster, ranked by what a decision asks for. Every node has a number,
    and the sets of nodes are those of `lookup.ranking`."""

    __slots__ = (
        "_names",
        "_numbers",
        "active",
        "decode_free_at_s",
        "minus_free_kv_bytes",
        "next_alone_s",
        "numbers",
        "paces",
        "prefill_free_at_s",
        "usable",
    )

    def __init__(self, nodes: Iterable[NodeView], numbers: Mapping[NodeId, int]) -> None:
        """`numbers` may lack nodes: these get numbers that no other node has."""
        self.numbers = numbers
        spare = count(max(numbers.values(), default=-1) + 1)
        self._numbers: dict[NodeId, int] = {}
        prefills: list[tuple[int, NodeView]] = []
        decodes: list[tuple[int, NodeView]] = []
        self.usable = 0  # the set of usable nodes, of both roles
        # The sets of nodes that are slower or faster than most, by pace. Usually there are none.
        self.paces: dict[float, int] = {}
        for node in nodes:
            number = numbers.get(node.node)
            if number is None:
                number = next(spare)
            self._numbers[node.node] = number
            self._set_pace(1.0, node.pace, number)
            if node.usable:
                self.usable |= 1 << number
                (prefills if node.role == "prefill" else decodes).append((number, node))
        self._names = {number: name for name, number in self._numbers.items()}
        self.prefill_free_at_s = Ranking((node.free_at_s, n) for n, node in prefills)
        # Of decode nodes. The node with most memory is the first by `minus_free_kv_bytes`.
        self.active = Ranking((node.active, n) for n, node in decodes)
        self.minus_free_kv_bytes = Ranking((-node.free_kv_bytes, n) for n, node in decodes)
        self.decode_free_at_s = Ranking((node.free_at_s, n) for n, node in decodes)
        self.next_alone_s = Ranking((node.next_alone_s, n) for n, node in decodes)

    def name(self, number: int) -> NodeId:
        return self._names[number]

    def replace(self, before: NodeView, after: NodeView) -> None:
        """A node has changed."""
        number = self._numbers[after.node]
        if before.pace != after.pace:
            self._set_pace(before.pace, after.pace, number)
        if before.role != after.role or before.usable != after.usable:
            self._drop(number)
            self._rank(after, number)
        elif not after.usable:
            return
        elif after.role == "prefill":
            if after.free_at_s != before.free_at_s:
                self.prefill_free_at_s.put(number, after.free_at_s)
        else:
            if after.active != before.active:
                self.active.put(number, after.active)
            if after.free_kv_bytes != before.free_kv_bytes:
                self.minus_free_kv_bytes.put(number, -after.free_kv_bytes)
            if after.free_at_s != before.free_at_s:
                self.decode_free_at_s.put(number, after.free_at_s)
            if after.next_alone_s != before.next_alone_s:
                self.next_alone_s.put(number, after.next_alone_s)

    def by_pace(self, nodes: int) -> Iterator[tuple[float, int]]:
        """The set of nodes, divided into sets of the same pace."""
        for pace, members in self.paces.items():
            if members & nodes:
                yield pace, members & nodes
                nodes &= ~members
        if nodes:
            yield 1.0, nodes

    def _set_pace(self, before: float, after: float, number: int) -> None:
        if before != 1.0:
            left = self.paces.pop(before) & ~(1 << number)
            if left:
                self.paces[before] = left
        if after != 1.0:
            self.paces[after] = self.paces.get(after, 0) | 1 << number

    def _rank(self, node: NodeView, number: int) -> None:
        if not node.usable:
            return
        self.usable |= 1 << number
        if node.role == "prefill":
            self.prefill_free_at_s.put(number, node.free_at_s)
        else:
            self.active.put(number, node.active)
            self.minus_free_kv_bytes.put(number, -node.free_kv_bytes)
            self.decode_free_at_s.put(number, node.free_at_s)
            self.next_alone_s.put(number, node.next_alone_s)

    def _drop(self, number: int) -> None:
        self.usable &= ~(1 << number)
        for ranking in (
            self.prefill_free_at_s,
            self.active,
            self.minus_free_kv_bytes,
            self.decode_free_at_s,
            self.next_alone_s,
        ):
            ranking.remove(number)


class ClusterView:
    """The nodes of one cluster. Ranks are made when a decision first needs them, and then follow
    every change."""

    __slots__ = ("_nodes", "_ranks", "_tuple", "cluster")

    def __init__(self, cluster: ClusterId, nodes: Iterable[NodeView] = ()) -> None:
        self.cluster = cluster
        self._nodes = {node.node: node for node in nodes}
        self._tuple: tuple[NodeView, ...] | None = None
        self._ranks: NodeRanks | None = None

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes, in the order in which they joined. A snapshot."""
        if self._tuple is None:
            self._tuple = tuple(self._nodes.values())
        return self._tuple

    def __contains__(self, node: NodeId) -> bool:
        return node in self._nodes

    def node(self, name: NodeId) -> NodeView:
        return self._nodes[name]

    def ranks(self, cached: CachedPrefixes | None = None) -> NodeRanks:
        """The ranked nodes, with the numbers that `cached` has, where it is given."""
        ranks = self._ranks
        if cached is not None and cached.groups:
            if ranks is None or cached.numbers is not ranks.numbers:
                ranks = self._ranks = NodeRanks(self._nodes.values(), cached.numbers)
        elif ranks is None:
            ranks = self._ranks = NodeRanks(self._nodes.values(), {})
        return ranks

    def with_nodes(self, nodes: Iterable[NodeView]) -> ClusterView:
        """Another view of the cluster, with these nodes."""
        return ClusterView(self.cluster, nodes)

    # For the board --------------------------------------------------------------------------------

    def put(self, node: NodeView) -> None:
        """Replaces a node's view, or adds a node."""
        before = self._nodes.get(node.node)
        self._nodes[node.node] = node
        self._tuple = None
        if before is None:
            self._ranks = None
        elif self._ranks is not None:
            self._ranks.replace(before, node)

    def remove(self, name: NodeId) -> None:
        del self._nodes[name]
        self._tuple = self._ranks = None


class LinkView(NamedTuple):
    """A path between clusters."""

    up: bool
    capacity_bps: float  # as configured
    rtt_s: float
    stats: LinkStats | None  # the last report
    pending_bytes: float  # of own dispatches whose hand-off is not in place yet
    # Uncached tokens that the plan's shares would have sent over this link, less those that own
    # dispatches have sent. Positive: the link is behind its share.
    credit_tokens: float = 0.0


class View(NamedTuple):
    """The state that one routing decision uses. `cached` is about the prompt to be routed and omits
    nodes without any of it."""

    now_s: float
    # The PD cluster that the request is routed for: it decodes, and prefills what is not offloaded.
    local: ClusterView
    remotes: tuple[ClusterView, ...]  # prefill only, in the order of the plan's `shares`
    links: Mapping[LinkId, LinkView]  # that lead to or from `local`
    costs: Costs
    cached: CachedPrefixes
    held: Mapping[ClusterId, HeldWork]  # prefill work in the waiting room, per cluster
    # Whether other PD clusters use the PrfaaS clusters, too: requests then also wait in the waiting
    # room for links (`homes.fair_shares`).
    shared: bool = False

    def cluster(self, name: ClusterId) -> ClusterView:
        if name == self.local.cluster:
            return self.local
        return next(remote for remote in self.remotes if remote.cluster == name)


def exclude_nodes(view: View, nodes: Collection[NodeId]) -> View:
    """The same view with these nodes not usable: for a request that has failed on them."""
    if not nodes:
        return view
    local, *remotes = [
        cluster.with_nodes(
            node._replace(usable=node.usable and node.node not in nodes) for node in cluster.nodes
        )
        for cluster in (view.local, *view.remotes)
    ]
    return view._replace(local=local, remotes=tuple(remotes))
