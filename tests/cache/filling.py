"""A fake engine: fills a lease with bytes that only its units can have, and reads them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.places import PageTable, segment_ranges
from prfaas.kvspec import LinearState, Segment, SlidingWindow
from tests.cache.builders import content


def segments_to_write(pool: HybridPrefixPool, lease: Lease) -> Iterator[Segment]:
    lengths = [*lease.checkpoint_tokens]
    if lease.tokens > lease.match.tokens and lease.tokens not in lengths:
        lengths.append(lease.tokens)
    for group in pool.spec.groups:
        for layer in group.layers:
            if isinstance(group, LinearState):
                for length in lengths:
                    yield Segment(group.name, layer, 0, length)
            elif isinstance(group, SlidingWindow):
                for length in lengths:
                    yield Segment(group.name, layer, group.first_token(length), length)
            elif lease.skip_tokens[group.name] < lease.tokens:
                yield Segment(group.name, layer, lease.skip_tokens[group.name], lease.tokens)


def segments_to_resume(pool: HybridPrefixPool, length: int) -> Iterator[Segment]:
    if not length:
        return
    for group in pool.spec.groups:
        first = group.first_token(length) if isinstance(group, SlidingWindow) else 0
        for layer in group.layers:
            yield Segment(group.name, layer, first, length)


def expected(pool: HybridPrefixPool, tokens: Sequence[int], segment: Segment) -> bytes:
    """What a model would compute: each token's bytes depend on everything up to it."""
    group = pool.spec[segment.group]
    if isinstance(group, LinearState):
        return content(group.state_bytes, segment.group, segment.layer, tokens[: segment.stop])
    return b"".join(
        content(group.bytes_per_token, segment.group, segment.layer, tokens[: at + 1])
        for at in range(segment.start, segment.stop)
    )


def write(pool: HybridPrefixPool, lease: Lease, tokens: Sequence[int]) -> None:
    for segment in segments_to_write(pool, lease):
        write_segment(pool, lease, segment, expected(pool, tokens, segment))


def write_segment(pool: HybridPrefixPool, lease: Lease, segment: Segment, data: bytes) -> None:
    for view in _views(pool, segment, pool.tables(lease.id).writable):
        view[:] = data[: view.nbytes]
        data = data[view.nbytes :]
    assert not data


def read(pool: HybridPrefixPool, lease: Lease, segment: Segment) -> bytes:
    return b"".join(_views(pool, segment, pool.tables(lease.id).readable))


def _views(pool: HybridPrefixPool, segment: Segment, table: PageTable) -> list[memoryview]:
    arena = pool._tiers._arena
    assert arena is not None
    ranges = segment_ranges(pool.spec, pool.block_tokens, arena, segment, table.get)
    return [arena.view(start, stop) for start, stop in ranges]


def assert_resumable(
    pool: HybridPrefixPool, lease: Lease, tokens: Sequence[int], length: int
) -> None:
    for segment in segments_to_resume(pool, length):
        assert read(pool, lease, segment) == expected(pool, tokens, segment), segment.name
