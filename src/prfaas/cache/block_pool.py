"""The pages of a pool: allocation, reference counts, and which blocks are idle.

    free pages --allocate--> in use (refs > 0) --release--> idle (refs = 0, kept)  --evict--> free
                               |  ▲        ▲                  |         '--start_leaving--> leaving
                               |  |        '------ pin -------'                      leave |  |
                               |  '------------------- stay -------------------------------|--'
                               '--------------- release, not kept -------------> free <----'

A `Block` is one unit (a logical block or a state) on k pages. Kept blocks belong to a prefix and
stay when no lease uses them; the eviction policy decides which idle block is evicted first. The
arena has the bytes, the tree has the block hashes.

Answers that are being written have a number of pages of their own (`SetAside`): reservations of
others cannot count on them, so that no reservation fails because an answer is being written. Idle
prefixes use these pages until an answer needs them, so that they are not lost to the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.cache.blocks import COMMON, Block, Eviction
from prfaas.cache.storage.page_supply import PageSupply
from prfaas.cache.tenants import TenantShares

if TYPE_CHECKING:
    from prfaas.cache.storage.budget import BudgetShare


@dataclass(slots=True)
class SetAside:
    """How many pages answers may have while they are written, and how many they have now."""

    limit_pages: int = 0
    used_pages: int = 0

    @property
    def left_pages(self) -> int:
        return self.limit_pages - self.used_pages


class BlockPool:
    """`capacity_pages` of None means unlimited (for replays; no arena can back it). With a `share`
    of a budget the pool has at most what the budget leaves it."""

    def __init__(
        self, capacity_pages: int | None, eviction: Eviction, share: BudgetShare | None = None
    ) -> None:
        self.supply = PageSupply(capacity_pages, share)
        self.aside = SetAside()
        self.tenants = TenantShares(eviction)
        self._live: dict[int, Block] = {}  # every block with pages, by identity
        self._idle: dict[int, Block] = {}
        self._leaving: dict[int, Block] = {}  # oldest first
        self.idle_pages = 0
        self.leaving_pages = 0
        self.used_pages = 0
        self.pages_by_group: Counter[int] = Counter()

    @property
    def capacity_pages(self) -> int | None:
        return self.supply.capacity_pages

    @property
    def free_pages(self) -> int | None:
        capacity = self.capacity_pages
        return None if capacity is None else capacity - self.used_pages

    def can_ever_hold(self, pages: int) -> bool:
        capacity = self.capacity_pages
        return capacity is None or pages <= capacity - self.aside.limit_pages

    def can_make_room(self, pages: int, *, answer: bool = False) -> bool:
        """Whether evicting idle blocks would free that many pages beside those that are left for
        answers, or with `answer` of those. Evicts nothing."""
        free, left = self.free_pages, self.aside.left_pages
        if answer and pages > left:
            return False
        if free is None or not pages:  # readers may have pinned more than the pool has for others
            return True
        possible = free + self.idle_pages + self.leaving_pages
        return pages <= (possible if answer else possible - left)

    def has_room(self, pages: int) -> bool:
        free = self.free_pages
        return free is None or pages <= free

    def allocate(self, units: Sequence[tuple[int, int]], tenant: str = COMMON) -> list[Block]:
        """Blocks of the tenant, in use by one holder, for units (group, pages), in the same order
        and as neighbours where possible. The caller has made room for all of them."""
        blocks = [Block(group, (), tenant) for group, _ in units]
        for block in blocks:
            block.refs = 1
        sizes = [pages for _, pages in units]
        self._take(blocks, sizes)
        if sizes:
            self.tenants.take(tenant, sum(sizes))
        return blocks

    def restore(self, blocks: Sequence[Block], pages: Sequence[int]) -> None:
        """Gives pages back to blocks that were spilled, each its number of pages, as neighbours
        where possible. The blocks must be in use."""
        assert all(block.refs > 0 and not block.pages for block in blocks), blocks
        self._take(blocks, pages)
        for block in blocks:
            self.tenants.take(block.tenant, len(block.pages))

    def pin(self, block: Block) -> None:
        if block.refs == 0 and self._idle.pop(id(block), None) is not None:
            self.idle_pages -= len(block.pages)
            self.tenants.busy(block)
        block.refs += 1

    def release(self, blocks: Iterable[Block], now: float) -> None:
        """One holder releases the blocks. Blocks without a holder are freed, or become idle when
        they belong to a prefix. Pass them in prompt order."""
        idle: list[Block] = []
        for block in blocks:
            assert block.refs > 0, block
            block.refs -= 1
            if block.refs:
                continue
            if block.node is None:
                if block.pages:  # none: it was on SSD when its node got another block
                    self._give_back(block)
            elif block.slot is None:
                self._idle[id(block)] = block
                self.idle_pages += len(block.pages)
                idle.append(block)
        if idle:
            self.tenants.idle(idle, now)

    def next_victims(self, now: float) -> Sequence[Block]:
        return self.tenants.victims(now) if self._idle else ()

    def evict(self, block: Block) -> None:
        """Frees an idle block's pages; its bytes are lost unless the caller has saved them."""
        del self._idle[id(block)]
        self.idle_pages -= len(block.pages)
        self.tenants.busy(block)
        self._give_back(block)

    def start_leaving(self, block: Block) -> None:
        """An idle block is being copied to another tier. It keeps its pages until `leave`."""
        del self._idle[id(block)]
        self.idle_pages -= len(block.pages)
        self.tenants.busy(block)
        self._leaving[id(block)] = block
        self.leaving_pages += len(block.pages)

    def oldest_leaving(self) -> Block | None:
        return next(iter(self._leaving.values()), None)

    def leave(self, block: Block) -> None:
        """Frees the pages of a leaving block."""
        del self._leaving[id(block)]
        self.leaving_pages -= len(block.pages)
        self._give_back(block)

    def stay(self, block: Block) -> None:
        """A leaving block is in use again, by one holder."""
        del self._leaving[id(block)]
        self.leaving_pages -= len(block.pages)
        block.refs = 1

    def live_blocks(self) -> Iterator[Block]:
        return iter(self._live.values())

    def check(self) -> None:
        """Every page is free or on exactly one block; every idle block is kept and unused."""
        self.tenants.check(self._live.values())
        seen: set[int] = set()
        for block in self._live.values():
            leaving = id(block) in self._leaving
            assert block.pages, f"a live block without pages: {block}"
            assert block.slot is None or leaving or block.refs, f"on SSD, with pages: {block}"
            assert seen.isdisjoint(block.pages), f"a page has two owners: {block}"
            seen.update(block.pages)
            assert (id(block) in self._idle) == (block.refs == 0 and not leaving), block
            assert not leaving or (block.refs == 0 and block.slot is not None), block
            assert block.refs > 0 or block.node is not None, f"idle but not kept: {block}"
        self.supply.check(seen)
        assert 0 <= self.aside.used_pages <= min(self.aside.limit_pages, self.used_pages)
        assert self.used_pages == len(seen)
        assert self.idle_pages == sum(len(block.pages) for block in self._idle.values())
        assert self.leaving_pages == sum(len(block.pages) for block in self._leaving.values())
        assert set(self._idle) <= set(self._live) and set(self._leaving) <= set(self._live)
        by_group = Counter[int]()
        for block in self._live.values():
            by_group[block.group] += len(block.pages)
        assert by_group == +self.pages_by_group

    def _take(self, blocks: Sequence[Block], pages: Sequence[int]) -> None:
        needed = sum(pages)
        assert self.has_room(needed), f"{needed} pages requested, {self.free_pages} free"
        self.used_pages += needed
        for block, taken in zip(blocks, self.supply.take(pages), strict=True):
            block.pages = taken
            self.pages_by_group[block.group] += len(taken)
            self._live[id(block)] = block

    def _give_back(self, block: Block) -> None:
        del self._live[id(block)]
        self.used_pages -= len(block.pages)
        self.pages_by_group[block.group] -= len(block.pages)
        self.tenants.give_back(block.tenant, len(block.pages))
        self.supply.give_back(block.pages)
        block.pages = ()
