"""What the nodes hold of one prompt: groups of nodes that hold the same, each a set of numbers.

A popular prefix is on most nodes, but the number of different lengths is bounded by the length of
the prompt. So routing compares one node of every group, and not every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from prfaas.types import NodeId

EVERY_NODE = -1  # a set that has all nodes


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


class Holders(NamedTuple):
    """Nodes that hold the same of a prompt. No node is in two groups of one prompt."""

    prefix: CachedPrefix
    nodes: int  # a set of numbers


class CachedPrefixes(Mapping[NodeId, CachedPrefix]):
    """Also a mapping from the nodes, which costs more: for people and for tests."""

    __slots__ = ("groups", "numbers")

    def __init__(self, groups: Iterable[Holders], numbers: Mapping[NodeId, int]) -> None:
        """`numbers`: of every node that may hold something. Equal numberings are one object."""
        self.groups = tuple(groups)
        self.numbers = numbers

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __getitem__(self, node: NodeId) -> CachedPrefix:
        number = self.numbers[node]
        for prefix, nodes in self.groups:
            if nodes >> number & 1:
                return prefix
        raise KeyError(node)

    def __iter__(self) -> Iterator[NodeId]:
        held = 0
        for _, nodes in self.groups:
            held |= nodes
        return (node for node, number in self.numbers.items() if held >> number & 1)

    def __len__(self) -> int:
        return sum(1 for _ in self)


NOTHING_CACHED = CachedPrefixes((), {})


def group_prefixes(
    held: Mapping[NodeId, CachedPrefix], numbers: Mapping[NodeId, int] | None = None
) -> CachedPrefixes:
    """Groups the nodes by what they hold. Without `numbers`, the nodes are numbered in order."""
    if not held:
        return NOTHING_CACHED
    if numbers is None:
        numbers = {node: number for number, node in enumerate(held)}
    groups: dict[tuple[int | None, ...], Holders] = {}
    for node, prefix in held.items():
        number = numbers.get(node)
        if number is None:
            continue  # a node that the router does not know
        kind = (
            prefix.tokens,
            prefix.attention_tokens,
            prefix.pool_tokens,
            prefix.remote_pool_tokens,
        )
        known = groups.get(kind)
        nodes = 1 << number
        groups[kind] = Holders(prefix, nodes if known is None else known.nodes | nodes)
    return CachedPrefixes(groups.values(), numbers)
