"""Where a segment's bytes lie in an arena, given which pages each unit is on. Pure arithmetic.

Used by every holder of a page table: an engine in another process, a transfer's receiver.
Independent of leases: the caller passes the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.cache.storage.arena import Arena
from prfaas.cache.units import UnitKey
from prfaas.errors import InputError
from prfaas.kvspec import BlockSlice, KVSpec, LinearState, Segment, block_slices

PagesOf: TypeAlias = Callable[[UnitKey], "Sequence[int] | None"]
PageTable: TypeAlias = Mapping[UnitKey, Sequence[int]]


class LeaseTables(NamedTuple):
    """The pages of a lease: those to read now, and those to write until the lease is committed."""

    readable: PageTable
    writable: PageTable


def segment_ranges(
    spec: KVSpec, block_tokens: int, arena: Arena, segment: Segment, pages_of: PagesOf
) -> list[tuple[int, int]]:
    """(start, stop) in the arena's file of the segment's bytes, in its order. Neighbours are one
    pair."""
    ranges: list[tuple[int, int]] = []
    page_bytes = arena.page_bytes
    end = -1  # of the last range
    for (_, offset, nbytes), group, blocks in _slices(spec, segment, block_tokens):
        position, within = divmod(offset, page_bytes)
        is_in_page = within + nbytes <= page_bytes
        for block in blocks:
            pages = pages_of((group, block))
            if pages is None:
                raise InputError(f"segment {segment.name} is not part of this lease")
            if is_in_page:  # usual, and much faster
                start = pages[position] * page_bytes + within
                found = [(start, start + nbytes)]
            else:
                found = arena.ranges(pages, offset, nbytes)
            if found[0][0] == end:
                ranges[-1] = ranges[-1][0], found.pop(0)[1]
            ranges += found
            end = ranges[-1][1]
    return ranges


def _slices(
    spec: KVSpec, segment: Segment, block_tokens: int
) -> Iterator[tuple[BlockSlice, int, range]]:
    """The segment's slices, each with its group and the units that have it at the same place. All
    whole blocks have, so that one slice is made for all of them: an engine computes the places of
    one layer while a device copies the layer before."""
    first = next(block_slices(spec, segment, block_tokens))  # checks the segment
    group = next(i for i, g in enumerate(spec.groups) if g.name == segment.group)
    if isinstance(spec.groups[group], LinearState):
        yield first, group, range(segment.stop, segment.stop + 1)
        return
    second, last = first.block + 1, segment.stop // block_tokens
    yield first, group, range(first.block, second)
    for blocks, stop in (
        (range(second, last), (second + 1) * block_tokens),
        (range(max(second, last), last + 1), segment.stop),
    ):
        start = blocks.start * block_tokens
        if blocks and start < stop:
            part = Segment(segment.group, segment.layer, start, stop)
            yield next(block_slices(spec, part, block_tokens)), group, blocks


def joint_ranges(
    spec: KVSpec, block_tokens: int, arena: Arena, segments: Sequence[Segment], pages_of: PagesOf
) -> list[tuple[int, int]]:
    """(start, stop) in the arena's file of segments that differ in the layer alone: unit by unit,
    and in each unit segment by segment. Neighbours are one pair."""
    if len({(s.group, s.start, s.stop) for s in segments}) != 1:
        raise InputError("the segments differ in more than the layer")
    starts = [next(block_slices(spec, s, block_tokens)).offset for s in segments]
    group = next(i for i, g in enumerate(spec.groups) if g.name == segments[0].group)
    linear = isinstance(spec.groups[group], LinearState)
    ranges: list[tuple[int, int]] = []
    runs: dict[int, list[tuple[int, int]]] = {}  # by the bytes of a slice
    for piece in block_slices(spec, segments[0], block_tokens):
        pages = pages_of((group, segments[0].stop if linear else piece.block))
        if pages is None:
            raise InputError(f"segment {segments[0].name} is not part of this lease")
        if piece.nbytes not in runs:
            runs[piece.nbytes] = _joined([start - starts[0] for start in starts], piece.nbytes)
        for shift, nbytes in runs[piece.nbytes]:
            offset = piece.offset + shift
            if len(pages) == 1 and offset + nbytes <= arena.page_bytes:  # usual, and much faster
                start = pages[0] * arena.page_bytes + offset
                found = [(start, start + nbytes)]
            else:
                found = arena.ranges(pages, offset, nbytes)
            if ranges and found[0][0] == ranges[-1][1]:
                ranges[-1] = ranges[-1][0], found.pop(0)[1]
            ranges += found
    return ranges


def _joined(shifts: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    """(shift, bytes): layers that follow each other in a unit without a gap are one run."""
    found: list[tuple[int, int]] = []
    for shift in shifts:
        if found and found[-1][0] + found[-1][1] == shift:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((shift, nbytes))
    return found
