from __future__ import annotations

import pytest

from prfaas.cache.checkpoints import BranchPoints, Checkpoints, EveryBlocks, LastBoundary
from prfaas.cache.eviction import STALE_ENTRIES
from prfaas.cache.lease import Lease
from prfaas.cache.pool import BUSY_RETRY_S, HybridPrefixPool
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool

HYBRID = SPECS["hybrid"]
STATE_PAGES = layout_of(HYBRID).pages(1)


def serve(pool: HybridPrefixPool, blocks: str, now: float) -> Lease:
    tokens = [ord(letter) for letter in blocks for _ in range(BLOCK)]
    lease = pool.reserve(hashes_of(tokens), len(tokens), now=now)
    assert isinstance(lease, Lease), lease
    pool.commit(lease.id, now)
    pool.release(lease.id, now)
    pool.check()
    return lease


def hit(pool: HybridPrefixPool, blocks: str) -> int:
    """In blocks."""
    return pool.match(hashes_of([ord(x) for x in blocks for _ in range(BLOCK)])).tokens // BLOCK


def pages(blocks: int, states: int) -> int:
    return blocks * layout_of(HYBRID).pages(0) + states * STATE_PAGES


def test_lru_drops_the_end_of_the_oldest_prompt_first() -> None:
    pool = make_pool(SPECS["full"], pages=6)
    serve(pool, "abc", now=1.0)
    serve(pool, "xyz", now=2.0)
    serve(pool, "q", now=3.0)
    assert [hit(pool, p) for p in ("abc", "xyz", "q")] == [2, 3, 1]


def test_lru_is_refreshed_by_use() -> None:
    pool = make_pool(SPECS["full"], pages=6)
    serve(pool, "abc", now=1.0)
    serve(pool, "xyz", now=2.0)
    serve(pool, "abc", now=3.0)
    serve(pool, "q", now=4.0)
    assert [hit(pool, p) for p in ("abc", "xyz", "q")] == [3, 2, 1]


def test_cost_drops_a_superseded_head_before_older_ones() -> None:
    pool = make_pool(HYBRID, pages=pages(8, 3), evict="cost", checkpoints=LastBoundary())
    serve(pool, "abcd", now=0.0)
    serve(pool, "xy", now=1.0)
    serve(pool, "xyz", now=2.0)  # the state after xy has a successor now
    serve(pool, "q", now=3.0)
    assert [hit(pool, p) for p in ("abcd", "xyz", "q", "xy")] == [4, 3, 1, 0]


def test_cost_keeps_a_branch_point() -> None:
    pool = make_pool(HYBRID, pages=pages(9, 4), evict="cost", checkpoints=BranchPoints())
    serve(pool, "abx", now=0.0)
    serve(pool, "aby", now=1.0)  # diverges after ab: a state is kept there
    assert hit(pool, "abz") == 2
    serve(pool, "mn", now=2.0)
    serve(pool, "op", now=3.0)
    assert hit(pool, "abz") == 2
    assert min(hit(pool, "abx"), hit(pool, "aby")) == 2


def test_cost_takes_the_run_that_only_the_lost_state_needed() -> None:
    pool = make_pool(HYBRID, pages=pages(6, 2), evict="cost", checkpoints=LastBoundary())
    serve(pool, "abcd", now=0.0)
    serve(pool, "xy", now=100.0)
    serve(pool, "q", now=101.0)
    held = pool.holdings()
    assert len(held["full0"]) == 3 and len(held["linear0"]) == 2, (
        "abcd's blocks serve no prompt now"
    )


def test_cost_prefers_what_saves_more_time_per_byte() -> None:
    pool = make_pool(HYBRID, pages=pages(7, 2), evict="cost", checkpoints=LastBoundary())
    serve(pool, "abcdef", now=0.0)
    serve(pool, "x", now=0.0)  # as old, but its state saves one block only
    serve(pool, "y", now=1.0)
    assert [hit(pool, p) for p in ("abcdef", "x", "y")] == [6, 0, 1]


