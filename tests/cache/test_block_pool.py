from __future__ import annotations

import pytest

from prfaas.cache.block_pool import BlockPool
from prfaas.cache.blocks import Block
from prfaas.cache.eviction import LRU
from prfaas.cache.tree import PrefixTree
from prfaas.types import BlockHash


def kept(pool: BlockPool, tree: PrefixTree, name: bytes, pages: int = 1) -> Block:
    (block,) = pool.allocate([(0, pages)])
    tree.attach(tree.add(BlockHash(name), None), block)
    return block


def test_pages_come_fresh_then_reused_as_neighbours() -> None:
    pool = BlockPool(6, LRU())
    first, second = pool.allocate([(0, 2), (1, 3)])
    assert (first.pages, second.pages) == ((0, 1), (2, 3, 4))
    assert pool.free_pages == 1
    pool.release([second], now=0.0)
    assert pool.free_pages == 4
    assert pool.allocate([(0, 3)])[0].pages == (2, 3, 4)
    assert pool.pages_by_group == {0: 5, 1: 0}
    pool.check()


def test_what_nobody_keeps_is_freed_at_the_last_release() -> None:
    pool = BlockPool(2, LRU())
    (block,) = pool.allocate([(0, 2)])
    pool.pin(block)
    pool.release([block], now=0.0)
    assert pool.free_pages == 0
    pool.release([block], now=0.0)
    assert pool.free_pages == 2
    pool.check()


def test_kept_blocks_wait_idle_and_can_be_taken_again() -> None:
    pool, tree = BlockPool(2, LRU()), PrefixTree(1)
    block = kept(pool, tree, b"a", 2)
    pool.release([block], now=0.0)
    assert (pool.free_pages, pool.idle_pages) == (0, 2)
    assert pool.can_make_room(2) and not pool.has_room(1)
    assert pool.next_victims(0.0) == (block,)
    pool.pin(block)
    assert (pool.idle_pages, pool.next_victims(0.0)) == (0, ())
    assert not pool.can_make_room(1)
    pool.check()


def test_evicting_frees_the_pages() -> None:
    pool, tree = BlockPool(2, LRU()), PrefixTree(1)
    block = kept(pool, tree, b"a")
    pool.release([block], now=0.0)
    pool.evict(block)
    tree.detach(block)
    assert (pool.free_pages, pool.idle_pages, block.pages) == (2, 0, ())
    pool.check()


def test_capacity_questions() -> None:
    pool = BlockPool(3, LRU())
    pool.allocate([(0, 2)])
    assert pool.can_ever_hold(3) and not pool.can_ever_hold(4)
    assert pool.has_room(1) and not pool.has_room(2)
    endless = BlockPool(None, LRU())
    endless.allocate([(0, 10**6)])
    assert endless.free_pages is None
    assert endless.has_room(10**9) and endless.can_make_room(10**9) and endless.can_ever_hold(10**9)


def test_check_sees_broken_books() -> None:
    for break_it in (
        lambda pool, block: setattr(block, "refs", 0),
        lambda pool, block: setattr(pool, "used_pages", 0),
        lambda pool, block: setattr(block, "pages", (0, 0)),
        lambda pool, block: setattr(block, "pages", (0,)),
        lambda pool, block: setattr(pool, "idle_pages", 1),
        lambda pool, block: pool.supply.give_back((0,)),
        lambda pool, block: setattr(pool.supply, "most_pages", 1),
        lambda pool, block: pool.pages_by_group.clear(),
    ):
        pool = BlockPool(4, LRU())
        (block,) = pool.allocate([(0, 2)])
        pool.check()
        break_it(pool, block)
        with pytest.raises(AssertionError):
            pool.check()
