"""Whose idle prefixes are evicted: tenants have equal shares of a pool, in memory and on SSD."""

from __future__ import annotations

import os
import tempfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.blocks import Block
from prfaas.cache.eviction import LRU
from prfaas.cache.journal import Journal
from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.ssd import Slot, SpillFile
from prfaas.cache.tenants import (
    COMMON,
    MAX_TENANTS,
    SHARE_S,
    STALE_ENTRIES,
    SpilledBlocks,
    TenantShares,
)
from prfaas.types import NodeId, NotNow
from tests.cache.builders import (
    BLOCK,
    SEEDED,
    SPECS,
    hashes_of,
    layout_of,
    make_pool,
    prepare_now,
)

POLICIES = pytest.mark.parametrize("evict", ["lru", "cost"])


def prompt_of(tenant: str, number: int, blocks: int) -> list[int]:
    """No other tenant has its tokens, as no other tenant has its salt."""
    return [zlib.crc32(f"{tenant}/{number}".encode())] * (blocks * BLOCK)


def serve(
    pool: HybridPrefixPool, tenant: str, number: int, blocks: int = 2, now: float = 0.0
) -> bool:
    prompt = prompt_of(tenant, number, blocks)
    lease = pool.reserve(hashes_of(prompt), len(prompt), now=now, tenant=tenant)
    if isinstance(lease, NotNow):
        return False
    pool.commit(lease.id, now)
    pool.release(lease.id, now)
    return True


def hits(pool: HybridPrefixPool, tenant: str, number: int, blocks: int = 2) -> bool:
    return pool.match(hashes_of(prompt_of(tenant, number, blocks))).tokens == blocks * BLOCK


def pages_of(pool: HybridPrefixPool, tenant: str) -> int:
    return sum(len(b.pages) for b in pool._blocks.live_blocks() if b.tenant == tenant)


@POLICIES
def test_a_flood_of_distinct_prompts_leaves_the_prefix_of_another_tenant(evict: str) -> None:
    pool = make_pool(SPECS["hybrid"], pages=200, evict=evict)
    assert serve(pool, "b", 0)
    for number in range(100):
        assert serve(pool, "a", number, now=float(number))
    pool.check()
    assert hits(pool, "b", 0)
    assert pool.occupancy().used_pages > 180, "a tenant may use what the others leave"


@POLICIES
def test_a_tenant_that_returns_gets_its_share_back(evict: str) -> None:
    pool = make_pool(SPECS["hybrid"], pages=400, evict=evict)
    for number in range(100):
        assert serve(pool, "a", number)
    for number in range(100):
        assert serve(pool, "b", number, now=float(number))
    a, b = pages_of(pool, "a"), pages_of(pool, "b")
    assert abs(a - b) < 40, (a, b)  # a prompt has 34 pages at most
    pool.check()


@POLICIES
def test_answers_count_for_their_tenant(evict: str) -> None:
    pool = make_pool(SPECS["full"], pages=40, evict=evict)
    pool.set_aside(20)
    for number in range(3):
        assert serve(pool, "b", number)
    for number in range(60):  # of one prompt, n = 60
        answer = hashes_of([*prompt_of("a", 0, 1), *prompt_of("a", number + 1, 1)])
        lease = pool.reserve_answer(answer, 2 * BLOCK, first_token=0, now=float(number), tenant="a")
        if isinstance(lease, Lease):
            pool.commit(lease.id, float(number))
            pool.release(lease.id, float(number))
        pool.check()
    assert all(hits(pool, "b", number) for number in range(3))


def test_an_answer_does_not_evict_a_tenant_with_fewer_pages() -> None:
    pool = make_pool(SPECS["full"], pages=40)
    assert serve(pool, "b", 0, blocks=3)
    pool.set_aside(40)
    running = []
    for number in range(40):
        answer = hashes_of(prompt_of("a", number, 1))
        lease = pool.reserve_answer(answer, BLOCK, first_token=0, now=0.0, tenant="a")
        if isinstance(lease, NotNow):
            break
        running.append(lease)
    assert isinstance(lease, NotNow) and len(running) > 10
    assert hits(pool, "b", 0, blocks=3)


