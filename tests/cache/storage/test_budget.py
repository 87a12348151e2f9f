"""Memory that several pools share: no pool takes what another one was promised."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.cache.block_pool import BlockPool
from prfaas.cache.eviction import LRU
from prfaas.cache.groups import unit_bytes
from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.budget import GUARANTEED_PARTS, BudgetShare, MemoryBudget
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.types import NotNow
from tests.cache.builders import BLOCK, SEEDED, SPECS, hashes_of, make_pool


@given(nbytes=st.integers(1, 10_000), page_bytes=st.integers(1, 10_000))
@settings(SEEDED)
def test_a_single_member_has_all_the_memory(nbytes: int, page_bytes: int) -> None:
    share = MemoryBudget(nbytes).join(page_bytes)
    assert (share is not None) == (page_bytes <= nbytes)
    if share is not None:
        assert share.limit_pages == nbytes // page_bytes
        share.take(share.limit_pages)
        assert share.limit_pages == share.taken_pages == nbytes // page_bytes


def test_a_pool_with_a_share_alone_is_as_large_as_one_without() -> None:
    alone = BlockPool(10, LRU())
    share = MemoryBudget(10 * 64 + 63).join(64)
    shared = BlockPool(10, LRU(), share)
    for pool in (alone, shared):
        assert (pool.capacity_pages, pool.free_pages) == (10, 10)
        assert pool.can_ever_hold(10) and not pool.can_ever_hold(11)
        (block,) = pool.allocate([(0, 10)])
        assert (pool.capacity_pages, pool.free_pages) == (10, 0)
        assert not pool.has_room(1) and not pool.can_make_room(1)
        pool.release([block], 0.0)
        assert pool.free_pages == 10
        pool.check()


def test_a_member_that_comes_late_is_refused_when_its_guarantee_is_gone() -> None:
    budget = MemoryBudget(800)
    first = budget.join(50)
    assert first is not None
    first.take(15)  # 50 bytes are left, and the guarantee is 100
    assert budget.join(1) is None
    assert first.limit_pages == 16, "a refused member leaves no trace"
    budget = MemoryBudget(800)
    first = budget.join(50)
    assert first is not None
    first.take(14)
    assert budget.join(101) is None, "its first page would not fit"
    second = budget.join(100)
    assert second is not None and second.limit_pages == 1
    assert first.limit_pages == 14, "the rest is the second one's"
    second.leave()
    assert first.limit_pages == 16


@settings(SEEDED, max_examples=30, stateful_step_count=30)
class Budget(RuleBasedStateMachine):
    """Members join, grow and leave in any order."""

    @initialize(nbytes=st.integers(8, 5_000))
    def start(self, nbytes: int) -> None:
        self.budget = MemoryBudget(nbytes)
        self.shares: list[BudgetShare] = []
        self.limits: dict[BudgetShare, int] = {}

    @precondition(lambda self: len(self.shares) < 3)
    @rule(page_bytes=st.integers(1, 700))
    def join(self, page_bytes: int) -> None:
        guarantee = self.budget.nbytes // GUARANTEED_PARTS
        claimed = sum(max(one.taken_pages * one.page_bytes, guarantee) for one in self.shares)
        share = self.budget.join(page_bytes)
        left = self.budget.nbytes - claimed
        assert (share is None) == (left < max(page_bytes, guarantee))
        if share is not None:
            self.shares.append(share)

    @precondition(lambda self: self.shares)
    @rule(which=st.integers(0, 2), part=st.floats(0.0, 1.0))
    def take(self, which: int, part: float) -> None:
        share = self.shares[which % len(self.shares)]
        share.take(int(part * (share.limit_pages - share.taken_pages)))

    @precondition(lambda self: len(self.shares) > 1)
    @rule(which=st.integers(0, 2))
    def leave(self, which: int) -> None:
        self.shares.pop(which % len(self.shares)).leave()
        self.limits.clear()

    @invariant()
    def promises_are_kept(self) -> None:
        guarantee = self.budget.nbytes // GUARANTEED_PARTS
        taken = sum(one.taken_pages * one.page_bytes for one in self.shares)
        assert taken <= self.budget.nbytes
        for share in self.shares:
            assert share.limit_pages >= max(share.taken_pages, guarantee // share.page_bytes)
            # A reservation that is refused as too large must not fit later.
            assert share.limit_pages <= self.limits.get(share, share.limit_pages)
            self.limits[share] = share.limit_pages


TestBudget = Budget.TestCase

OTHER = KVSpec((FullAttention("kv", (0, 1), 40), LinearState("state", (2,), 200)))
TWO = (SPECS["all"], OTHER)
MEMORY = 12_000


@settings(SEEDED, max_examples=20, stateful_step_count=30)
class TwoPools(RuleBasedStateMachine):
    """Two pools with pages of different sizes reserve, commit and evict within one budget."""

    def __init__(self) -> None:
        super().__init__()
        budget = MemoryBudget(MEMORY)
        self.pools: list[HybridPrefixPool] = []
        self.shares: list[BudgetShare] = []
        self.leases: list[tuple[HybridPrefixPool, Lease]] = []
        for spec in TWO:
            layout = choose_layout(unit_bytes(spec, BLOCK))
            share = budget.join(layout.page_bytes)
            assert share is not None
            self.shares.append(share)
            storage = PoolStorage(layout, MEMORY // layout.page_bytes, share=share)
            self.pools.append(make_pool(spec, storage=storage))
        assert len({share.page_bytes for share in self.shares}) == 2

    @rule(which=st.integers(0, 1), seed=st.integers(0, 5), tokens=st.integers(1, 90))
    def reserve(self, which: int, seed: int, tokens: int) -> None:
        prompt = [seed * 1_000 + at for at in range(tokens)]
        lease = self.pools[which].reserve(hashes_of(prompt), tokens, now=0.0)
        if not isinstance(lease, NotNow):
            self.leases.append((self.pools[which], lease))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 20), commit=st.booleans())
    def end(self, which: int, commit: bool) -> None:
        pool, lease = self.leases.pop(which % len(self.leases))
        if commit:
            pool.commit(lease.id, 0.0)
        pool.release(lease.id, 0.0)

    @precondition(lambda self: not self.leases)
    @rule(which=st.integers(0, 1), seed=st.integers(10, 1_000))
    def a_prompt_within_the_guarantee_is_always_taken(self, which: int, seed: int) -> None:
        pool = self.pools[which]
        tokens = 4 * BLOCK
        lease = pool.reserve(
            hashes_of([seed * 1_000 + at for at in range(tokens)]),
            tokens,
            now=0.0,
            checkpoint_tokens=(),
        )
        assert isinstance(lease, Lease), lease
        assert lease.new_bytes <= MEMORY // GUARANTEED_PARTS
        pool.release(lease.id, 0.0)

    @invariant()
    def within_the_budget(self) -> None:
        assert sum(one.taken_pages * one.page_bytes for one in self.shares) <= MEMORY
        for pool in self.pools:
            pool.check()


TestTwoPools = TwoPools.TestCase
