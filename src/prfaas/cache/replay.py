"""Replays a trace through a pool to count its hits. No bytes, no engine, no clock.

Rows are Mooncake's: a time, an input length, one id per 512-token block. Ids stand for hashes, and
each request is committed before the next arrives, as with a cache in front of a fast cluster. Its
answer is kept right after it, where the row names the blocks of the answer and the pool has pages
for answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice

import msgspec

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


def with_answers(rows: Sequence[TraceRow], *, continued: bool = True) -> list[TraceRow]:
    """The rows with ids for the blocks of their answers, which the public traces do not have.

    A later prompt that begins with all whole blocks of a row's prompt, and is at least as long as
    prompt and answer, contains the answer: its ids are those of that prompt. This is assumed only
    where the last whole block of the row is new, because prompts that share more may be different
    conversations. Other answers, and with `continued` of False all of them, occur in no prompt.
    """
    seen: set[int] = set()
    ends: dict[int, int] = {}  # id of the last whole block of a prompt -> its row
    found: dict[int, list[int]] = {}  # row -> ids
    for number, row in enumerate(rows):
        for place, block in enumerate(row.hash_ids, start=1):
            before = ends.get(block)
            if before is None or before in found or not continued:
                continue
            earlier = rows[before]
            length = earlier.input_length + earlier.output_length
            whole = earlier.input_length // TRACE_BLOCK_TOKENS
            if place == whole and row.input_length >= length:
                found[before] = row.hash_ids[whole : length // TRACE_BLOCK_TOKENS]
        whole = row.input_length // TRACE_BLOCK_TOKENS
        if whole and row.hash_ids[whole - 1] not in seen:
            ends[row.hash_ids[whole - 1]] = number
        seen.update(row.hash_ids)
    unknown = count(max(seen, default=0) + 1)
    result = []
    for number, row in enumerate(rows):
        stop = (row.input_length + row.output_length) // TRACE_BLOCK_TOKENS
        blocks = stop - row.input_length // TRACE_BLOCK_TOKENS
        ids = found.get(number) or list(islice(unknown, blocks))
        result.append(msgspec.structs.replace(row, answer_hash_ids=ids))
    return result


def _names(ids: Iterable[int]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(i.to_bytes(8, "big")) for i in ids)