def test_blocks_without_a_tag_belong_to_the_tenant_of_the_prefix_that_they_continue() -> None:
    pool = make_pool(SPECS["hybrid"], pages=200)
    assert serve(pool, "b", 0, blocks=1)
    longer = hashes_of(prompt_of("b", 0, 3))
    lease = pool.reserve(longer, 3 * BLOCK, now=0.0)
    assert isinstance(lease, Lease)
    pool.commit(lease.id, 0.0)
    pool.release(lease.id, 0.0)
    assert pool.tenant(longer) == "b" and pages_of(pool, COMMON) == 0
    assert pool.tenant(hashes_of(prompt_of("c", 0, 2))) == COMMON


def test_pages_of_tenants_that_have_left_are_evicted_first() -> None:
    pool = make_pool(SPECS["full"], pages=20)
    for number in range(2):
        assert serve(pool, "gone", number)
    for number in range(9):
        assert serve(pool, "a", number, now=SHARE_S)
    assert not hits(pool, "a", 0) and hits(pool, "gone", 0), "it had its share until then"
    for number in range(10, 12):
        assert serve(pool, "a", number, now=SHARE_S + 1.0)
    assert not hits(pool, "gone", 0) and hits(pool, "a", 7)


@POLICIES
@given(data=st.data())
@SEEDED
def test_what_a_flood_takes_is_never_of_a_tenant_below_its_share(
    evict: str, data: st.DataObject
) -> None:
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    tenants = data.draw(st.lists(st.sampled_from("bcdef"), min_size=1, unique=True))
    layout = layout_of(spec)
    unit_pages = max(layout.pages(group) for group in range(len(spec.groups)))
    largest = 3 * len(spec.groups) * unit_pages * 3  # of any prompt below, generously
    pool = make_pool(spec, pages=2 * largest * (len(tenants) + 1), evict=evict)
    now = 0.0
    for tenant in tenants:
        assert serve(pool, tenant, 0, blocks=data.draw(st.integers(1, 3)))
    before = {tenant: pages_of(pool, tenant) for tenant in tenants}
    flood = data.draw(st.lists(st.integers(1, 3), min_size=20, max_size=60))
    for number, blocks in enumerate(flood * 4):
        now += data.draw(st.sampled_from([0.0, 1.0])) if number < 8 else 1.0
        assert serve(pool, "a", number, blocks, now)
    pool.check()
    assert before == {tenant: pages_of(pool, tenant) for tenant in tenants}


@POLICIES
@given(data=st.data())
@SEEDED
def test_a_tenant_that_is_alone_evicts_as_a_pool_without_tenants(
    evict: str, data: st.DataObject
) -> None:
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    aside = data.draw(st.sampled_from([0, 10]))
    steps = st.tuples(st.integers(0, 6), st.integers(1, 4), st.sampled_from([0.0, 1.0, 100.0]))
    drawn = data.draw(st.lists(steps, max_size=40))
    journals = []
    for tag in (COMMON, "alone"):
        journal = Journal()
        pool = make_pool(spec, pages=40 + aside, evict=evict, journal=journal)
        pool.set_aside(aside)
        now = 0.0
        for number, blocks, later in drawn:
            now += later
            prompt = prompt_of("one", number, blocks)
            lease = pool.reserve(hashes_of(prompt), len(prompt), now=now, tenant=tag)
            if isinstance(lease, Lease):
                pool.commit(lease.id, now)
                pool.release(lease.id, now)
            longer = hashes_of([*prompt, *prompt_of("answer", number, 1)])
            kept = pool.reserve_answer(
                longer, len(longer) * BLOCK, first_token=0, now=now, tenant=tag
            )
            if isinstance(kept, Lease):
                pool.commit(kept.id, now)
                pool.release(kept.id, now)
        pool.check()
        journals.append(journal.take(NodeId("n"), BLOCK, 0))
    assert journals[0] == journals[1]