def test_age_outweighs_cost_in_the_end() -> None:
    pool = make_pool(HYBRID, pages=pages(7, 2), evict="cost", checkpoints=LastBoundary())
    serve(pool, "abcdef", now=0.0)
    serve(pool, "x", now=1000.0)
    serve(pool, "y", now=1001.0)
    assert [hit(pool, p) for p in ("abcdef", "x", "y")] == [0, 1, 1]


def test_a_pool_with_room_does_not_remember_every_use() -> None:
    """`check` bounds what is remembered; nothing is ever evicted here."""
    pool = make_pool(HYBRID, pages=pages(8, 4), evict="cost", checkpoints=LastBoundary())
    for n in range(10 * STALE_ENTRIES):
        serve(pool, "ab" if n % 2 else "xyz", now=float(n))
    assert [hit(pool, p) for p in ("ab", "xyz")] == [2, 3]


def test_spares_never_evict_and_go_first() -> None:
    policy = BranchPoints(spare_interval=1)
    pool = make_pool(HYBRID, pages=pages(4, 3), evict="cost", checkpoints=policy)
    lease = serve(pool, "abc", now=0.0)
    assert lease.checkpoint_tokens == (BLOCK, 2 * BLOCK, 3 * BLOCK)
    lease = serve(pool, "x", now=0.0)  # needs a state: a spare has to go
    assert lease.checkpoint_tokens == (BLOCK,)
    assert [hit(pool, p) for p in ("abc", "x")] == [3, 1]
    assert len(pool.holdings()["linear0"]) == 3


class Scripted:
    """Checkpoints given by prompt length."""

    def __init__(self, plans: dict[int, Checkpoints]) -> None:
        self.plans = plans

    def plan(self, blocks: int, hit: int, attention: int) -> Checkpoints:
        return self.plans[blocks]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_spare_goes_before_a_superseded_head_unless_it_was_used(resumed: bool) -> None:
    plans = {1: Checkpoints((1,)), 2: Checkpoints((2,)), 3: Checkpoints((3,))}
    pool = make_pool(HYBRID, pages=pages(8, 5), evict="cost", checkpoints=Scripted(plans))
    serve(pool, "xy", now=0.0)
    serve(pool, "xyz", now=0.0)
    plans[3] = Checkpoints((3,), (2,))
    serve(pool, "pqr", now=1.0)  # younger, and saves as much as the state after xy
    if resumed:
        lease = pool.pin(hashes_of([ord(x) for x in "pq" for _ in range(BLOCK)]), now=1.0)
        assert isinstance(lease, Lease) and lease.match.tokens == 2 * BLOCK
        pool.release(lease.id, 1.0)
    serve(pool, "m", now=2.0)
    serve(pool, "n", now=2.0)  # the sixth state
    assert (hit(pool, "xy"), hit(pool, "pq")) == ((0, 2) if resumed else (2, 0))


def test_attention_only_models_lose_leaves_one_by_one() -> None:
    pool = make_pool(SPECS["full"], pages=6, evict="cost")
    serve(pool, "abc", now=0.0)
    serve(pool, "xyz", now=1.0)
    serve(pool, "q", now=2.0)
    assert sorted(hit(pool, p) for p in ("abc", "xyz")) == [2, 3]


@pytest.mark.parametrize("evict", ["lru", "cost"])
def test_pinned_blocks_are_never_victims(evict: str) -> None:
    pool = make_pool(HYBRID, pages=pages(3, 1), evict=evict, checkpoints=EveryBlocks(3))
    serve(pool, "abc", now=0.0)
    pinned = pool.pin(hashes_of([ord(x) for x in "abc" for _ in range(BLOCK)]), now=1.0)
    assert isinstance(pinned, Lease) and pinned.match.tokens == 3 * BLOCK
    refused = pool.reserve(hashes_of([1] * BLOCK), BLOCK, now=2.0)
    assert not isinstance(refused, Lease)
    assert refused.retry_after_s == BUSY_RETRY_S
    assert hit(pool, "abc") == 3
