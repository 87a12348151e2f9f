"""Prepares a reservation in a pool with an SSD tier, so that the reservation itself needs no SSD.

    prepare ──► next_jobs ──► the owner runs and finishes the jobs ──┐ until there are no more jobs
                    ▲────────────────────────────────────────────────┘
    reserve or pin, then end

The jobs read back the blocks of the prefix that are on SSD, and write victims to the SSD until
there is room. Until `end` the preparation holds the prefix in memory. The room is promised and not
held: younger preparations do not count on it, but a reservation that needs pages takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import TypeAlias

from prfaas.cache.block_pool import BlockPool
from prfaas.cache.blocks import Block
from prfaas.cache.storage.arena import PageLayout
from prfaas.cache.storage.ssd_jobs import SsdJob
from prfaas.cache.storage.tiers import CacheTiers, in_prompt_order

# The blocks of the prefix, on either tier, and the pages that the reservation adds.
Survey: TypeAlias = Callable[[], tuple[Iterable[Block], int]]


class Promises:
    """The pages that the preparations of a pool count on, and the blocks that they hold."""

    def __init__(self, tiers: CacheTiers, blocks: BlockPool, layout: PageLayout) -> None:
        self.tiers = tiers
        self.blocks = blocks
        self.layout = layout
        self.active: dict[Preparation, None] = {}  # oldest first

    def free_pages(self, preparation: Preparation) -> int:
        """Free pages that no older preparation needs: the older ones get leaving pages first."""
        return self._free() - max(0, self._older(preparation) - self.blocks.leaving_pages)

    def coming_pages(self, preparation: Preparation) -> int:
        """Free pages, and those that running jobs will free, without what older ones need."""
        return self._free() + self.blocks.leaving_pages - self._older(preparation)

    def _free(self) -> int:
        free = self.blocks.free_pages
        assert free is not None, "a pool with an SSD is limited"
        return free

    def _older(self, preparation: Preparation) -> int:
        """Two preparations that both yielded to the other would both get nothing."""
        older = takewhile(lambda other: other is not preparation, self.active)
        return sum(other.promised_pages for other in older)


class Preparation:
    def __init__(self, promises: Promises, survey: Survey, tenant: str) -> None:
        self.promised_pages = 0
        self._tenant = tenant  # who wants the room
        self.held: list[Block] = []
        self._promises = promises
        self._survey = survey
        promises.active[self] = None

    def next_jobs(self, now: float) -> list[SsdJob]:
        """The jobs that must finish before the next call, oldest first; some of them may belong to
        other preparations. None: everything is ready, or waiting would not help."""
        tiers, blocks = self._promises.tiers, self._promises.blocks
        layout = self._promises.layout
        new_pages = self._hold(now)
        to_read = [b for b in self.held if b.slot is not None and not b.pages]
        needed = new_pages + sum(layout.pages(block.group) for block in to_read)
        self.promised_pages = 0
        if not blocks.can_make_room(needed):
            return []  # the reservation will be refused, or finds a shorter prefix
        before = len(tiers.jobs)
        needed -= tiers.start_reads(to_read, self._promises.free_pages(self))
        with blocks.tenants.wanting(self._tenant, needed):
            while self._promises.coming_pages(self) < needed:
                if not tiers.start_spills(now):
                    break
        self.promised_pages = needed
        on_ssd = any(block.slot is not None for block in self.held)
        started = len(tiers.jobs) > before  # they must be run, although there may be room already
        if started or on_ssd or self._promises.free_pages(self) < needed:
            return list(tiers.jobs)
        return []

    def end(self, now: float) -> None:
        """Releases the prefix and the promise. Idempotent."""
        self._promises.active.pop(self, None)
        held, self.held = self.held, []
        self._promises.blocks.release(in_prompt_order(held), now)

    def _hold(self, now: float) -> int:
        """Looks the prefix up again, because it may have changed, and holds what it consists of."""
        found, new_pages = self._survey()
        # A caller may send one hash twice, which finds one block twice.
        before, self.held = self.held, list(dict.fromkeys(found))
        for block in self.held:
            self._promises.tiers.hold(block)
        self._promises.blocks.release(in_prompt_order(before), now)
        return new_pages
