"""A lease's places as numbers are those of its views, for any segment, any page size and any order
of pages."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import PageTable
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.leases import MappedArena
from prfaas.kvspec import KVSpec, LinearState, Segment, block_bytes
from prfaas.kvspec.mapped import MappedRanges
from tests.cache.builders import SPECS

BLOCKS, BLOCK = 12, 8
SPEC: KVSpec = SPECS["all"]


def arena_of(page_bytes: int, seed: int, missing: int) -> tuple[MappedArena, PageTable]:
    rng = random.Random(seed)
    table: dict[tuple[int, int], tuple[int, ...]] = {}
    needed = [-(-block_bytes(group, BLOCK) // page_bytes) for group in SPEC.groups]
    pages = list(range(2 * BLOCKS * sum(needed)))
    if seed:
        rng.shuffle(pages)
    for number, group in enumerate(SPEC.groups):
        units = [BLOCKS * BLOCK] if isinstance(group, LinearState) else range(BLOCKS)
        for unit in units:
            if unit != missing:
                table[number, unit] = tuple(pages.pop(0) for _ in range(needed[number]))
    items = list(table.items())
    rng.shuffle(items)
    file = os.memfd_create("prfaas-test")
    try:
        count = 2 * BLOCKS * sum(needed)
        os.ftruncate(file, page_bytes * count)
        arena = Arena(file, page_bytes, count)
    finally:
        os.close(file)
    return MappedArena(SPEC, BLOCK, arena), dict(items)


def pairs(found: MappedRanges) -> list[tuple[int, int]]:
    return list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))


def cells(found: list[tuple[int, int]]) -> list[int]:
    return [at for start, stop in found for at in range(start, stop)]


@given(
    st.sampled_from([100, 256, 1000, 4096]),
    st.integers(0, 3),
    st.sampled_from([-1, 5]),
    st.integers(0, len(SPEC.groups) - 1),
    st.integers(0, BLOCKS * BLOCK - 1),
    st.integers(1, BLOCKS * BLOCK),
)
def test_numbers_and_views_are_the_same_memory(
    page_bytes: int, seed: int, missing: int, group: int, start: int, length: int
) -> None:
    mapped, table = arena_of(page_bytes, seed, missing)
    kind = SPEC.groups[group]
    stop = min(start + length, BLOCKS * BLOCK)
    if isinstance(kind, LinearState):
        start, stop = 0, BLOCKS * BLOCK
    segment = Segment(kind.name, kind.layers[-1], start, stop)
    places = mapped.places(table)
    try:
        views = mapped.views(segment, table)
    except InputError as error:
        with pytest.raises(InputError) as raised:
            mapped.mapped(segment, places)
        assert "not part of this lease" in str(error) and "not part" in str(raised.value)
        return
    base = memoryview(mapped.memory)
    for at, view in enumerate(views):
        view[:] = bytes([at % 250 + 1]) * len(view)
    found = mapped.mapped(segment, places)
    assert found.nbytes == sum(len(view) for view in views)
    assert b"".join(base[a:b] for a, b in pairs(found)) == b"".join(views)
    assert b"".join(found.views()) == b"".join(views)
    first, last = found.nbytes // 3, found.nbytes // 2
    assert cells(pairs(found.part(first, last))) == cells(pairs(found))[first:last]
    assert cells(pairs(found.part(0, found.nbytes))) == cells(pairs(found))


def test_a_group_that_the_model_has_not_is_refused() -> None:
    mapped, table = arena_of(256, 0, -1)
    with pytest.raises(InputError):
        mapped.mapped(Segment("other", 0, 0, 64), mapped.places(table))
