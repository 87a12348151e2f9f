"""Roles that the nodes of the PD cluster have now, and the nodes that drain before they change.

The plan has the roles that the nodes should have; this module has their roles now. Bookkeeping
only; `Fleet` changes it.
"""

from __future__ import annotations

from prfaas.scheduler.plan import Role
from prfaas.types import NodeId


class Roles:
    def __init__(self) -> None:
        self._roles: dict[NodeId, Role] = {}
        self._draining: set[NodeId] = set()

    def of(self, node: NodeId) -> Role | None:
        """None until the node is assigned its first role."""
        return self._roles.get(node)

    @property
    def draining(self) -> frozenset[NodeId]:
        return frozenset(self._draining)

    def is_draining(self, node: NodeId) -> bool:
        return node in self._draining

    def assign(self, node: NodeId, role: Role) -> None:
        """The node has this role now, and does not drain any more."""
        self._roles[node] = role
        self._draining.discard(node)

    def drain(self, node: NodeId) -> None:
        self._draining.add(node)

    def remove(self, node: NodeId) -> None:
        self._roles.pop(node, None)
        self._draining.discard(node)
