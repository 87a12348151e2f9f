from __future__ import annotations

import pytest

from prfaas.cache.blocks import Block, PrefixNode
from prfaas.cache.storage.ssd import Slot
from prfaas.cache.tree import PrefixTree
from prfaas.types import BlockHash


def chain(tree: PrefixTree, names: str) -> list[PrefixNode]:
    nodes: list[PrefixNode] = []
    for name in names:
        parent = nodes[-1] if nodes else None
        nodes.append(tree.add(BlockHash(name.encode()), parent))
    return nodes


def put(tree: PrefixTree, node: PrefixNode, group: int = 0) -> Block:
    block = Block(group, (0,))
    tree.attach(node, block)
    return block


def test_depths_and_children() -> None:
    tree = PrefixTree(2)
    a, b = chain(tree, "ab")
    (_, c) = chain(tree, "ac")
    blocks = [put(tree, node) for node in (a, b, c)]
    assert [node.depth for node in (a, b, c)] == [1, 2, 2]
    assert (a.children, a.resident_children) == (2, 2)
    tree.check()
    tree.detach(blocks[1])
    assert (a.children, a.resident_children, tree.get(BlockHash(b"b"))) == (1, 1, None)
    tree.check()


def test_a_parent_outlives_its_own_blocks() -> None:
    tree = PrefixTree(1)
    a, b = chain(tree, "ab")
    above, below = put(tree, a), put(tree, b)
    tree.detach(above)
    assert len(tree) == 2 and a.resident
    tree.check()
    tree.detach(below)
    assert len(tree) == 0
    tree.check()


def test_spilled_blocks_are_held_but_not_resident() -> None:
    tree = PrefixTree(1)
    a, b, c = chain(tree, "abc")
    put(tree, a)
    spilled = put(tree, c)
    tree.prune(b)  # has a child: stays
    assert a.resident_children == 1
    spilled.slot = Slot((0,), b"")
    tree.resident(c, -1)
    assert not c.resident and not b.resident and a.resident_children == 0
    tree.check()
    tree.detach(spilled)
    assert len(tree) == 1
    tree.check()


def test_check_sees_broken_books() -> None:
    for break_it in (
        lambda a, b: setattr(a, "children", 0),
        lambda a, b: setattr(a, "resident_children", 0),
        lambda a, b: setattr(b, "resident_blocks", 0),
        lambda a, b: setattr(b, "depth", 7),
        lambda a, b: b.blocks.__setitem__(0, None),
    ):
        tree = PrefixTree(1)
        a, b = chain(tree, "ab")
        put(tree, a)
        put(tree, b)
        tree.check()
        break_it(a, b)
        with pytest.raises(AssertionError):
            tree.check()
