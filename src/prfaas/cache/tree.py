"""The prefix tree: one node per block hash, with the block that each group holds at that length.

A flat dictionary suffices because hashes are chained: finding a node needs no walk, and only the
policies follow parents. A node stays while it holds a block or has children, so a parent without
blocks stays as long as its children.
"""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.cache.blocks import Block, PrefixNode
from prfaas.types import BlockHash


class PrefixTree:
    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._nodes: dict[BlockHash, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def get(self, name: BlockHash) -> PrefixNode | None:
        return self._nodes.get(name)

    def add(
        self, name: BlockHash, parent: PrefixNode | None, *, answer: bool = False
    ) -> PrefixNode:
        """The node of that name, made under `parent` when there is none yet: for an answer, or for
        a prompt."""
        node = self._nodes.get(name)
        if node is None:
            node = PrefixNode(name, parent, self._groups)
            node.answer = answer
            self._nodes[name] = node
            if parent is not None:
                parent.children += 1
        elif node.answer and not answer:
            self.continued(node)
        return node

    def continued(self, node: PrefixNode | None) -> None:
        """A prompt contains the prefix of this node: it is no longer only an answer's."""
        while node is not None and node.answer:
            node.answer = False
            if node.parent is not None and node.resident:
                node.parent.resident_answers -= 1
            node = node.parent

    def attach(self, node: PrefixNode, block: Block) -> None:
        assert node.blocks[block.group] is None and block.node is None
        node.blocks[block.group] = block
        block.node = node
        if block.slot is None:
            self.resident(node, +1)

    def detach(self, block: Block, *, prune: bool = True) -> None:
        """Removes the block from its prefix, and prunes empty nodes unless the caller is about to
        fill this one again."""
        node = block.node
        assert node is not None and node.blocks[block.group] is block
        node.blocks[block.group] = None
        block.node = None
        if block.slot is None:
            self.resident(node, -1)
        if prune:
            self.prune(node)

    def prune(self, node: PrefixNode | None) -> None:
        while node is not None and not node.children and not any(node.blocks):
            del self._nodes[node.hash]
            if node.parent is not None:
                node.parent.children -= 1
            node = node.parent

    def resident(self, node: PrefixNode, change: int) -> None:
        """One block more or fewer of `node` is in memory: updates the ancestors' counts."""
        before = node.resident
        node.resident_blocks += change
        parent = node.parent
        while before != node.resident and parent is not None:
            change = 1 if node.resident else -1
            before = parent.resident
            parent.resident_children += change
            if node.answer:
                parent.resident_answers += change
            node, parent = parent, parent.parent

    def check(self) -> None:
        children = dict.fromkeys(self._nodes, 0)
        resident_children = dict.fromkeys(self._nodes, 0)
        resident_answers = dict.fromkeys(self._nodes, 0)
        for name, node in self._nodes.items():
            assert node.hash == name
            assert node.children or any(node.blocks), f"an empty node was not pruned: {node}"
            held = [block for block in node.blocks if block is not None]
            assert all(block.node is node for block in held)
            assert node.resident_blocks == sum(block.slot is None for block in held), node
            if node.parent is not None:
                assert self._nodes.get(node.parent.hash) is node.parent, f"{node} lost its parent"
                assert node.depth == node.parent.depth + 1
                children[node.parent.hash] += 1
                resident_children[node.parent.hash] += node.resident
                resident_answers[node.parent.hash] += node.resident and node.answer
        for name, node in self._nodes.items():
            assert node.children == children[name], node
            assert node.resident_children == resident_children[name], node
            assert node.resident_answers == resident_answers[name], node
