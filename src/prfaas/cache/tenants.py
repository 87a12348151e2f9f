"""Whose idle blocks are evicted next: the tenants of a pool have equal shares of it. Pure.

Blocks belong to the tenant for which they were written first. Tenants are known by opaque tags;
blocks without one belong to the `COMMON` tenant. When pages are wanted, the tenant with the most
pages loses idle blocks, in the order of its own policy. In a full pool that tenant has its share or
more, so a tenant below its share loses nothing while any other tenant has idle blocks above:

    pages  A ############----   A wants 4 more: it loses 4 of its own, B and C lose none.
           B ######             B wants 4 more: A loses 4, because it would still have the most.
           C ##                 What C leaves of its share is for A and B alike.

The pages that a reservation wants count as its tenant's while room is made for them. A tenant that
is alone may fill the pool, and one that has used nothing for `SHARE_S` has no share any more: else
the pages of tenants that have left would be lost to all others. Blocks in use are never evicted,
whatever the share: the gateways bound how many requests of a tenant run.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from prfaas.cache.blocks import COMMON, Block, Eviction

# With pages in memory. Further tenants have one share together: a client that could make up tenants
# would otherwise make the work of a choice and the shares of others as small as it likes.
MAX_TENANTS = 1_024
SHARE_S = 3_600.0
STALE_ENTRIES = 64  # outdated heap entries allowed beyond one per tenant


class TenantShares:
    """The pages of each tenant in memory, and its idle blocks. `policy` orders the blocks of the
    common tenant, and others like it those of each other tenant."""

    def __init__(self, policy: Eviction) -> None:
        self._policy = policy
        self._queues: dict[str, Eviction] = {COMMON: policy}
        self._pages: dict[str, int] = {}
        # Tenants with idle blocks, and perhaps some whose blocks are all in use again. The last use
        # of each, oldest first.
        self._used_s: OrderedDict[str, float] = OrderedDict()
        # Of the tenants in `_used_s`, most pages first. `_filed` has the entry that counts. It has
        # as many pages as the tenant, or more: `_next` corrects it.
        self._largest: list[tuple[int, str]] = []
        self._filed: dict[str, int] = {}

    def owner(self, tag: str) -> str:
        """The tenant to which blocks that come under this tag belong. All blocks have the same
        string: each message has one of its own."""
        known = tag in self._pages or len(self._pages) < MAX_TENANTS
        return sys.intern(tag) if known else COMMON

    # Pages ----------------------------------------------------------------------------------------

    def take(self, tenant: str, pages: int) -> None:
        held = self._pages[tenant] = self._pages.get(tenant, 0) + pages
        if held > self._filed.get(tenant, held):
            self._file(tenant, held)

    def give_back(self, tenant: str, pages: int) -> None:
        held = self._pages[tenant] - pages
        if held:
            self._pages[tenant] = held
            return
        del self._pages[tenant]
        self._withdraw(tenant)
        if tenant != COMMON:
            self._queues.pop(tenant, None)

    @contextmanager
    def wanting(self, tenant: str, pages: int) -> Iterator[None]:
        """Within the block these pages count as the tenant's, and one more: of two tenants with
        equally many pages, the one that wants pages loses some."""
        self.take(tenant, pages + 1)
        try:
            yield
        finally:
            self.give_back(tenant, pages + 1)

    # Idle blocks ----------------------------------------------------------------------------------

    def idle(self, blocks: Sequence[Block], now: float) -> None:
        """As of `Eviction`; the blocks may be of several tenants."""
        if len(self._pages) == 1:  # usual: all blocks are of one tenant
            self._idle(blocks[0].tenant, blocks, now)
            return
        for tenant in dict.fromkeys(block.tenant for block in blocks):
            self._idle(tenant, [block for block in blocks if block.tenant == tenant], now)

    def busy(self, block: Block) -> None:
        self._queues[block.tenant].busy(block)

    def victims(self, now: float) -> Sequence[Block]:
        tenant = self._next(now)
        return () if tenant is None else self._queues[tenant].victims(now)

    def admits(
        self, tenant: str, new_tokens: int, cached_tokens: int, nbytes: int, now: float
    ) -> bool:
        """As of `Eviction`, for an answer of this tenant, which `wanting` counts already. An answer
        is no reason to evict blocks of a tenant that has fewer pages."""
        loser = self._next(now)
        if loser is None or loser == tenant:
            queue = self._queues.get(tenant, self._policy)
            return queue.admits(new_tokens, cached_tokens, nbytes, now)
        return self._is_past(loser, now) or self._pages[loser] > self._pages.get(tenant, 0)

    def check(self, blocks: Iterable[Block]) -> None:
        """`blocks`: all that have pages."""
        pages = Counter[str]()
        for block in blocks:
            pages[block.tenant] += len(block.pages)
        assert pages == self._pages, (pages, self._pages)
        assert self._queues.keys() <= {COMMON, *self._pages}
        assert self._used_s.keys() == self._filed.keys() <= self._pages.keys()
        assert list(self._used_s.values()) == sorted(self._used_s.values())
        assert all(self._pages[tenant] <= filed for tenant, filed in self._filed.items())
        assert {(-filed, tenant) for tenant, filed in self._filed.items()} <= {*self._largest}
        assert len(self._largest) <= 2 * len(self._filed) + STALE_ENTRIES
        for tenant, queue in self._queues.items():
            queue.check()
            assert not len(queue) or tenant in self._used_s, f"{tenant!r} would never be evicted"

    def _idle(self, tenant: str, blocks: Sequence[Block], now: float) -> None:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = self._policy.another()
        queue.idle(blocks, now)
        if self._used_s:  # a clock that goes back must not disturb the order
            now = max(now, next(reversed(self._used_s.values())))
        self._used_s[tenant] = now
        self._used_s.move_to_end(tenant)
        if tenant not in self._filed:
            self._file(tenant, self._pages[tenant])

    def _next(self, now: float) -> str | None:
        """The tenant that loses blocks next. None when no block is idle."""
        while self._used_s:
            tenant = next(iter(self._used_s))
            if len(self._used_s) > 1 and not self._is_past(tenant, now):
                tenant = self._tenant_with_most()
            if len(self._queues[tenant]):
                return tenant
            self._withdraw(tenant)
        return None

    def _tenant_with_most(self) -> str:
        while True:
            entry, tenant = self._largest[0]
            if self._filed.get(tenant) != -entry:
                heapq.heappop(self._largest)
            elif (pages := self._pages[tenant]) < -entry:
                self._filed[tenant] = pages
                heapq.heapreplace(self._largest, (-pages, tenant))
            else:
                return tenant

    def _is_past(self, tenant: str, now: float) -> bool:
        return now - self._used_s[tenant] > SHARE_S

    def _file(self, tenant: str, pages: int) -> None:
        self._filed[tenant] = pages
        heapq.heappush(self._largest, (-pages, tenant))
        if len(self._largest) > 2 * len(self._filed) + STALE_ENTRIES:
            self._largest = [(-filed, tenant) for tenant, filed in self._filed.items()]
            heapq.heapify(self._largest)

    def _withdraw(self, tenant: str) -> None:
        self._used_s.pop(tenant, None)
        self._filed.pop(tenant, None)


class SpilledBlocks:
    """The blocks on SSD, by tenant: there, too, the tenant with the most pages loses some first,
    those that were spilled first. A block is written to the SSD for each choice, so that a walk
    over the tenants costs nothing beside it."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[int, Block]] = {}
        self._pages: dict[str, int] = {}
        self._used_s: dict[str, float] = {}  # the latest spill
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def __iter__(self) -> Iterator[Block]:
        return (block for queue in self._queues.values() for block in queue.values())

    def __contains__(self, block: Block) -> bool:
        return id(block) in self._queues.get(block.tenant, ())

    def add(self, block: Block, now: float) -> None:
        """A block that has no pages in memory any more."""
        assert block.slot is not None
        if block.tenant not in self._queues and len(self._queues) >= MAX_TENANTS:
            block.tenant = COMMON
        tenant = block.tenant
        self._queues.setdefault(tenant, OrderedDict())[id(block)] = block
        self._pages[tenant] = self._pages.get(tenant, 0) + len(block.slot.pages)
        self._used_s[tenant] = now
        self._blocks += 1

    def remove(self, block: Block) -> None:
        assert block.slot is not None
        tenant = block.tenant
        del self._queues[tenant][id(block)]
        self._pages[tenant] -= len(block.slot.pages)
        self._blocks -= 1
        if not self._queues[tenant]:
            del self._queues[tenant], self._pages[tenant], self._used_s[tenant]

    def next_to_forget(self, tenant: str, pages: int, now: float) -> Block | None:
        """For a block of this tenant, with so many pages. Not one that a request is about to read
        back; None when there is no other."""

        def loses(other: str) -> tuple[bool, int]:
            wanted = pages + 1 if other == tenant else 0
            return now - self._used_s[other] > SHARE_S, self._pages[other] + wanted

        for other in sorted(self._queues, key=loses, reverse=True):
            for block in self._queues[other].values():
                if not block.refs:
                    return block
        return None

    def check(self) -> None:
        pages = {
            tenant: sum(len(block.slot.pages) for block in queue.values() if block.slot is not None)
            for tenant, queue in self._queues.items()
        }
        assert pages == self._pages and pages.keys() == self._used_s.keys()
        assert self._blocks == sum(map(len, self._queues.values()))
        assert all(b.tenant == tenant for tenant, q in self._queues.items() for b in q.values())
