"""Where a segment's bytes lie in an arena, given which pages each unit is on. Pure arithmetic.

Used by every holder of a page table: an engine in another process, a transfer's receiver.
Independent of leases: the caller passes the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prfaas.cache.storage.arena import Arena
from prfaas.cache.units import UnitKey
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec, LinearState, Segment, block_slices

PagesOf: TypeAlias = Callable[[UnitKey], "Sequence[int] | None"]
PageTable: TypeAlias = Mapping[UnitKey, Sequence[int]]


class LeaseTables(NamedTuple):
    """The pages of a lease: those to read now, and those to write until the lease is committed."""

    readable: PageTable
    writable: PageTable


def segment_ranges(
    spec: KVSpec, block_tokens: int, arena: Arena, segment: Segment, pages_of: PagesOf
) -> list[tuple[int, int]]:
    """(start, stop) in the arena's file of the segment's bytes, in its order."""
    slices = list(block_slices(spec, segment, block_tokens))
    group = next(i for i, g in enumerate(spec.groups) if g.name == segment.group)
    linear = isinstance(spec.groups[group], LinearState)
    ranges: list[tuple[int, int]] = []
    for piece in slices:
        pages = pages_of((group, segment.stop if linear else piece.block))
        if pages is None:
            raise InputError(f"segment {segment.name} is not part of this lease")
        ranges += arena.ranges(pages, piece.offset, piece.nbytes)
    return ranges
