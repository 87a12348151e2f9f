"""Rows of canonical bytes over the pages of a segment.

A row is what a layer keeps of one token, or one whole state; all rows of a segment have the same
number of bytes. Pages follow each other in the segment's order, but not in memory, and may end
inside a row, even inside an element:

    page 0  | row 0 | row 1 | row 2 . . |        rows 0 and 1: one view of the page's memory
    page 1  | . . row 2 | row 3 | row 4 |        row 2: a copy, joined from both pages

A rank owns some columns of a row: its own heads. It writes no other byte of a page, because other
ranks write theirs at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from prfaas.errors import EngineError

Columns: TypeAlias = Sequence[range]  # bytes of a row, in ascending order and disjoint


class Column(NamedTuple):
    """Consecutive bytes of a row that a rank holds."""

    place: range  # in the row of the whole model
    at: int  # in the rank's own row, which is what staging holds


@dataclass(frozen=True, slots=True)
class RowShape:
    """Rows of the whole model, and the rank's own columns of them."""

    row_bytes: int
    own_bytes: int  # of a row in staging; alignment may make it larger than the columns' sum
    columns: tuple[Column, ...]

    @property
    def places(self) -> tuple[range, ...]:
        return tuple(column.place for column in self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of a row that this rank copies."""
        return sum(len(column.place) for column in self.columns)

    @property
    def is_whole(self) -> bool:
        """A row in staging is a row of the whole model."""
        whole = (Column(range(self.row_bytes), 0),)
        return self.own_bytes == self.row_bytes and self.columns == whole


def whole_rows(row_bytes: int) -> RowShape:
    """Of an engine with one rank."""
    return RowShape(row_bytes, row_bytes, (Column(range(row_bytes), 0),))


def joined(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Neighbours as one column: with all heads, keys and values are one run of bytes."""
    found: list[Column] = []
    for column in columns:
        if found:
            last = found[-1]
            ends = last.place.stop, last.at + len(last.place)
            if ends == (column.place.start, column.at):
                found[-1] = Column(range(last.place.start, column.place.stop), last.at)
                continue
        found.append(column)
    return tuple(found)


class _Run(NamedTuple):
    """Consecutive rows: whole ones inside one page, or a single row that pages cut."""

    first: int
    rows: int
    pieces: tuple[torch.Tensor, ...]  # uint8, over the pages' memory


def writable_rows(
    pages: Sequence[memoryview], rows: int, row_bytes: int, columns: Columns, alignment: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the first row, uint8 [count, row_bytes]) for each run of rows. The caller writes
    the columns of a run before it asks for the next one; only `columns` reach the pages."""
    if any(page.readonly for page in pages):
        raise EngineError("the pages of a segment are read-only")
    for run in _runs(pages, rows, row_bytes):
        if _is_direct(run, alignment):
            yield run.first, run.pieces[0].view(run.rows, row_bytes)
            continue
        scratch = torch.empty((run.rows, row_bytes), dtype=torch.uint8)
        yield run.first, scratch
        if len(run.pieces) == 1:
            target = run.pieces[0].view(run.rows, row_bytes)
            for column in columns:
                own = slice(column.start, column.stop)
                target[:, own].copy_(scratch[:, own])
        else:
            _write_cut_row(run.pieces, scratch[0], columns)


def readable_rows(
    pages: Sequence[memoryview], rows: int, row_bytes: int, alignment: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """As `writable_rows`, with the bytes of the pages. The caller must not change them."""
    for run in _runs(pages, rows, row_bytes):
        if _is_direct(run, alignment):
            yield run.first, run.pieces[0].view(run.rows, row_bytes)
        else:
            yield run.first, torch.cat(run.pieces).view(run.rows, row_bytes)


def page_range(pages: Sequence[memoryview], first: int, last: int) -> list[memoryview]:
    """Bytes [first, last) of the pages, as views of the same memory."""
    found, at = [], 0
    for page in pages:
        low, high = max(first - at, 0), min(last - at, page.nbytes)
        if low < high:
            found.append(page[low:high])
        at += page.nbytes
    return found


def scatter_bytes(flat: torch.Tensor, pages: Sequence[memoryview]) -> None:
    """Bytes of the host into pages, in order. Large copies are made without the GIL, so that the
    thread that launches kernels does not wait."""
    if any(page.readonly for page in pages):
        raise EngineError("the pages of a segment are read-only")
    source, at = flat.numpy(), 0
    for page in pages:
        np.frombuffer(page, dtype=np.uint8)[:] = source[at : at + page.nbytes]
        at += page.nbytes


def gather_bytes(pages: Sequence[memoryview], flat: torch.Tensor) -> None:
    """The other way."""
    target, at = flat.numpy(), 0
    for page in pages:
        target[at : at + page.nbytes] = np.frombuffer(page, dtype=np.uint8)
        at += page.nbytes


def _is_direct(run: _Run, alignment: int) -> bool:
    return len(run.pieces) == 1 and run.pieces[0].data_ptr() % alignment == 0


def _runs(pages: Sequence[memoryview], rows: int, row_bytes: int) -> Iterator[_Run]:
    total = sum(page.nbytes for page in pages)
    if total != rows * row_bytes:
        raise EngineError(
            f"{rows} rows of {row_bytes} bytes do not fit into pages of {total} bytes in all"
        )
    row = 0
    cut: list[torch.Tensor] = []  # the pieces of the current row, up to the end of the last page
    missing = 0  # bytes that the current row still needs
    for page in pages:
        if not page.nbytes:
            continue
        rest = page
        if missing:
            piece, rest = rest[:missing], rest[missing:]
            cut.append(_bytes_of(piece))
            missing -= piece.nbytes
            if missing:
                continue
            yield _Run(row, 1, tuple(cut))
            row, cut = row + 1, []
        count = rest.nbytes // row_bytes
        if count:
            yield _Run(row, count, (_bytes_of(rest[: count * row_bytes]),))
            row += count
        if rest.nbytes % row_bytes:
            cut = [_bytes_of(rest[count * row_bytes :])]
            missing = row_bytes - len(cut[0])


def _write_cut_row(pieces: Sequence[torch.Tensor], row: torch.Tensor, columns: Columns) -> None:
    at = 0
    for piece in pieces:
        for column in columns:
            first, last = max(column.start, at), min(column.stop, at + len(piece))
            if first < last:
                piece[first - at : last - at].copy_(row[first:last])
        at += len(piece)


def _bytes_of(page: memoryview) -> torch.Tensor:
    """A tensor without an offset in its storage, so that its address alone says what may view it
    as wider elements."""
    if page.readonly:  # torch has no read-only tensors; an arena's pages are writable
        return torch.frombuffer(bytearray(page), dtype=torch.uint8)
    return torch.frombuffer(page, dtype=torch.uint8)
