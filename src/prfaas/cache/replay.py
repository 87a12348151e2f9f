"""What would a pool have served on a trace? Bookkeeping only: no bytes, no engine, no clock.

Rows are Mooncake's: a time, an input length, one id per 512-token block. Ids stand for hashes, and
each request is committed before the next arrives, as a cache in front of a fast cluster sees them.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.cache.pool import HybridPrefixPool
from prfaas.errors import InputError
from prfaas.types import BlockHash, NotNow

TRACE_BLOCK_TOKENS = 512


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a Mooncake trace."""

    timestamp: float  # ms
    input_length: int
    hash_ids: list[int]
    output_length: int = 0

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """Of whole blocks only: the last id often names a partial one, which no cache keeps."""
        whole = self.input_length // TRACE_BLOCK_TOKENS
        return tuple(BlockHash(i.to_bytes(8, "big")) for i in self.hash_ids[:whole])


@dataclass(frozen=True, slots=True)
class Replayed:
    input_tokens: int
    hit_tokens: int
    ideal_tokens: int  # an infinite cache that reuses any prefix, partial last blocks included
    lost_tokens: int
    evicted_blocks: int
    refused: int
    peak_bytes_by_group: dict[str, int]  # when the sum of them was largest
    pool_calls: int

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens

    @property
    def ideal_hit_rate(self) -> float:
        return self.ideal_tokens / self.input_tokens


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows of a `.jsonl` or `.jsonl.xz` file, in its order."""
    decoder = msgspec.json.Decoder(TraceRow)
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise InputError(str(error), file=path, where=f"line {number}") from None
                blocks = -(-row.input_length // TRACE_BLOCK_TOKENS)
                if row.input_length < 1 or len(row.hash_ids) != blocks or min(row.hash_ids) < 0:
                    raise InputError(
                        f"{len(row.hash_ids)} block ids for {row.input_length} tokens",
                        file=path,
                        where=f"line {number}",
                        fix=f"one id of 0 or more per {TRACE_BLOCK_TOKENS} tokens is needed",
                    )
                yield row
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise InputError(f"cannot be read: {error}", file=path) from None


def replay(rows: Iterable[TraceRow], pool: HybridPrefixPool) -> Replayed:
    """Runs every row through the pool: reserve, commit, release. A prompt that does not fit is
    served from what is cached and leaves nothing behind."""
    assert pool.block_tokens == TRACE_BLOCK_TOKENS
    seen: set[int] = set()
    input_tokens = hit_tokens = ideal_tokens = lost_tokens = refused = calls = 0
    peak: dict[str, int] = {}
    for row in rows:
        now = row.timestamp / 1e3
        input_tokens += row.input_length
        ideal_tokens += _ideal(row, seen)
        hashes = row.hashes
        calls += 1
        if not hashes:
            continue
        lease = pool.reserve(hashes, len(hashes) * TRACE_BLOCK_TOKENS, now=now, ttl_s=60.0)
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
            calls += 2
        hit_tokens += match.tokens
        lost_tokens += match.lost_tokens
    if input_tokens == 0:
        raise InputError("the trace has no rows")
    return Replayed(
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        ideal_tokens=ideal_tokens,
        lost_tokens=lost_tokens,
        evicted_blocks=pool.stats.evicted_blocks,
        refused=refused,
        peak_bytes_by_group=peak,
        pool_calls=calls,
    )


def _ideal(row: TraceRow, seen: set[int]) -> int:
    run = 0
    while run < len(row.hash_ids) and row.hash_ids[run] in seen:
        run += 1
    seen.update(row.hash_ids)
    return min(run * TRACE_BLOCK_TOKENS, row.input_length)
