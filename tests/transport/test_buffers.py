import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.transport.buffers import BufferSequence, FileRange, FileSlice


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_slices_of_a_buffer_sequence(sizes: list[int], data: st.DataObject) -> None:
    whole = random.Random(1).randbytes(sum(sizes))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(whole)[at : at + size])
        at += size
    buffers = BufferSequence("x", at, views)
    offset = data.draw(st.integers(0, at - 1))
    nbytes = data.draw(st.integers(1, at - offset))
    assert b"".join(buffers.slices(offset, nbytes)) == whole[offset : offset + nbytes]


def test_views_are_of_bytes() -> None:
    numbers = memoryview(bytearray(range(16))).cast("I")
    for parts in ([numbers], [numbers[:2], numbers[2:]]):
        with pytest.raises(InputError, match="cast them to bytes"):
            BufferSequence("x", 16, parts)
    assert bytes(BufferSequence("x", 16, [numbers.cast("B")]).slices(3, 2)[0]) == bytes([3, 4])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_ranges_on_file_are_the_same_bytes(sizes: list[int], data: st.DataObject) -> None:
    whole = random.Random(2).randbytes(1000)
    parts, used = [], b""
    for index, size in enumerate(sizes):
        at = data.draw(st.integers(0, 900)) if index % 2 else index * 60
        parts.append(FileSlice(memoryview(whole)[at : at + size], 7, at))
        used += whole[at : at + size]
    buffers = BufferSequence("x", len(used), parts)
    offset = data.draw(st.integers(0, len(used) - 1))
    nbytes = data.draw(st.integers(1, len(used) - offset))
    ranges: list[FileRange] = []
    buffers.add_ranges(offset, nbytes, ranges)
    assert (
        b"".join(whole[r.offset : r.offset + r.nbytes] for r in ranges)
        == (used[offset : offset + nbytes])
    )
    assert buffers.on_file
    assert not BufferSequence("x", len(used), [*parts[:-1], parts[-1].view]).on_file


def test_neighbours_on_file_become_one_range() -> None:
    memory = memoryview(bytes(100))
    ranges: list[FileRange] = []
    for fd, at, size in ((3, 0, 10), (3, 10, 5), (4, 15, 5), (4, 30, 1)):
        BufferSequence("x", size, [FileSlice(memory[:size], fd, at)]).add_ranges(0, size, ranges)
    assert ranges == [FileRange(3, 0, 15), FileRange(4, 15, 5), FileRange(4, 30, 1)]


@pytest.mark.parametrize("sizes", [[3], [2, 2], []])
def test_buffers_of_another_size_are_refused(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="5 bytes announced"):
        BufferSequence("x", 5, [memoryview(bytes(size)) for size in sizes])
