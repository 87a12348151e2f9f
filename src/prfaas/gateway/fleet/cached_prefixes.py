"""Names under which cache events arrive, and what each node has cached of a prompt.

The pools of a kvd, one for each form of its engine, and the engine's own cache publish events under
different names; all count for their node. A node's own name is that of its first pool. The index of
the events is the `GlobalKVManager`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, get_args

from prfaas.cache.groups import rules_for
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.manager import GlobalKVManager, PromptMatch
from prfaas.contracts.kvd_api import PoolReport, spec_of
from prfaas.gateway.fleet.member import Member
from prfaas.scheduler.board import Board
from prfaas.types import ClusterId, Compat, Form, NodeId


class Pool(NamedTuple):
    """One pool of a node."""

    name: NodeId  # of its events
    node: NodeId
    compat: Compat


class _Cache(NamedTuple):
    """A cache whose name is not its node's."""

    node: NodeId
    compat: Compat | None  # of a second pool; None: the engine's own cache


class _Reach(NamedTuple):
    """Which nodes can copy from a second pool: all of those that the router may choose."""

    in_cluster: bool
    across: bool


class CachedPrefixes:
    def __init__(self, manager: GlobalKVManager, board: Board) -> None:
        self._manager = manager
        self._board = board
        self._others: dict[NodeId, _Cache] = {}  # by name
        self._used: Collection[Member] = ()
        self._reach: dict[tuple[NodeId, Compat], _Reach] | None = None  # None: to be computed

    def add(self, member: Member, name: NodeId) -> bool:
        """Makes room in the index for events under `name`, of a pool of the member or of its
        engine. The index has no block of it until events arrive. Returns False when the member has
        not reported its pool yet, or when the name is another member's."""
        report = member.report
        if report is None or report.pool is None or report.node not in self._board:
            return False
        pool: PoolReport | None
        if name == report.node:
            pool = report.pool
            self._others.pop(name, None)  # a node's own name takes precedence
        elif name in self._board:
            return False
        elif (pool := member.second_pool(name)) is not None:
            # Its name begins with its node's, so that an engine with this name has it wrongly.
            self._others[name] = _Cache(report.node, pool.compat)
        elif self._is_of_another(name, report.node):
            return False
        else:
            self._others[name] = _Cache(report.node, None)
        found = pool or report.pool
        self._manager.join(
            NodeInfo(
                name,
                member.cluster,
                found.block_tokens,
                rules_for(spec_of(found.groups)),
                compat=None if pool is None else pool.compat,
                owner=None if name == report.node else report.node,
            )
        )
        return True

    def _is_of_another(self, name: NodeId, node: NodeId) -> bool:
        """Whether an engine of `node` may not have this name, because it is in use by another node,
        or could be that of another node's pool."""
        holder = self._others.get(name)
        owner, _, form = name.rpartition("/")
        is_pool = form in get_args(Form) and NodeId(owner) in self._board
        return (holder is not None and holder.node != node) or (is_pool and owner != node)

    def owns(self, member: Member, name: NodeId) -> bool:
        """Whether events under `name` are of this member."""
        node = member.node
        if node is None or name == node:
            return node is not None
        held = self._others.get(name)
        return held is not None and held.node == node and name not in self._board

    def forget(self, member: Member, name: NodeId) -> None:
        """Drops what the index has under a name of the member."""
        if self.owns(member, name):
            self._manager.leave(name)
            self._others.pop(name, None)

    def remove(self, node: NodeId) -> None:
        self._manager.leave(node)
        for name in [name for name, held in self._others.items() if held.node == node]:
            self._manager.leave(name)
            del self._others[name]

    def use(self, members: Collection[Member]) -> None:
        """These members are in use, with the pools of their latest reports."""
        self._used, self._reach = members, None

    def by_node(self, match: PromptMatch) -> Mapping[NodeId, NodeMatch]:
        """What each node holds, in its kvd's pools and in its engine's own cache. The latter saves
        compute, but no bytes of a hand-off, and cannot be copied. A second pool can be copied from
        where the nodes that the router may choose have its format. A hand-off to a node with two
        pools may omit what the pool of its form has; the larger number counts here.

        An engine's own cache is counted in blocks of the first pool. Where the engine's own blocks
        do not divide these, it may resume up to one of its blocks earlier than is claimed here: the
        gateway does not know their size."""
        found = dict(match.nodes)
        for name, cache in self._others.items():
            held = found.pop(name, None)
            if held is None:
                continue
            at = found.get(cache.node, NodeMatch(0, 0))
            attention = at.attention_tokens
            pool = at.tokens if at.pool_tokens is None else at.pool_tokens
            remote = pool if at.remote_pool_tokens is None else at.remote_pool_tokens
            if cache.compat is not None:
                attention = max(attention, held.attention_tokens)
                reach = self._reach_of(cache.node, cache.compat)
                pool = max(pool, held.tokens) if reach.in_cluster else pool
                remote = max(remote, held.tokens) if reach.across else remote
            found[cache.node] = NodeMatch(max(at.tokens, held.tokens), attention, pool, remote)
        return found

    def choose_copy(
        self, source: Member, target: Member, match: PromptMatch, tokens: int
    ) -> tuple[Compat, int] | None:
        """The format in which the target can copy most of a prefix of `tokens` tokens, and how many
        that are. None where the two have no format in common. A prefix that the index does not know
        of, because its events have not arrived, is expected in the first format."""
        common = [p for p in pools_of(source) if p.compat in target.compats]
        if not common:
            return None
        best = max(common, key=lambda pool: min(match.node_tokens(pool.name), tokens))
        held = match.node_tokens(best.name) or tokens
        size = best.compat.block_tokens
        return best.compat, min(held, tokens) // size * size

    def _reach_of(self, node: NodeId, compat: Compat) -> _Reach:
        if self._reach is None:
            self._reach = _reaches(self._used)
        return self._reach.get((node, compat), _Reach(False, False))


def pools_of(member: Member) -> list[Pool]:
    """The pools of a member, the first one first."""
    report = member.report
    if report is None:
        return []
    node = report.node
    return [Pool(NodeId(p.name or node), node, p.compat) for p in report.pools]


def _reaches(members: Collection[Member]) -> dict[tuple[NodeId, Compat], _Reach]:
    """Nodes whose first format is equal work together. Of each cluster, the formats that all of
    its nodes have."""
    common: dict[tuple[Compat, ClusterId], set[Compat]] = {}
    for member in members:
        if member.compat is not None:
            formats = set(member.compats)
            common[member.compat, member.cluster] = formats & common.get(
                (member.compat, member.cluster), formats
            )
    found: dict[tuple[NodeId, Compat], _Reach] = {}
    for member in members:
        first, node = member.compat, member.node
        if first is None or node is None:
            continue
        for compat in member.compats[1:]:
            others = [f for (c, at), f in common.items() if c == first and at != member.cluster]
            found[node, compat] = _Reach(
                in_cluster=compat in common[first, member.cluster],
                across=all(compat in formats for formats in others),
            )
    return found
