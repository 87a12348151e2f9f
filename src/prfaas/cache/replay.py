"""Replays a trace through a pool to count its hits. No bytes, no engine, no clock.

Rows are Mooncake's: a time, an input length, one id per 512-token block. Ids stand for hashes, and
each request is committed before the next arrives, as with a cache in front of a fast cluster. Its
answer is kept right after it, where the row names the blocks of the answer and the pool has pages
for answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.cache.pool import HybridPrefixPool
from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow, known_blocks
from prfaas.errors import InputError
from prfaas.types import BlockHash, NotNow


@dataclass(frozen=True, slots=True)
class ReplayResult:
    input_tokens: int
    hit_tokens: int
    ideal_tokens: int  # an infinite cache that reuses any prefix, partial last blocks included
    lost_tokens: int
    evicted_blocks: int
    refused: int
    peak_bytes_by_group: dict[str, int]  # when the sum of them was largest
    pool_calls: int
    kept_answers: int

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens

    @property
    def ideal_hit_rate(self) -> float:
        return self.ideal_tokens / self.input_tokens


def replay(rows: Iterable[TraceRow], pool: HybridPrefixPool) -> ReplayResult:
    """Runs every row through the pool: reserve, commit, release, and the same for its answer. A
    prompt that does not fit is served from what is cached and adds nothing to the pool."""
    assert pool.block_tokens == TRACE_BLOCK_TOKENS
    seen: set[int] = set()
    input_tokens = hit_tokens = ideal_tokens = lost_tokens = refused = calls = 0
    peak: dict[str, int] = {}
    for row in rows:
        now = row.timestamp / 1e3
        input_tokens += row.input_length
        known_tokens = known_blocks(row, seen) * TRACE_BLOCK_TOKENS
        ideal_tokens += min(known_tokens, row.input_length)
        hashes = block_hashes(row)
        calls += 1
        if not hashes:
            continue
        lease = pool.reserve(hashes, len(hashes) * TRACE_BLOCK_TOKENS, now=now)
        if isinstance(lease, NotNow):
            refused += 1
            match = pool.match(hashes)
        else:
            match = lease.match
            pool.commit(lease.id, now)
            held = pool.bytes_by_group()
            if sum(held.values()) > sum(peak.values()):
                peak = held
            pool.release(lease.id, now)
            calls += 2 + _keep_answer(row, pool, now)
        hit_tokens += match.tokens
        lost_tokens += match.lost_tokens
    if input_tokens == 0:
        raise InputError("the trace has no rows")
    return ReplayResult(
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        ideal_tokens=ideal_tokens,
        lost_tokens=lost_tokens,
        evicted_blocks=pool.stats.evicted_blocks,
        refused=refused,
        peak_bytes_by_group=peak,
        pool_calls=calls,
        kept_answers=pool.stats.kept_answers,
    )


def _keep_answer(row: TraceRow, pool: HybridPrefixPool, now: float) -> int:
    """Returns the number of calls."""
    hashes = conversation_hashes(row)
    if not hashes:
        return 0
    first = row.input_length // TRACE_BLOCK_TOKENS * TRACE_BLOCK_TOKENS
    lease = pool.reserve_answer(
        hashes, len(hashes) * TRACE_BLOCK_TOKENS, first_token=first, now=now
    )
    if isinstance(lease, NotNow):
        return 1
    pool.commit(lease.id, now)
    pool.release(lease.id, now)
    return 3


def block_hashes(row: TraceRow) -> tuple[BlockHash, ...]:
    """Of whole blocks only: the last id often names a partial one, which no cache keeps."""
    whole = row.input_length // TRACE_BLOCK_TOKENS
    return _names(row.hash_ids[:whole])


def conversation_hashes(row: TraceRow) -> tuple[BlockHash, ...]:
    """Of the whole blocks of prompt and answer. Empty when the trace does not have them, or the
    answer completes no block."""
    if not row.answer_hash_ids:
        return ()
    whole = row.input_length // TRACE_BLOCK_TOKENS
    return _names([*row.hash_ids[:whole], *row.answer_hash_ids])


def _names(ids: Iterable[int]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(i.to_bytes(8, "big")) for i in ids)
