"""The supply of pages against a set of page numbers, and what pools make of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache.lease import Lease, LeaseId
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.budget import MemoryBudget
from prfaas.cache.storage.page_supply import PageSupply
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.units import UnitKey
from tests.cache.builders import (
    BLOCK,
    SEEDED,
    SPECS,
    hashes_of,
    layout_of,
    make_pool,
    prepare_now,
)

FEW = settings(SEEDED, max_examples=40)
UNITS = st.lists(st.integers(1, 5), min_size=1, max_size=8)
# Numbers choose which of the held units are returned; a list of them returns several at once.
STEPS = st.lists(UNITS | st.lists(st.floats(0, 0.999), max_size=12).map(tuple), max_size=25)


def runs_of(pages: Iterable[int]) -> list[range]:
    """Pages in their order, as runs of neighbours."""
    found: list[range] = []
    for page in pages:
        if found and found[-1].stop == page:
            found[-1] = range(found[-1].start, page + 1)
        else:
            found.append(range(page, page + 1))
    return found


class Judged:
    """A supply and a set of pages that were returned. Every step is compared."""

    def __init__(self) -> None:
        self.supply = PageSupply(None, None)
        self.free: set[int] = set()
        self.fresh = 0
        self.held: list[tuple[int, ...]] = []

    def take(self, units: Sequence[int]) -> list[tuple[int, ...]]:
        runs = runs_of(sorted(self.free))
        taken = self.supply.take(units)
        assert [len(pages) for pages in taken] == list(units)
        assert all(list(pages) == sorted(pages) for pages in taken)
        pages = [page for unit in taken for page in unit]
        reused = set(pages) & self.free
        new = set(pages) - self.free
        assert len(set(pages)) == len(pages)
        assert new == set(range(self.fresh, self.fresh + len(new)))
        assert not new or reused == self.free, "fresh pages came before returned ones"
        if not new:
            self._check_choice(runs, runs_of(pages))
        self.free -= reused
        self.fresh += len(new)
        self.held += taken
        self.check()
        return taken

    def give_back(self, numbers: Sequence[float]) -> None:
        for number in numbers:
            if self.held:
                pages = self.held.pop(int(number * len(self.held)))
                self.supply.give_back(pages)
                self.free.update(pages)
        self.check()

    def check(self) -> None:
        self.supply.check({page for unit in self.held for page in unit})

    def _check_choice(self, free: list[range], taken: list[range]) -> None:
        """The fewest runs that hold the pages; a single one is the shortest that is long enough."""
        needed = sum(map(len, taken))
        enough = [len(run) for run in free if len(run) >= needed]
        if enough:
            (one,) = taken
            assert any(one.start == run.start and len(run) == min(enough) for run in free)
            return
        count = 0
        for length in sorted(map(len, free), reverse=True):
            count, needed = count + (needed > 0), needed - length
        assert len(taken) == count


@FEW
@given(STEPS)
def test_the_supply_keeps_every_page_once_and_hands_out_the_fewest_runs(
    steps: list[list[int] | tuple[float, ...]],
) -> None:
    judged = Judged()
    for step in steps:
        if isinstance(step, tuple):
            judged.give_back(step)
        else:
            judged.take(step)
    assert judged.supply.free_runs() == runs_of(sorted(judged.free))


@FEW
@given(STEPS, UNITS)
def test_after_everything_came_back_a_reservation_is_one_run_in_order(
    steps: list[list[int] | tuple[float, ...]], units: list[int]
) -> None:
    judged = Judged()
    for step in steps:
        if isinstance(step, tuple):
            judged.give_back(step)
        else:
            judged.take(step)
    judged.give_back([0.5] * len(judged.held))
    assert judged.supply.free_runs() == ([range(judged.fresh)] if judged.fresh else [])
    taken = judged.take(units)
    assert [page for unit in taken for page in unit] == list(range(sum(units)))


def test_a_long_run_is_not_cut_while_a_short_one_is_enough() -> None:
    supply = PageSupply(None, None)
    units = supply.take([1, 2, 1, 4, 1, 3, 1])
    for number in (1, 3, 5):
        supply.give_back(units[number])
    assert supply.free_runs() == [range(1, 3), range(4, 8), range(9, 12)]
    assert supply.take([1, 1, 1]) == [(9,), (10,), (11,)]
    assert supply.take([1]) == [(1,)]
    assert supply.free_runs() == [range(2, 3), range(4, 8)]


def test_a_unit_may_lie_on_the_longest_runs_and_on_fresh_pages() -> None:
    supply = PageSupply(None, None)
    units = supply.take([2, 1, 3, 1, 1])
    for number in (0, 2, 4):
        supply.give_back(units[number])
    assert supply.take([4]) == [(3, 4, 5, 7)]  # the longest, and the shortest for the rest
    supply.give_back((7,))
    assert supply.take([3, 2]) == [(0, 1, 7), (8, 9)]  # page 7 and the fresh ones are neighbours


def test_only_fresh_pages_count_against_the_budget() -> None:
    share = MemoryBudget(100).join(page_bytes=1)
    assert share is not None
    supply = PageSupply(100, share)
    supply.give_back(supply.take([10, 10])[0])
    assert share.taken_pages == 20
    supply.take([4, 4])
    assert share.taken_pages == 20
    supply.take([4])  # 2 of them are left
    assert share.taken_pages == 22


def test_a_page_that_is_returned_twice_is_an_error() -> None:
    supply = PageSupply(None, None)
    (pages,) = supply.take([3])
    supply.give_back(pages)
    supply.give_back(pages[1:2])
    with pytest.raises(AssertionError, match="returned twice"):
        supply.take([1])


# Pools --------------------------------------------------------------------------------------------


def prompt_of(random: Random, blocks: int) -> list[int]:
    return [random.randrange(10**6) for _ in range(blocks * BLOCK)]


def leased(pool: HybridPrefixPool, tokens: Sequence[int], now: float = 0.0) -> Lease:
    lease = pool.reserve(hashes_of(tokens), len(tokens), now=now)
    assert isinstance(lease, Lease)
    return lease


def new_pages(pool: HybridPrefixPool, lease_id: LeaseId) -> list[int]:
    """In the order of groups and tokens."""
    table = pool.tables(lease_id).writable
    return [page for key in sorted(table) for page in table[key]]


def churn(pool: HybridPrefixPool, random: Random, rounds: int) -> list[LeaseId]:
    """Leases of all sizes come, are committed or not, and go. Some are left."""
    active: list[LeaseId] = []
    for now in range(rounds):
        lease = pool.reserve(
            hashes_of(tokens := prompt_of(random, random.randint(1, 9))), len(tokens), now=now
        )
        if isinstance(lease, Lease):
            active.append(lease.id)
            if random.random() < 0.7:
                pool.commit(lease.id, now)
        if active and (len(active) > 4 or not isinstance(lease, Lease)):
            pool.release(active.pop(random.randrange(len(active))), now)
    return active


@pytest.mark.parametrize("name", ["full", "all"])
def test_after_churn_a_reservation_of_the_whole_pool_is_one_run(name: str) -> None:
    endless, random = make_pool(SPECS[name]), Random(3)
    tokens = prompt_of(random, 60)
    pages = new_pages(endless, leased(endless, tokens).id)
    pool = make_pool(SPECS[name], pages=len(pages))
    for lease_id in churn(pool, random, 150):
        pool.release(lease_id, 150.0)
    assert pool.stats.evicted_blocks > 50
    lease = leased(pool, tokens, 151.0)
    assert new_pages(pool, lease.id) == list(range(len(pages)))
    pool.check()


def test_prompts_stay_neighbours_while_leases_of_all_lengths_come_and_go() -> None:
    """A quarter of the leases is not committed, and they end in any order."""
    pool = make_pool(SPECS["full"], pages=1_000)
    random = Random(5)
    pages = runs = 0
    active: list[LeaseId] = []
    for now in range(300):
        lease = leased(pool, prompt_of(random, random.choice((4, 15, 40, 90))), float(now))
        found = new_pages(pool, lease.id)
        if now >= 150:
            pages, runs = pages + len(found), runs + len(runs_of(found))
        if random.random() < 0.75:
            pool.commit(lease.id, float(now))
        active.append(lease.id)
        if len(active) > 6:
            pool.release(active.pop(random.randrange(6)), float(now))
    assert pool.stats.evicted_blocks > 5_000
    assert pages / runs > 5, pages / runs  # 2 if the page that was returned last came first
    pool.check()


def test_a_prefix_that_comes_back_from_the_ssd_has_neighbouring_pages(tmp_path: Path) -> None:
    spec = SPECS["full"]
    layout = layout_of(spec)
    pages = 40 * layout.pages(0)
    memory = os.memfd_create("prfaas-test-arena")
    os.ftruncate(memory, pages * layout.page_bytes)
    file = os.open(tmp_path / "spill", os.O_RDWR | os.O_CREAT)
    ssd = SpillFile(file, layout.page_bytes, 10 * pages)
    pool = make_pool(spec, pages=pages, arena=Arena(memory, layout.page_bytes, pages), ssd=ssd)
    random = Random(1)
    prompts = [prompt_of(random, blocks) for blocks in (20, 1, 3, 2, 5, 1, 4, 2, 1)]
    for now, tokens in enumerate([*prompts, prompt_of(random, 35)]):
        preparation = prepare_now(pool, hashes_of(tokens), len(tokens), now=float(now))
        lease = leased(pool, tokens, float(now))
        assert preparation is not None
        preparation.end(float(now))
        pool.commit(lease.id, float(now))
        pool.release(lease.id, float(now))
    assert pool.stats.spilled_blocks >= 20
    preparation = prepare_now(pool, hashes_of(prompts[0]), None, now=20.0)
    assert preparation is not None and pool.stats.promoted_blocks == 20
    pin = pool.pin(hashes_of(prompts[0]), now=20.0)
    preparation.end(20.0)
    assert isinstance(pin, Lease) and pin.tokens == len(prompts[0])
    table = pool.tables(pin.id).readable
    keys: list[UnitKey] = sorted(table)
    assert len(runs_of(page for key in keys for page in table[key])) <= 2
    pool.check()
    os.close(memory)
    os.close(file)
