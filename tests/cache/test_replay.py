"""Traces through a pool: what the policies of checkpoints and of eviction find again.

Each request is committed before the next arrives, as with a cache in front of a fast cluster. No
bytes, no engine, no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from prfaas.cache.blocks import Eviction
from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import LRU, CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.catalog import Catalog
from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow, known_blocks
from prfaas.planner.instance_times import prefill_profile
from prfaas.sim.arrivals import block_hashes, conversation_hashes
from prfaas.types import NotNow
from tests.cache.builders import SPECS


@dataclass(slots=True)
class Replayed:
    input_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0  # an infinite cache that reuses any prefix, partial last blocks included
    lost_tokens: int = 0
    refused: int = 0
    peak_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens


def replay(rows: Sequence[TraceRow], pool: HybridPrefixPool) -> Replayed:
    """A prompt that does not fit is served from what is cached and adds nothing to the pool. An
    answer is kept right after its prompt, where the row names its blocks and the pool has pages for
    answers."""
    found = Replayed()
    seen: set[int] = set()
    for row in rows:
        now = row.timestamp / 1e3
        found.input_tokens += row.input_length
        known_tokens = known_blocks(row, seen) * TRACE_BLOCK_TOKENS
        found.ideal_tokens += min(known_tokens, row.input_length)
        hashes = block_hashes(row)
        lease = pool.reserve(hashes, len(hashes) * TRACE_BLOCK_TOKENS, now=now)
        if isinstance(lease, NotNow):
            found.refused += 1
            match = pool.match(hashes)
        else:
            match = lease.match
            pool.commit(lease.id, now)
            found.peak_bytes = max(found.peak_bytes, sum(pool.bytes_by_group().values()))
            pool.release(lease.id, now)
            keep_answer(row, pool, now)
        found.hit_tokens += match.tokens
        found.lost_tokens += match.lost_tokens
    return found


def keep_answer(row: TraceRow, pool: HybridPrefixPool, now: float) -> None:
    hashes = conversation_hashes(row)
    if not hashes:
        return
    first = row.input_length // TRACE_BLOCK_TOKENS * TRACE_BLOCK_TOKENS
    tokens = len(hashes) * TRACE_BLOCK_TOKENS
    lease = pool.reserve_answer(hashes, tokens, first_token=first, now=now)
    if not isinstance(lease, NotNow):
        pool.commit(lease.id, now)
        pool.release(lease.id, now)


def row(ids: list[int], tail: int = 0, at_ms: int = 0) -> TraceRow:
    whole = len(ids) - (tail > 0)
    return TraceRow(at_ms, whole * TRACE_BLOCK_TOKENS + tail, 5, ids)


def pool(checkpoints: str = "default", pages: int | None = None) -> HybridPrefixPool:
    spec = SPECS["hybrid"]
    layout = choose_layout(unit_bytes(spec, TRACE_BLOCK_TOKENS))
    return HybridPrefixPool(
        spec,
        TRACE_BLOCK_TOKENS,
        PoolStorage(layout, pages),
        eviction=LRU(),
        checkpoints=checkpoint_policy(checkpoints, TRACE_BLOCK_TOKENS),
    )


def conversations(count: int, seed: int = 0) -> list[TraceRow]:
    """Users who share a system prompt, talk in turns and sometimes start over."""
    rng = random.Random(seed)
    fresh = iter(range(100, 10**9))
    system = list(range(12))
    talks: list[list[int]] = [list(system) for _ in range(8)]
    rows = []
    for number in range(count):
        user = rng.randrange(len(talks))
        if rng.random() < 0.2:
            talks[user] = list(system)
        talks[user] += [next(fresh) for _ in range(rng.randint(1, 6))]
        rows.append(row([*talks[user], next(fresh)], tail=100, at_ms=1000 * number))
    return rows


def test_hits_and_the_ideal_are_counted_in_tokens() -> None:
    rows = [row([1, 2, 3], tail=10), row([1, 2, 3], tail=10), row([1, 9])]
    result = replay(rows, pool("every:1"))
    assert result.input_tokens == 2 * (1024 + 10) + 1024
    assert result.ideal_tokens == (1024 + 10) + 512
    assert result.hit_tokens == 1024 + 512
    assert result.lost_tokens == 0


def test_last_boundary_loses_what_diverges_inside() -> None:
    rows = [row([1, 2, 3]), row([1, 2, 9]), row([1, 2, 8])]
    assert replay(rows, pool("last")).lost_tokens == 2 * 1024
    branch = replay(rows, pool("branch"))
    assert (branch.lost_tokens, branch.hit_tokens) == (1024, 1024)
    assert replay(rows, pool("every:1")).lost_tokens == 0


def test_no_policy_beats_the_ideal_and_every_block_reaches_it() -> None:
    rows = conversations(200)
    results = {name: replay(rows, pool(name)) for name in ("last", "branch", "default", "every:1")}
    rates = [results[name].hit_rate for name in ("last", "branch", "default", "every:1")]
    assert rates == sorted(rates)
    ideal = results["every:1"]
    assert ideal.hit_tokens == ideal.ideal_tokens
    assert ideal.lost_tokens == 0
    assert results["last"].lost_tokens > 0


def test_bytes_of_groups_are_real_sizes() -> None:
    here = pool("last")
    replay([row([1, 2]), row([3])], here)
    layout = here.layout
    assert here.bytes_by_group() == {
        "full0": 3 * layout.pages(0) * layout.page_bytes,
        "linear0": 2 * layout.pages(1) * layout.page_bytes,
    }
    assert here.stats.evicted_blocks == 0


def test_a_prompt_larger_than_the_pool_is_refused_but_served() -> None:
    layout = pool().layout
    small = pool("last", pages=2 * layout.pages(0) + layout.pages(1))
    result = replay([row([1, 2]), row([1, 2, 3, 4]), row([1, 2])], small)
    assert result.refused == 1
    assert result.hit_tokens == 2 * 1024


def test_a_prompt_resumes_after_the_answer_that_it_contains() -> None:
    answered = TraceRow(0, 2 * TRACE_BLOCK_TOKENS + 10, 1100, [1, 2, 3], [4, 5])
    rows = [answered, TraceRow(0, 4 * TRACE_BLOCK_TOKENS + 200, 10, [1, 2, 4, 5, 6])]
    here = pool("last")
    here.set_aside(1_000)
    assert replay(rows, here).hit_tokens == 4 * TRACE_BLOCK_TOKENS
    assert here.stats.kept_answers == 1
    assert replay(rows, pool("last")).hit_tokens == 2 * TRACE_BLOCK_TOKENS


def replayed(
    rows: Sequence[TraceRow], capacity_bytes: float, checkpoints: str, *, by_cost: bool
) -> tuple[Replayed, int]:
    """The result, and the number of evicted blocks."""
    catalog = Catalog.builtin()
    spec = catalog.model("kimi-linear-48b-a3b").spec()
    layout = choose_layout(unit_bytes(spec, TRACE_BLOCK_TOKENS))
    eviction: Eviction = LRU()
    if by_cost:
        record = catalog.profile("kimi-linear-48b-a3b", "h200", 8)
        assert record is not None
        cost = prefill_profile(catalog, record).marginal_s
        eviction = CostAware(rules_for(spec), layout, TRACE_BLOCK_TOKENS, cost)
    pages = None if math.isinf(capacity_bytes) else int(capacity_bytes // layout.page_bytes)
    here = HybridPrefixPool(
        spec,
        TRACE_BLOCK_TOKENS,
        PoolStorage(layout, pages),
        eviction=eviction,
        checkpoints=checkpoint_policy(checkpoints, TRACE_BLOCK_TOKENS),
    )
    return replay(rows, here), here.stats.evicted_blocks


@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.1])
def test_the_default_policies_beat_the_baseline_when_memory_is_scarce(fraction: float) -> None:
    rows = conversations(600, seed=3)
    working_set = replayed(rows, math.inf, "default", by_cost=True)[0].peak_bytes
    ours, evicted = replayed(rows, fraction * working_set, "default", by_cost=True)
    baseline, _ = replayed(rows, fraction * working_set, "last", by_cost=False)
    assert ours.hit_rate > baseline.hit_rate
    assert evicted > 0 or fraction == 0.5
