from __future__ import annotations

import os
from itertools import pairwise
from random import Random

import pytest

from prfaas.cache.lease import Lease
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import joint_ranges, segment_ranges
from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, LinearState, Segment, block_slices
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool
from tests.cache.filling import expected, segments_to_resume, write

SPEC = SPECS["all"]
PROMPT = tuple(range(22))


def test_a_page_table_leads_to_the_same_bytes_as_the_pool() -> None:
    layout = layout_of(SPEC)
    fd = os.memfd_create("places")
    os.ftruncate(fd, 500 * layout.page_bytes)
    pool_side, engine_side = (Arena(fd, layout.page_bytes, 500) for _ in range(2))
    pool = make_pool(SPEC, pages=500, arena=pool_side)
    lease = pool.reserve(hashes_of(PROMPT), len(PROMPT), now=0.0)
    assert isinstance(lease, Lease)
    assert not pool.tables(lease.id).readable
    written = dict(pool.tables(lease.id).writable)
    write(pool, lease, PROMPT)
    pool.commit(lease.id, 0.0)
    tables = pool.tables(lease.id)
    assert (dict(tables.readable), dict(tables.writable)) == (written, {})
    for segment in segments_to_resume(pool, len(PROMPT)):
        ranges = segment_ranges(SPEC, BLOCK, engine_side, segment, tables.readable.get)
        found = b"".join(engine_side.view(start, stop) for start, stop in ranges)
        assert found == expected(pool, PROMPT, segment), segment.name
    with pytest.raises(InputError, match="not part of this lease"):
        segment_ranges(SPEC, BLOCK, engine_side, Segment("full0", 0, 24, 28), written.get)
    before = pool.occupancy()
    assert (before.leases, before.idle_pages, before.capacity_pages) == (1, 0, 500)
    pool.release(lease.id, 0.0)
    after = pool.occupancy()
    assert after.leases == 0 and after.used_pages == after.idle_pages < before.used_pages
    os.close(fd)


def test_layers_together_lie_unit_by_unit() -> None:
    layout = layout_of(SPEC)
    fd = os.memfd_create("places")
    os.ftruncate(fd, 500 * layout.page_bytes)
    arena = Arena(fd, layout.page_bytes, 500)
    pool = make_pool(SPEC, pages=500, arena=arena)
    lease = pool.reserve(hashes_of(PROMPT), len(PROMPT), now=0.0)
    assert isinstance(lease, Lease)
    table = pool.tables(lease.id).writable
    for group in SPEC.groups:
        linear = isinstance(group, LinearState)
        start, stop = (0, len(PROMPT)) if linear else (len(PROMPT) - 3, len(PROMPT))
        if isinstance(group, FullAttention):
            start, stop = 1, len(PROMPT)
        segments = [Segment(group.name, layer, start, stop) for layer in group.layers]
        expected: list[int] = []
        edges = [start, *range(start // BLOCK * BLOCK + BLOCK, stop, BLOCK), stop]
        for low, high in [(start, stop)] if linear else zip(edges, edges[1:], strict=False):
            for segment in segments:
                part = Segment(segment.group, segment.layer, low, high)
                for first, last in segment_ranges(SPEC, BLOCK, arena, part, table.get):
                    expected += range(first, last)
        found = joint_ranges(SPEC, BLOCK, arena, segments, table.get)
        assert [byte for first, last in found for byte in range(first, last)] == expected
        assert all(one[1] != other[0] for one, other in zip(found, found[1:], strict=False))
    with pytest.raises(InputError, match="differ in more than the layer"):
        joint_ranges(
            SPEC, BLOCK, arena, [Segment("full0", 0, 0, 4), Segment("full0", 0, 0, 8)], table.get
        )
    with pytest.raises(InputError, match="not part of this lease"):
        joint_ranges(SPEC, BLOCK, arena, [Segment("full0", 0, 24, 28)], table.get)
    os.close(fd)


@pytest.mark.parametrize("group", ["full0", "full1", "window0"])
def test_every_part_of_a_prompt_lies_where_its_blocks_have_it(group: str) -> None:
    """With pages in any order, and tokens from the middle of one block to that of another."""
    layout = layout_of(SPEC)
    fd = os.memfd_create("places")
    os.ftruncate(fd, 500 * layout.page_bytes)
    arena = Arena(fd, layout.page_bytes, 500)
    number = next(n for n, g in enumerate(SPEC.groups) if g.name == group)
    pages = iter(Random(4).sample(range(500), 100))
    table = {(number, n): [next(pages) for _ in range(layout.pages(number))] for n in range(6)}
    layer = SPEC[group].layers[-1]
    for start in range(6 * BLOCK):
        for stop in range(start + 1, 6 * BLOCK + 1):
            segment = Segment(group, layer, start, stop)
            expected: list[int] = []
            for block, offset, nbytes in block_slices(SPEC, segment, BLOCK):
                for low, high in arena.ranges(table[number, block], offset, nbytes):
                    expected += range(low, high)
            found = segment_ranges(SPEC, BLOCK, arena, segment, table.get)
            assert [byte for low, high in found for byte in range(low, high)] == expected, segment
            assert all(one[1] != other[0] for one, other in pairwise(found))
    with pytest.raises(InputError, match="unknown group"):
        segment_ranges(SPEC, BLOCK, arena, Segment("full9", 0, 0, 8), table.get)
    with pytest.raises(InputError, match="is empty"):
        segment_ranges(SPEC, BLOCK, arena, Segment(group, layer, 8, 8), table.get)
    os.close(fd)


def test_neighbouring_blocks_of_a_group_with_one_layer_are_one_range() -> None:
    layout = layout_of(SPEC)
    fd = os.memfd_create("places")
    os.ftruncate(fd, 500 * layout.page_bytes)
    arena = Arena(fd, layout.page_bytes, 500)
    size = layout.pages(3)
    table = {(3, n): list(range(n * size, (n + 1) * size)) for n in range(6)}
    found = segment_ranges(SPEC, BLOCK, arena, Segment("full1", 5, 2, 5 * BLOCK + 1), table.get)
    per_token = layout.unit_bytes[3] // BLOCK
    assert size * layout.page_bytes == layout.unit_bytes[3], "a padded unit ends in a gap"
    assert found == [(2 * per_token, (5 * BLOCK + 1) * per_token)]
    os.close(fd)
