"""The arena: uniform pages of real bytes, mapped from the caller's file descriptor.

The file is a memfd that several processes map, or any file that does not shrink while mapped. All
groups use the same pages: a logical block or a linear state is a *unit* and lies on k pages, which
need not be neighbours. Independent of hashes, groups and leases.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.errors import InputError

MAX_PADDING = 0.05
# Whole memory pages first (direct I/O, shared mappings); tiny models need smaller steps.
_ALIGNMENTS = (4096, 512, 64, 1)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The page size all groups share, and how many pages a unit of each group takes."""

    page_bytes: int
    unit_bytes: tuple[int, ...]

    def pages(self, group: int) -> int:
        return -(-self.unit_bytes[group] // self.page_bytes)

    def padding(self, group: int) -> float:
        """Bytes wasted per byte used."""
        return self.pages(group) * self.page_bytes / self.unit_bytes[group] - 1.0


def choose_layout(unit_bytes: Sequence[int]) -> PageLayout:
    """The largest page, as coarsely aligned as possible, that pads no group by 5% or more."""
    assert unit_bytes and all(size > 0 for size in unit_bytes), unit_bytes
    smallest = min(unit_bytes)
    for alignment in _ALIGNMENTS:
        for parts in range(1, smallest // alignment + 1):
            page = -(-smallest // parts // alignment) * alignment
            layout = PageLayout(page, tuple(unit_bytes))
            if all(layout.padding(group) < MAX_PADDING for group in range(len(unit_bytes))):
                return layout
    raise AssertionError("a page of one byte pads nothing")


class Arena:
    """`pages` pages mapped from `fd`. The caller keeps the descriptor; its file must cover them."""

    def __init__(self, fd: int, page_bytes: int, pages: int) -> None:
        if page_bytes < 1 or pages < 1:  # a mapping of no bytes would be one of the whole file
            raise InputError(
                f"an arena cannot have {pages} pages of {page_bytes} bytes",
                fix="give at least one page of one byte",
            )
        needed = page_bytes * pages
        size = os.fstat(fd).st_size
        if size < needed:
            raise InputError(
                f"the arena's file has {size} bytes; {pages} pages of {page_bytes} need {needed}",
                fix="set the file's size before mapping it",
            )
        self.page_bytes = page_bytes
        self.pages = pages
        self._map = mmap.mmap(fd, needed)
        self._view = memoryview(self._map)

    def ranges(
        self, pages: Sequence[int], offset: int = 0, nbytes: int | None = None
    ) -> list[tuple[int, int]]:
        """(start, stop) in the file of `nbytes` bytes from `offset` of the unit on `pages`: one
        pair per run of neighbouring pages."""
        length = len(pages) * self.page_bytes
        stop = length if nbytes is None else offset + nbytes
        if not 0 <= offset <= stop <= length:
            raise InputError(f"bytes {offset} to {stop} are outside a unit of {length} bytes")
        ranges: list[tuple[int, int]] = []
        start_byte = end_byte = -1  # of the run of neighbours being gathered
        while offset < stop:
            position, within = divmod(offset, self.page_bytes)
            page = pages[position]
            if not 0 <= page < self.pages:  # a slice would be another page's bytes, or too short
                raise InputError(f"the arena has {self.pages} pages, and no page {page}")
            count = min(self.page_bytes - within, stop - offset)
            first = page * self.page_bytes + within
            if first == end_byte:
                end_byte += count
            else:
                if start_byte >= 0:
                    ranges.append((start_byte, end_byte))
                start_byte, end_byte = first, first + count
            offset += count
        if start_byte >= 0:
            ranges.append((start_byte, end_byte))
        return ranges

    def view(self, start: int, stop: int) -> memoryview:
        """A writable view, without copying."""
        return self._view[start:stop]

    def views(
        self, pages: Sequence[int], offset: int = 0, nbytes: int | None = None
    ) -> list[memoryview]:
        """Writable views of the same `ranges`, without copying."""
        return [self._view[start:stop] for start, stop in self.ranges(pages, offset, nbytes)]

    def close(self) -> None:
        """Unmaps the file. The caller has released every view."""
        self._view.release()
        self._map.close()

    def __repr__(self) -> str:
        return f"Arena({self.pages} pages of {self.page_bytes} bytes)"
