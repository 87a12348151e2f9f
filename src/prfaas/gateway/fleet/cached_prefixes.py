"""Names under which cache events arrive, and what each node has cached of a prompt.

A kvd's pool and the engine beside it publish events under different names; both count for their
node. The index of the events is the `GlobalKVManager`.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.cache.groups import rules_for
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.manager import GlobalKVManager, PromptMatch
from prfaas.contracts.kvd_api import spec_of
from prfaas.gateway.fleet.member import Member
from prfaas.scheduler.board import Board
from prfaas.types import NodeId


class CachedPrefixes:
    def __init__(self, manager: GlobalKVManager, board: Board) -> None:
        self._manager = manager
        self._board = board
        self._engines: dict[NodeId, NodeId] = {}  # an engine's event name -> its node

    def add(self, member: Member, name: NodeId) -> bool:
        """Makes room in the index for events under `name`, of the member's pool or of its engine.
        The index has no block of it until events arrive. Returns False when the member has not
        reported its pool yet, or when the name is another member's."""
        report = member.report
        if report is None or report.pool is None or report.node not in self._board:
            return False
        if name == report.node:
            self._engines.pop(name, None)  # a node's own name takes precedence
        elif name in self._board or self._engines.get(name, report.node) != report.node:
            return False
        else:
            self._engines[name] = report.node
        rules = rules_for(spec_of(report.pool.groups))
        self._manager.join(NodeInfo(name, member.cluster, report.pool.block_tokens, rules))
        return True

    def owns(self, member: Member, name: NodeId) -> bool:
        """Whether events under `name` are of this member."""
        node = member.node
        if node is None or name == node:
            return node is not None
        return self._engines.get(name) == node and name not in self._board

    def forget(self, member: Member, name: NodeId) -> None:
        """Drops what the index has under a name of the member."""
        if self.owns(member, name):
            self._manager.leave(name)
            self._engines.pop(name, None)

    def remove(self, node: NodeId) -> None:
        self._manager.leave(node)
        for engine in [e for e, at in self._engines.items() if at == node]:
            self._manager.leave(engine)
            del self._engines[engine]

    def by_node(self, match: PromptMatch) -> Mapping[NodeId, NodeMatch]:
        """What each node holds: its kvd's pool and its engine's own cache. The latter saves
        compute, but no bytes of a hand-off."""
        found = dict(match.nodes)
        for engine, node in self._engines.items():
            own = found.pop(engine, None)
            if own is not None:
                pool = found.get(node, NodeMatch(0, 0))
                found[node] = NodeMatch(max(pool.tokens, own.tokens), pool.attention_tokens)
        return found
