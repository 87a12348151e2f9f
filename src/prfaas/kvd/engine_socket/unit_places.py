"""The places of segments in an arena as arrays: the same bytes as `cache.storage.places`, without a
step per page.

A lease has thousands of units of one kind, whose pages are kept as a table of numbers. A segment
takes the same bytes of each unit, except of its first and its last one.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import PageTable, segment_ranges
from prfaas.cache.units import UnitKey
from prfaas.errors import InputError
from prfaas.kvspec import (
    FullAttention,
    KVSpec,
    LinearState,
    Segment,
    SlidingWindow,
    block_slices,
)

Numbers: TypeAlias = npt.NDArray[np.int64]
Ranges: TypeAlias = tuple[Numbers, Numbers]  # starts and stops in the arena


class _Units(NamedTuple):
    """The blocks of one group, in ascending order."""

    blocks: Numbers
    pages: Numbers  # [block, page of its unit]


class UnitPlaces:
    """Of one lease, whose table does not change. Thread-safe: two threads at worst do the same work
    twice."""

    def __init__(self, spec: KVSpec, block_tokens: int, arena: Arena, table: PageTable) -> None:
        self._spec = spec
        self._block_tokens = block_tokens
        self._arena = arena
        self._table = table
        self._units: dict[int, _Units | None] = {}
        self._states: dict[UnitKey, Numbers | None] = {}
        self._linear = {
            group.name: number
            for number, group in enumerate(spec.groups)
            if isinstance(group, LinearState)
        }

    def ranges(self, segment: Segment) -> Ranges:
        """InputError when the segment is not of the lease."""
        state = self._state_pages(segment)
        if state is not None:
            return self._same_bytes(segment, state)
        size = self._block_tokens
        first, last = -(-segment.start // size), segment.stop // size  # whole blocks
        pages = self._pages(segment.group, first, last) if last - first > 1 else None
        if pages is None:
            return self._one_by_one(segment)
        head = Segment(segment.group, segment.layer, segment.start, first * size)
        tail = Segment(segment.group, segment.layer, last * size, segment.stop)
        whole = Segment(segment.group, segment.layer, first * size, (first + 1) * size)
        found = [self._same_bytes(whole, pages)]
        if head.start < head.stop:
            found.insert(0, self._one_by_one(head))
        if tail.start < tail.stop:
            found.append(self._one_by_one(tail))
        starts, stops = zip(*found, strict=True)
        return np.concatenate(starts), np.concatenate(stops)

    def _same_bytes(self, block: Segment, pages: Numbers) -> Ranges:
        """The bytes that `block` takes of its unit, of every unit."""
        (piece,) = block_slices(self._spec, block, self._block_tokens)
        page_bytes, stop = self._arena.page_bytes, piece.offset + piece.nbytes
        columns = range(piece.offset // page_bytes, -(-stop // page_bytes))
        if columns.stop > pages.shape[1]:
            raise InputError(f"segment {block.name} is not part of this lease")
        starts = pages[:, columns.start : columns.stop] * page_bytes
        stops = starts + page_bytes
        starts[:, 0] += piece.offset - columns.start * page_bytes
        stops[:, -1] -= columns.stop * page_bytes - stop
        return starts.reshape(-1), stops.reshape(-1)

    def _state_pages(self, segment: Segment) -> Numbers | None:
        """Of the unit of a linear state. None for tokens, and for a unit that is missing."""
        number = self._linear.get(segment.group)
        if number is None:
            return None
        key = (number, segment.stop)
        if key not in self._states:
            pages = self._table.get(key)
            found = None if pages is None else np.array([pages], dtype=np.int64)
            if found is not None and (found.min() < 0 or found.max() >= self._arena.pages):
                found = None
            self._states[key] = found
        return self._states[key]

    def _one_by_one(self, segment: Segment) -> Ranges:
        found = segment_ranges(
            self._spec, self._block_tokens, self._arena, segment, self._table.get
        )
        pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _pages(self, group: str, first: int, last: int) -> Numbers | None:
        """Of blocks [first, last). None where a block is missing, or is not of tokens."""
        number = next((n for n, g in enumerate(self._spec.groups) if g.name == group), None)
        if number is None:
            return None
        if number not in self._units:
            self._units[number] = self._read(number)
        units = self._units[number]
        if units is None:
            return None
        at = int(np.searchsorted(units.blocks, first))
        end = at + last - first
        if (
            end > len(units.blocks)
            or units.blocks[at] != first
            or units.blocks[end - 1] != last - 1
        ):
            return None  # blocks differ, so equal ends mean that none is missing between them
        return units.pages[at:end]

    def _read(self, group: int) -> _Units | None:
        if not isinstance(self._spec.groups[group], FullAttention | SlidingWindow):
            return None
        found = sorted((key[1], pages) for key, pages in self._table.items() if key[0] == group)
        if len({len(pages) for _, pages in found}) != 1:
            return None
        blocks = np.array([block for block, _ in found], dtype=np.int64)
        pages = np.array([pages for _, pages in found], dtype=np.int64)
        if pages.min() < 0 or pages.max() >= self._arena.pages:
            return None
        return _Units(blocks, pages)
