"""Pairs of views, of a CPU's blocks and of rows, that one copy each joins.

Views are computed as sizes, strides and offsets, because a chain of slices costs more than the copy
of a small block. A range of tokens that cuts the tiles of a packing becomes a few such pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from prfaas.integrations.canonical.packings import TokenView


class Span(NamedTuple):
    """Kernel blocks that follow each other in the cache and in the sequence."""

    row: int  # of the segment, where the span's first token belongs; negative before its start
    block: int
    blocks: int


class BlockCopies:
    """One part of a layer. Rows are elements of `dtype`, `row_elements` apart."""

    def __init__(
        self, tokens: TokenView, dtype: torch.dtype, row_bytes: int, first_byte: int, *, plain: bool
    ) -> None:
        """`first_byte`: of this rank's heads in a row. `plain`: elements are copied bit by bit, so
        that several of them may be copied as one."""
        view = tokens.view
        if plain:
            view = widened(view, (row_bytes, first_byte, tokens.dim * dtype.itemsize))
            dtype = view.dtype
        self.dtype = dtype
        self.row_elements = row_bytes // dtype.itemsize
        self.tokens_in_block = math.prod(tokens.token_factors)
        self._first = first_byte // dtype.itemsize
        self._view = view
        self._start = int(view.storage_offset())
        self._factors = tokens.token_factors
        factors = len(tokens.token_factors)
        sizes, strides = tuple(view.shape), tuple(view.stride())
        # For each depth: the axes after the first one, and the strides in blocks and in rows.
        self._tails = [sizes[depth + 1 :] for depth in range(factors + 1)]
        self._strides = [strides[depth:] for depth in range(factors + 1)]
        head = _contiguous(sizes[1 + factors :])
        steps = [math.prod(tokens.token_factors[n:]) for n in range(factors + 1)]
        self._row_strides = [
            (*(self.row_elements * step for step in steps[depth:]), *head)
            for depth in range(factors + 1)
        ]

    def pairs(
        self, rows: torch.Tensor, first_row: int, spans: Sequence[Span], first: int, last: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(rows, blocks) for rows [first, last) of the segment, as views of equal shape. `rows` is
        flat, of `dtype`, and begins with row `first_row`."""
        for depth, at, size, offset in self._tiles(spans, first, last):
            sizes = (size, *self._tails[depth])
            begin = (at - first_row) * self.row_elements + self._first
            yield (
                rows.as_strided(sizes, self._row_strides[depth], begin),
                self._view.as_strided(sizes, self._strides[depth], offset),
            )

    def zero(self, spans: Sequence[Span], first: int, last: int) -> None:
        for depth, _, size, offset in self._tiles(spans, first, last):
            sizes = (size, *self._tails[depth])
            self._view.as_strided(sizes, self._strides[depth], offset).zero_()

    def _tiles(
        self, spans: Sequence[Span], first: int, last: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """(depth, row, size of the first axis, offset in the storage)."""
        index = _span_at(spans, first)
        while index < len(spans) and first < last:
            span = spans[index]
            end = min(last, span.row + span.blocks * self.tokens_in_block)
            for depth, at, size, offset in tiles(
                (span.blocks, *self._factors),
                self._strides[0],
                first - span.row,
                end - span.row,
            ):
                start = self._start + span.block * self._strides[0][0]
                yield depth, span.row + at, size, start + offset
            first, index = end, index + 1


def tiles(
    factors: Sequence[int], strides: Sequence[int], first: int, last: int
) -> Iterator[tuple[int, int, int, int]]:
    """Tokens [first, last) of an axis that is divided into factors: whole tiles at once, and a tile
    that the range cuts along its inner factors. (depth, first token, size of that depth's axis,
    offset)."""
    if first >= last:
        return
    inner = math.prod(factors[1:])
    low, high = -(-first // inner), last // inner
    cut = [low - 1] if first % inner else []  # tiles that the range cuts
    if last % inner and high not in cut:
        cut.append(high)
    for tile in cut:
        if tile < low:
            yield from _inside(factors, strides, tile, first, min(last, low * inner))
    if low < high:
        yield 0, low * inner, high - low, low * strides[0]
    for tile in cut:
        if tile >= low:
            yield from _inside(factors, strides, tile, tile * inner, last)


def _inside(
    factors: Sequence[int], strides: Sequence[int], tile: int, first: int, last: int
) -> Iterator[tuple[int, int, int, int]]:
    base = tile * math.prod(factors[1:])
    for depth, at, size, offset in tiles(factors[1:], strides[1:], first - base, last - base):
        yield depth + 1, base + at, size, tile * strides[0] + offset


def _span_at(spans: Sequence[Span], row: int) -> int:
    """The last span that begins at or before `row`."""
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        if spans[middle].row <= row:
            low = middle + 1
        else:
            high = middle
    return max(0, low - 1)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))


def widened(view: torch.Tensor, row_steps: Sequence[int] = ()) -> torch.Tensor:
    """The same bytes as the widest integers that all steps allow: a tile of four bf16 dims is one
    element."""
    if view.stride(-1) != 1:
        return view
    size = view.element_size()
    steps = (*view.stride()[:-1], view.shape[-1], view.storage_offset())
    for dtype in (torch.int64, torch.int32):
        wide = dtype.itemsize
        is_aligned = view.data_ptr() % wide == 0 and all(step % wide == 0 for step in row_steps)
        if is_aligned and all(step * size % wide == 0 for step in steps):
            return view.view(dtype)
    return view