# On SSD -------------------------------------------------------------------------------------------


def test_a_flood_that_is_spilled_leaves_what_another_tenant_has_on_ssd() -> None:
    spec = SPECS["full"]
    layout = layout_of(spec)
    with tempfile.TemporaryFile() as file:
        memory = os.memfd_create("pool")
        os.ftruncate(memory, 8 * layout.page_bytes)
        arena = Arena(memory, layout.page_bytes, 8)
        os.close(memory)
        ssd = SpillFile(file.fileno(), layout.page_bytes, 16)
        pool = make_pool(spec, pages=8, arena=arena, ssd=ssd)

        def request(tenant: str, number: int, now: float) -> None:
            prompt = prompt_of(tenant, number, 2)
            prepared = prepare_now(pool, hashes_of(prompt), len(prompt), now=now, tenant=tenant)
            assert prepared is not None
            assert serve(pool, tenant, number, now=now)
            prepared.end(now)

        request("b", 0, 0.0)
        for number in range(50):
            request("a", number, 1.0 + number)
        pool.check()
        assert pool.occupancy().spilled_units > 10
        assert hits(pool, "b", 0)


def test_tenants_on_ssd_are_bounded_and_the_oldest_of_the_largest_goes_first() -> None:
    spilled = SpilledBlocks()

    def block(tenant: str, pages: int) -> Block:
        made = Block(0, (), tenant)
        made.slot = Slot(tuple(range(pages)), b"")
        return made

    first, second, small = block("a", 2), block("a", 2), block("b", 3)
    for number, one in enumerate((small, first, second)):
        spilled.add(one, float(number))
    assert spilled.next_to_forget("c", 1, 5.0) is first
    first.refs = 1
    assert spilled.next_to_forget("c", 1, 5.0) is second
    assert spilled.next_to_forget("b", 1, 5.0) is small, "it would have as much as the other one"
    assert spilled.next_to_forget("c", 1, SHARE_S + 0.5) is small, "it has left"
    for number in range(MAX_TENANTS):
        spilled.add(block(str(number), 1), 6.0)
    assert block("new", 1) not in spilled
    spilled.add(last := block("new", 1), 6.0)
    assert last.tenant == COMMON and last in spilled and len(spilled) == MAX_TENANTS + 4
    spilled.check()
    for one in list(spilled):
        spilled.remove(one)
    spilled.check()
    assert not len(spilled) and spilled.next_to_forget("a", 1, 7.0) is None


# The bound and its cost ---------------------------------------------------------------------------


def test_further_tenants_have_one_share_together() -> None:
    shares = TenantShares(LRU())
    for number in range(MAX_TENANTS):
        assert shares.owner(str(number)) == str(number)
        shares.take(str(number), 1)
    assert shares.owner("one more") == COMMON and shares.owner("7") == "7"
    shares.give_back("7", 1)
    assert shares.owner("one more") == "one more"


def test_a_choice_keeps_no_more_entries_than_there_are_tenants() -> None:
    shares = TenantShares(LRU())
    blocks = []
    for round_ in range(200):
        for tenant in ("a", "b"):
            block = Block(0, (0,), tenant)
            shares.take(tenant, 1)
            shares.idle([block], float(round_))
            blocks.append(block)
    assert len(shares._largest) <= 2 * 2 + STALE_ENTRIES
    shares.check(blocks)
    while found := shares.victims(200.0):
        for block in found:
            shares.busy(block)
            shares.give_back(block.tenant, 1)
            blocks.remove(block)
        held = [sum(one.tenant == tenant for one in blocks) for tenant in ("a", "b")]
        assert abs(held[0] - held[1]) <= 1
    assert not blocks and not shares._queues.keys() - {COMMON}
    shares.check(blocks)
