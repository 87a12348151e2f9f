"""Pages are copied with few calls, and every byte is copied once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.device import page_copies
from prfaas.device.page_copies import (
    Matrix,
    Pieces,
    copy_matrices,
    copy_whole,
    cut_at_seams,
    matrices,
    pieces_of,
)
from prfaas.device.page_pins import Places
from prfaas.device.row_pages import Column, RowShape
from prfaas.errors import EngineError

WHOLE = RowShape(64, 64, (Column(range(64), 0),))
COLUMNS = RowShape(64, 32, (Column(range(8, 24), 0), Column(range(40, 48), 16)))


def places_of(pages: Sequence[tuple[int, int]]) -> Places:
    table = np.array(pages, dtype=np.int64).reshape(-1, 2)
    return Places(table[:, 0], table[:, 1])


def pieces_at(pages: Sequence[tuple[int, int]], device: int) -> Pieces:
    return pieces_of(places_of(pages), [(device, sum(nbytes for _, nbytes in pages))])


def regular(pages: Sequence[tuple[int, int]], device: int) -> list[Matrix]:
    found = page_copies._regular(page_copies._joined(pieces_at(pages, device)), None)
    assert found is not None
    return found


class Mapping:
    """Registered parts of `part` bytes."""

    def __init__(self, part: int, base: int = 0) -> None:
        self.base, self.part_bytes = base, part

    def next_seam(self, address: int) -> int:
        return self.base + ((address - self.base) // self.part_bytes + 1) * self.part_bytes


def test_a_layer_of_neighbouring_blocks_is_one_matrix() -> None:
    pages = [(1_000 + 4_096 * n, 256) for n in range(100)]
    assert regular(pages, 70) == [Matrix(1_000, 70, 256, 100, 4_096, 256)]


def test_pages_that_follow_each_other_are_one_run() -> None:
    pages = [(1_000 + 256 * n, 256) for n in range(100)]
    assert regular(pages, 70) == [Matrix(1_000, 70, 25_600, 1, 25_600, 25_600)]


def test_a_shorter_page_and_a_jump_end_a_matrix() -> None:
    pages = [(0, 128), (1_000, 256), (2_000, 256), (3_000, 256), (9_000, 256), (8_000, 256)]
    assert regular(pages, 0) == [
        Matrix(0, 0, 128, 1, 128, 128),
        Matrix(1_000, 128, 256, 3, 1_000, 256),
        Matrix(9_000, 896, 256, 1, 256, 256),
        Matrix(8_000, 1_152, 256, 1, 256, 256),
    ]


@given(st.lists(st.lists(st.integers(1, 3), max_size=4), min_size=1, max_size=5))
def test_pages_of_several_tensors_are_copied_to_their_own_places(sizes: list[list[int]]) -> None:
    """Tensors lie apart on the device; a matrix or a run does not go from one into the next."""
    at, pages, targets, expected = 0, [], [], []
    for number, some in enumerate(sizes):
        device = 10_000 * (number + 1)
        targets.append((device, 64 * sum(some)))
        for size in some:
            pages.append((at, 64 * size))
            expected += [(at + n, device + n) for n in range(64 * size)]
            at += 64 * size
            device += 64 * size
    pieces = pieces_of(places_of(pages), targets)
    found = page_copies._regular(page_copies._joined(pieces), None)
    assert found is not None
    assert sorted(cells(found)) == expected


def test_a_pitch_beyond_cuda_is_not_used() -> None:
    assert len(regular([(0, 256), (1 << 31, 256)], 0)) == 2


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), max_size=10), st.integers(1, 400))
def test_whole_pages_are_copied_once_and_cross_no_seam(
    pages: list[tuple[int, int]], part: int
) -> None:
    """As matrices and as pieces."""
    pages = [(at * 64, n * 64) for at, n in pages]
    expected = [address + n for address, nbytes in pages for n in range(nbytes)]
    mapping: Any = Mapping(part)
    cut = list(cut_at_seams(regular(pages, 5_000), mapping.next_seam))
    pieces = page_copies._cut_pieces(pieces_at(pages, 5_000), mapping)
    as_matrices = [
        Matrix(host, device, n, 1, n, n)
        for host, device, n in zip(*(numbers.tolist() for numbers in pieces), strict=True)
    ]
    assert cells(as_matrices) == [(host, 5_000 + n) for n, host in enumerate(expected)]
    assert sorted(cells(cut)) == sorted((host, 5_000 + n) for n, host in enumerate(expected))
    for one in (*cut, *as_matrices):
        last = one.host + (one.rows - 1) * one.host_pitch + one.width - 1
        assert one.host // part == last // part


def test_columns_of_a_page_that_cuts_a_row_are_no_matrix() -> None:
    assert matrices([(0, 128), (1_000, 96)], 0, COLUMNS) is None


def cells(found: Sequence[Matrix]) -> list[tuple[int, int]]:
    """(host, device) of every byte."""
    return [
        (one.host + row * one.host_pitch + n, one.device + row * one.device_pitch + n)
        for one in found
        for row in range(one.rows)
        for n in range(one.width)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3)), max_size=8),
    st.sampled_from([WHOLE, COLUMNS]),  # an engine's own columns may be all of them
    st.integers(1, 400),
    st.integers(0, 63),
)
def test_matrices_are_the_pages_and_cross_no_seam(
    pages: list[tuple[int, int]], shape: RowShape, part: int, shift: int
) -> None:
    """Seams cut rows, columns and elements anywhere."""
    places = [(shift + at * 200, rows * 64) for at, rows in pages]
    found = matrices(places, 5_000, shape)
    assert found is not None
    expected, device = [], 5_000
    for address, nbytes in places:
        for row in range(nbytes // 64):
            for place, at in shape.columns:
                start = address + row * 64 + place.start
                expected += [(start + n, device + at + n) for n in range(len(place))]
            device += shape.own_bytes
    cut = list(cut_at_seams(found, lambda address: (address // part + 1) * part))
    assert sorted(cells(cut)) == sorted(expected)
    for one in cut:
        last = one.host + (one.rows - 1) * one.host_pitch + one.width - 1
        assert one.host // part == last // part


class Stream:
    cuda_stream = 7


ORDERED = [(10, 7), (30, 40), (130, 40), (230, 40), (330, 40), (900, 20)]  # place, bytes
SCATTERED = [(10, 7), (230, 40), (130, 40), (30, 40), (330, 40), (900, 20)]


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("pages", [ORDERED, SCATTERED])
def test_orders_to_the_driver(
    monkeypatch: pytest.MonkeyPatch, batches: bool, pages: list[tuple[int, int]]
) -> None:
    """`batches`: the driver knows them."""
    calls: list[str] = []

    def copy(order: page_copies._Copy2D, stream: int) -> int:
        assert {order.srcMemoryType, order.dstMemoryType} == {1, 2} and stream == 7
        calls.append("matrix")
        return page_copies._copy_on_host(order, stream)

    def batch(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> int:
        calls.append("batch")
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))
        return 0

    monkeypatch.setattr(page_copies, "_copy_2d", lambda: copy)
    monkeypatch.setattr(page_copies, "_copy_batch", lambda: batch if batches else None)
    monkeypatch.setattr(page_copies, "_AT_ONCE", 5)
    monkeypatch.setattr(page_copies, "_FEW_ROWS", 2)
    assert ctypes.sizeof(page_copies._Copy2D) == 128
    assert ctypes.sizeof(page_copies._BatchAttributes) == 24
    memory = bytearray(1_000)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mapping: Any = Mapping(150, base)  # a seam is inside of a page
    places = places_of([(base + at, n) for at, n in pages])

    def move(rows: torch.Tensor, *, into_pages: bool) -> None:
        stream: Any = Stream()
        pieces = pieces_of(places, [(rows.data_ptr(), rows.nbytes)])
        copy_whole(pieces, mapping, stream, into_pages=into_pages)

    rows = torch.arange(1, 188).to(torch.uint8)
    move(rows, into_pages=True)
    assert b"".join(memory[at : at + n] for at, n in pages) == bytes(rows.numpy())
    assert sum(byte != 0 for byte in memory) == len(rows)
    back = torch.zeros_like(rows)
    move(back, into_pages=False)
    assert torch.equal(back, rows)
    if batches and pages == SCATTERED:
        assert calls == ["batch"] * 4  # seven pieces, of which a call takes five
    else:
        assert set(calls) == {"matrix"}


def test_copies_that_cuda_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copies, "_copy_2d", lambda: lambda *_: 1)
    monkeypatch.setattr(page_copies, "_copy_batch", lambda: lambda *_: 1)
    stream: Any = Stream()
    mapping: Any = Mapping(1 << 20)
    with pytest.raises(EngineError, match="error 1"):
        copy_matrices([Matrix(0, 0, 8, 2, 8, 8)], stream, into_pages=True)
    scattered = pieces_at([(n * n * 100, 8) for n in range(20)], 0)
    for pieces in (pieces_at([(0, 8)], 0), scattered):
        with pytest.raises(EngineError, match="error 1"):
            copy_whole(pieces, mapping, stream, into_pages=True)
