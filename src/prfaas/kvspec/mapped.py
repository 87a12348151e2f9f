"""Bytes of a mapped file as numbers instead of views: thousands of pages cost a few operations.

A sink or source over an arena may offer these in addition to views (`MappedSink`, `MappedSource`).
An engine that copies with a device needs addresses only, and a view per page takes longer than the
page's bytes.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prfaas.kvspec.segments import Segment


@dataclass(frozen=True, slots=True)
class MappedRanges:
    """[start, stop) of each range, counted from the beginning of the mapping, in order."""

    memory: mmap.mmap
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return int((self.stops - self.starts).sum())

    def part(self, first: int, last: int) -> MappedRanges:
        """Bytes [first, last) of all ranges together."""
        ends = np.cumsum(self.stops - self.starts)
        if first <= 0 and last >= (int(ends[-1]) if len(ends) else 0):
            return self
        begins = ends - (self.stops - self.starts)
        cut = slice(
            int(np.searchsorted(ends, first, "right")), int(np.searchsorted(begins, last, "left"))
        )
        starts = self.starts[cut] + np.maximum(first - begins[cut], 0)
        stops = self.stops[cut] - np.maximum(ends[cut] - last, 0)
        return MappedRanges(self.memory, starts, stops)

    def views(self) -> list[memoryview]:
        """Writable, without copying."""
        whole = memoryview(self.memory)
        pairs = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        return [whole[start:stop] for start, stop in pairs]


@runtime_checkable
class MappedSink(Protocol):
    def mapped_buffers(self, segment: Segment) -> MappedRanges:
        """The same memory as `buffers`."""


@runtime_checkable
class MappedSource(Protocol):
    def mapped_views(self, segment: Segment) -> MappedRanges:
        """The same memory as `views`."""
