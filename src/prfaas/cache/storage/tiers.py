"""Which tier a kept block is on: pages in memory, a slot on SSD, or none any more.

    memory --evict--> SSD, where it has room or holds something older --forget--> gone
       '<---------------- read back, when a lease needs it

Without an SSD an evicted block is gone at once. Every block that becomes a prefix, or is gone from
both tiers, is recorded in the journal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from prfaas.cache.block_pool import Block, BlockPool
from prfaas.cache.journal import Action
from prfaas.cache.lease import PoolStats
from prfaas.cache.storage.arena import Arena, PageLayout
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.tree import PrefixNode, PrefixTree

Record: TypeAlias = Callable[[Action, Block, PrefixNode], None]


@dataclass(frozen=True, slots=True)
class PoolStorage:
    """The memory and the SSD of one pool.

    Without an arena the pool counts pages but holds no bytes. `capacity_pages` of None means
    unlimited, which is for such pools only.
    """

    layout: PageLayout
    capacity_pages: int | None
    arena: Arena | None = None
    ssd: SpillFile | None = None

    def __post_init__(self) -> None:
        assert self.ssd is None or self.arena is not None, "only real bytes can be spilled"
        if self.arena is not None:
            assert self.capacity_pages is not None and self.arena.pages >= self.capacity_pages
            assert self.arena.page_bytes == self.layout.page_bytes


class CacheTiers:
    def __init__(
        self,
        storage: PoolStorage,
        blocks: BlockPool,
        tree: PrefixTree,
        stats: PoolStats,
        record: Record,
    ) -> None:
        self._layout = storage.layout
        self._arena = storage.arena
        self._ssd = storage.ssd
        self._blocks = blocks
        self._tree = tree
        self._stats = stats
        self._record = record
        self._spilled: OrderedDict[int, Block] = OrderedDict()  # oldest spill first

    @property
    def spilled_units(self) -> int:
        return len(self._spilled)

    def make_room(self, pages: int, now: float) -> None:
        """Evicts until `pages` pages are free. The caller has checked that it is possible."""
        while not self._blocks.has_room(pages):
            victims = self._blocks.next_victims(now)
            assert victims, "the block pool counted idle pages that do not exist"
            for block in victims:
                self._evict(block)

    def read_back(self, pinned: Iterable[Block], now: float) -> bool:
        """Brings pinned blocks into memory. False when one of them was unreadable: the tiers have
        then forgotten that one and released all of `pinned`."""
        pinned = list(pinned)
        for block in pinned:
            if block.slot is None:
                continue
            assert self._ssd is not None and self._arena is not None
            self._blocks.restore(block, self._layout.pages(block.group))
            if not self._ssd.read(block.slot, self._arena.views(block.pages)):
                self._forget(block)
                self._stats.unreadable_blocks += 1
                self._blocks.release(in_prompt_order(pinned), now)
                return False
            del self._spilled[id(block)]
            self._ssd.free(block.slot)
            block.slot = None
            assert block.node is not None
            self._tree.resident(block.node, +1)
            self._stats.promoted_blocks += 1
        return True

    def keep(self, block: Block, node: PrefixNode) -> bool:
        """Makes a written block the node's, unless the node has one that is as full."""
        existing = node.blocks[block.group]
        if existing is not None and existing.slot is None:
            if existing.filled_from <= block.filled_from:
                return False
            if existing.refs == 0:
                self._blocks.evict(existing)
            self._tree.detach(existing, prune=False)  # its readers keep it until they release it
        elif existing is not None:
            assert self._ssd is not None and existing.slot is not None
            if existing.filled_from < block.filled_from:
                return False
            self._tree.detach(existing, prune=False)
            del self._spilled[id(existing)]
            self._ssd.free(existing.slot)
            existing.slot = None
        self._tree.attach(node, block)
        if existing is None:
            self._record("stored", block, node)
        return True

    def check(self) -> None:
        spilled = [b for node in self._tree for b in node.blocks if b is not None and b.slot]
        assert {id(block) for block in spilled} == set(self._spilled)
        assert all(block.refs == 0 and not block.pages for block in spilled)
        if self._ssd is not None:
            self._ssd.check()

    def _evict(self, block: Block) -> None:
        """Moves an idle block to SSD where that has room or something older, else drops it."""
        node = block.node
        assert node is not None
        slot = None
        if self._ssd is not None and self._arena is not None:
            count = len(block.pages)
            while self._ssd.free_pages < count and (oldest := self._oldest_spill()) is not None:
                self._forget(oldest)
            slot = self._ssd.write(self._arena.views(block.pages))
        self._blocks.evict(block)
        if slot is not None:
            block.slot = slot
            self._tree.resident(node, -1)
            self._spilled[id(block)] = block
            self._stats.spilled_blocks += 1
        else:
            self._tree.detach(block)
            self._record_removal(block, node)

    def _oldest_spill(self) -> Block | None:
        """The oldest spilled block that no lease is about to read back."""
        return next((block for block in self._spilled.values() if not block.refs), None)

    def _forget(self, block: Block) -> None:
        """Drops a spilled block from SSD too."""
        node = block.node
        assert self._ssd is not None and node is not None and block.slot is not None
        self._tree.detach(block)
        del self._spilled[id(block)]
        self._ssd.free(block.slot)
        block.slot = None
        self._record_removal(block, node)

    def _record_removal(self, block: Block, node: PrefixNode) -> None:
        self._stats.evicted_blocks += 1
        self._record("removed", block, node)


def in_prompt_order(blocks: Iterable[Block]) -> list[Block]:
    """First block of the prompt first; blocks that are not part of a prefix before all."""
    return sorted(blocks, key=lambda block: block.node.depth if block.node is not None else 0)
