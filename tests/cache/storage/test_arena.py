from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.groups import unit_bytes
from prfaas.cache.storage.arena import MAX_PADDING, Arena, choose_layout
from prfaas.errors import InputError
from prfaas.kvspec import GQA, MLA, Linear, WindowedGQA, build_spec
from tests.cache.builders import SEEDED


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, 8 * 16)
    yield fd
    os.close(fd)


@SEEDED
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=4))
def test_no_group_is_padded_by_five_percent(sizes: list[int]) -> None:
    layout = choose_layout(sizes)
    for group, size in enumerate(sizes):
        capacity = layout.pages(group) * layout.page_bytes
        assert size <= capacity < size * (1 + MAX_PADDING)
        assert capacity - size < layout.page_bytes


@pytest.mark.parametrize("block_tokens", [16, 64, 512, 784])
def test_real_models_get_whole_memory_pages(block_tokens: int) -> None:
    for geometries in (
        (MLA(tuple(range(15)), 512, 64), Linear(tuple(range(42)), 64, 64, 128, 128, 4)),
        (MLA(tuple(range(7)), 512, 64), Linear(tuple(range(20)), 32, 32, 128, 128, 4)),
        (GQA((0, 1), 4, 256, 256), WindowedGQA((2, 3, 4), 4, 256, 256, 512)),
    ):
        layout = choose_layout(unit_bytes(build_spec(geometries), block_tokens))
        assert layout.page_bytes % 4096 == 0
        assert max(layout.padding(g) for g in range(len(geometries))) < MAX_PADDING


def test_one_group_of_odd_size_fits_exactly() -> None:
    layout = choose_layout([4096 * 3])
    assert (layout.page_bytes, layout.pages(0)) == (4096 * 3, 1)


def test_views_are_the_bytes_of_the_file(memory: int) -> None:
    arena = Arena(memory, page_bytes=16, pages=8)
    (view,) = arena.views((3,))
    view[:] = b"x" * 16
    assert os.pread(memory, 16, 48) == b"x" * 16
    view.release()
    other = Arena(memory, page_bytes=16, pages=8)  # as another process would map it
    assert bytes(other.views((3,))[0]) == b"x" * 16


def test_neighbours_come_as_one_view(memory: int) -> None:
    arena = Arena(memory, page_bytes=16, pages=8)
    assert [v.nbytes for v in arena.views((2, 3, 4))] == [48]
    assert [v.nbytes for v in arena.views((4, 2, 3, 7))] == [16, 32, 16]
    assert [v.nbytes for v in arena.views((4, 2, 3, 7), 8, 32)] == [8, 24]
    assert arena.views((4,), 5, 0) == []


@SEEDED
@given(pages=st.permutations(range(8)), cut=st.tuples(st.integers(0, 128), st.integers(0, 128)))
def test_views_are_in_the_order_of_the_pages(pages: list[int], cut: tuple[int, int]) -> None:
    fd = os.memfd_create("arena")
    try:
        os.write(fd, bytes(range(128)))
        arena = Arena(fd, page_bytes=16, pages=8)
        unit = b"".join(bytes(range(p * 16, p * 16 + 16)) for p in pages)
        start, stop = sorted(cut)
        assert b"".join(map(bytes, arena.views(pages, start, stop - start))) == unit[start:stop]
        arena.close()
    finally:
        os.close(fd)


def test_ranges_outside_the_unit_are_refused(memory: int) -> None:
    arena = Arena(memory, page_bytes=16, pages=8)
    with pytest.raises(InputError):
        arena.views((1,), 8, 9)
    with pytest.raises(InputError):
        arena.views((1,), -1, 2)


def test_a_file_that_is_too_short_is_refused(memory: int) -> None:
    with pytest.raises(InputError, match="set the file.s size"):
        Arena(memory, page_bytes=16, pages=9)


@pytest.mark.parametrize(("page_bytes", "pages"), [(0, 8), (16, 0), (-16, -8), (-16, 8)])
def test_an_arena_without_bytes_is_not_mapped(memory: int, page_bytes: int, pages: int) -> None:
    with pytest.raises(InputError, match="cannot have"):
        Arena(memory, page_bytes, pages)


@pytest.mark.parametrize("page", [-1, 8, 1 << 62])
def test_a_page_that_the_arena_lacks_is_refused_and_not_another_one(memory: int, page: int) -> None:
    arena = Arena(memory, page_bytes=16, pages=8)
    with pytest.raises(InputError, match="no page"):
        arena.views((0, page))
