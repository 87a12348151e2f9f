"""Which tier a kept block is on: pages in memory, a slot on SSD, or none any more.

    memory --evict--> leaving --written--> SSD --forget--> gone
       ▲                 │                  │
       ├──── needed ─────┘                  │
       └──────────── read back ─────────────┘

Nothing here reads or writes the SSD: that happens in jobs (`ssd_jobs`), which the pool's owner may
run in another thread. `make_room` never waits for a job: it drops blocks that are not on SSD yet.
Without an SSD an evicted block is gone at once. Every block that becomes a prefix, or is gone from
both tiers, is recorded in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prfaas.cache.block_pool import BlockPool
from prfaas.cache.blocks import Block, PrefixNode
from prfaas.cache.journal import Action
from prfaas.cache.lease import PoolStats
from prfaas.cache.storage.arena import Arena, PageLayout
from prfaas.cache.storage.budget import BudgetShare
from prfaas.cache.storage.ssd import Slot, SpillFile
from prfaas.cache.storage.ssd_jobs import JobQueue, ReadJob, SpillJob
from prfaas.cache.tenants import SpilledBlocks
from prfaas.cache.tree import PrefixTree

Record: TypeAlias = Callable[[Action, Block, PrefixNode], None]

# Of all jobs that have not finished. An SSD writes this much in about two seconds, and a request
# that has to wait longer for room is better served by dropping blocks.
MAX_QUEUED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class PoolStorage:
    """The memory and the SSD of one pool.

    Without an arena the pool counts pages but holds no bytes. `capacity_pages` of None means
    unlimited, which is for such pools only. `share`: of the memory that the pool has together with
    other ones.
    """

    layout: PageLayout
    capacity_pages: int | None
    arena: Arena | None = None
    ssd: SpillFile | None = None
    share: BudgetShare | None = None

    def __post_init__(self) -> None:
        assert self.ssd is None or self.arena is not None, "only real bytes can be spilled"
        if self.arena is not None:
            assert self.capacity_pages is not None and self.arena.pages >= self.capacity_pages
            assert self.arena.page_bytes == self.layout.page_bytes
        assert self.share is None or self.share.page_bytes == self.layout.page_bytes


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
        self._spilled = SpilledBlocks()
        self.jobs = JobQueue(max(1, MAX_QUEUED_BYTES // storage.layout.page_bytes))
        self._writing: dict[int, SpillJob] = {}  # by block, without the cancelled ones
        self._reading: dict[int, ReadJob] = {}  # by block

    @property
    def has_ssd(self) -> bool:
        return self._ssd is not None

    @property
    def spilled_units(self) -> int:
        return len(self._spilled)

    # Without the SSD ------------------------------------------------------------------------------

    def make_room(self, pages: int, tenant: str, now: float) -> None:
        """Evicts until `pages` pages are free, for this tenant, and drops what is not on SSD yet.
        The caller has checked that it is possible."""
        if self._blocks.has_room(pages):
            return
        with self._blocks.tenants.wanting(tenant, pages):
            while not self._blocks.has_room(pages):
                leaving = self._blocks.oldest_leaving()
                if leaving is not None:  # chosen as victims before all others
                    self._abandon(leaving)
                    continue
                victims = self._blocks.next_victims(now)
                assert victims, "the block pool counted idle pages that do not exist"
                for block in victims:
                    self._drop(block)

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
            if existing.filled_from < block.filled_from:
                return False
            self._replace_spilled(existing)
        self._tree.attach(node, block)
        if existing is None:
            self._record("stored", block, node)
        return True

    # Jobs -----------------------------------------------------------------------------------------

    def start_spills(self, now: float) -> bool:
        """Evicts the next victims to the SSD; their pages become free when the jobs have finished.
        A block that the SSD cannot take is dropped. False when the queue of jobs is full, or no
        block is idle."""
        if self._ssd is None or not self.jobs.has_room(1):
            return False
        victims = self._blocks.next_victims(now)
        for block in victims:
            self._start_spill(block, now)
        return bool(victims)

    def start_reads(self, blocks: Sequence[Block], free_pages: int) -> int:
        """Starts to read blocks on SSD back into memory, on at most `free_pages` pages, which exist
        and are neighbours where possible. Stops at the first block that does not fit, or for which
        the queue of jobs has no room. Returns the pages that were taken."""
        counts: list[int] = []
        taken = 0
        for block in blocks:
            count = self._layout.pages(block.group)
            if taken + count > free_pages or not self.jobs.has_room(count, after=taken):
                break
            counts.append(count)
            taken += count
        started = blocks[: len(counts)]
        for block in started:
            self._blocks.pin(block)  # until the job has finished, whatever becomes of the caller
        self._blocks.restore(started, counts)
        for block in started:
            self._start_read(block)
        return taken

    def hold(self, block: Block) -> None:
        """Pins a block of a prefix. One that is being written to the SSD stays in memory."""
        job = self._writing.get(id(block))
        if job is None:
            self._blocks.pin(block)
            return
        self._cancel(job)
        block.slot = None
        assert block.node is not None
        self._tree.resident(block.node, +1)
        self._blocks.stay(block)

    def check(self) -> None:
        held = [block for node in self._tree for block in node.blocks if block is not None]
        spilled = {id(block): block for block in held if block.slot is not None}
        on_ssd = {id(block) for block in self._spilled}
        assert set(spilled) == on_ssd | set(self._writing)
        assert not on_ssd & set(self._writing)
        self._spilled.check()
        for key, block in spilled.items():
            assert bool(block.pages) == (key in self._writing or key in self._reading), block
            assert block.refs == 0 or key not in self._writing, block
        owned = [block.slot.pages for block in self._spilled if block.slot is not None]
        owned += (
            job.pages
            for job in self.jobs
            if isinstance(job, SpillJob) or id(job.block) not in on_ssd
        )
        if self._ssd is not None:
            self._ssd.check(owned)

    def _start_read(self, block: Block) -> None:
        assert self._ssd is not None and self._arena is not None and block.slot is not None
        views = self._arena.views(block.pages)
        job = ReadJob(block, self._ssd, block.slot, views, self._finish_read)
        self._reading[id(block)] = job
        self.jobs.add(job)

    def _start_spill(self, block: Block, now: float) -> None:
        assert self._ssd is not None and self._arena is not None and block.node is not None
        count = len(block.pages)
        if count <= self._ssd.pages:
            while self._ssd.free_pages < count:
                other = self._spilled.next_to_forget(block.tenant, count, now)
                if other is None:
                    break
                self._forget(other)
        pages = self._ssd.take(count)
        if pages is None:
            self._drop(block)
            return
        views = self._arena.views(block.pages)
        self._blocks.start_leaving(block)
        block.slot = Slot(pages, b"")
        self._tree.resident(block.node, -1)
        job = SpillJob(block, self._ssd, pages, views, self._finish_spill)
        self._writing[id(block)] = job
        self.jobs.add(job)

    def _finish_spill(self, job: SpillJob, now: float) -> None:
        assert self._ssd is not None
        self.jobs.remove(job)
        block = job.block
        if job.cancelled:
            self._ssd.free(job.pages)
        elif job.digest is None:
            self._abandon(block)
            self._ssd.free(job.pages)
        else:
            del self._writing[id(block)]
            block.slot = Slot(job.pages, job.digest)
            self._blocks.leave(block)
            self._spilled.add(block, now)
            self._stats.spilled_blocks += 1

    def _finish_read(self, job: ReadJob, now: float) -> None:
        assert self._ssd is not None
        self.jobs.remove(job)
        block = job.block
        del self._reading[id(block)]
        if block.node is None:  # replaced while it was read
            self._ssd.free(job.pages)
            block.slot = None
        elif job.intact:
            self._spilled.remove(block)
            self._ssd.free(job.pages)
            block.slot = None
            self._tree.resident(block.node, +1)
            self._stats.promoted_blocks += 1
        else:
            self._forget(block)
            self._stats.unreadable_blocks += 1
        self._blocks.release([block], now)

    def _cancel(self, job: SpillJob) -> None:
        """The copy will not be used. The job keeps its pages of the file until it has finished."""
        job.cancelled = True
        del self._writing[id(job.block)]

    # Blocks that go -------------------------------------------------------------------------------

    def _drop(self, block: Block) -> None:
        """Evicts an idle block without a copy on SSD."""
        node = block.node
        assert node is not None
        self._blocks.evict(block)
        self._tree.detach(block)
        self._record_removal(block, node)
        if self._ssd is not None:
            self._stats.dropped_blocks += 1

    def _abandon(self, block: Block) -> None:
        """Drops a block that is being written to the SSD."""
        node = block.node
        assert node is not None
        self._cancel(self._writing[id(block)])
        self._tree.detach(block)
        block.slot = None
        self._blocks.leave(block)
        self._record_removal(block, node)
        self._stats.dropped_blocks += 1

    def _replace_spilled(self, block: Block) -> None:
        """The block's node gets a block that is as full, in memory."""
        self._tree.detach(block, prune=False)
        if (job := self._writing.get(id(block))) is not None:
            self._cancel(job)
            block.slot = None
            self._blocks.leave(block)
            return
        self._spilled.remove(block)
        if id(block) not in self._reading:  # else the job frees the slot
            assert self._ssd is not None and block.slot is not None
            self._ssd.free(block.slot.pages)
            block.slot = None

    def _forget(self, block: Block) -> None:
        """Drops a spilled block from SSD too."""
        node = block.node
        assert self._ssd is not None and node is not None and block.slot is not None
        self._tree.detach(block)
        self._spilled.remove(block)
        self._ssd.free(block.slot.pages)
        block.slot = None
        self._record_removal(block, node)

    def _record_removal(self, block: Block, node: PrefixNode) -> None:
        self._stats.evicted_blocks += 1
        self._record("removed", block, node)


def in_prompt_order(blocks: Iterable[Block]) -> list[Block]:
    """First block of the prompt first; blocks that are not part of a prefix before all."""
    return sorted(blocks, key=lambda block: block.node.depth if block.node is not None else 0)
