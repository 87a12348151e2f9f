"""Buffers laid end to end, addressed as one, in memory and (where they are a file's) on file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class FileSlice(NamedTuple):
    """Memory that maps a file, as a kvd's arena does: the kernel can send it without a copy."""

    view: memoryview
    fd: int
    offset: int  # where the view begins in the file


class FileRange(NamedTuple):
    fd: int
    offset: int
    nbytes: int


class Laid:
    """A segment's bytes, in one view or (as in pages) in several. Most have one: that is cheap."""

    __slots__ = ("_files", "_starts", "_views")

    def __init__(self, name: str, nbytes: int, parts: Sequence[memoryview | FileSlice]) -> None:
        views = [part.view if isinstance(part, FileSlice) else part for part in parts]
        self._files = [part for part in parts if isinstance(part, FileSlice)]
        if len(self._files) != len(parts):
            self._files = []  # some bytes are in memory only: all are sent from there
        if len(views) == 1:
            held = views[0].nbytes
        else:
            self._starts = list(accumulate((view.nbytes for view in views), initial=0))
            held = self._starts[-1]
        assert held == nbytes, f"{name}: {nbytes} bytes announced, buffers of {held} given"
        self._views = [view.cast("B") for view in views]

    def slices(self, offset: int, nbytes: int) -> list[memoryview]:
        """[offset, offset + nbytes), in as many views as it takes."""
        views = self._views
        if len(views) == 1:
            view = views[0]
            return [view if nbytes == view.nbytes else view[offset : offset + nbytes]]
        index = bisect_right(self._starts, offset) - 1
        found = []
        while nbytes:
            within = offset - self._starts[index]
            taken = min(nbytes, views[index].nbytes - within)
            found.append(views[index][within : within + taken])
            offset += taken
            nbytes -= taken
            index += 1
        return found

    def file_ranges(self, offset: int, nbytes: int) -> list[FileRange]:
        """The same bytes on file; empty where they are in memory only."""
        if not self._files:
            return []
        if len(self._files) == 1:
            file = self._files[0]
            return [FileRange(file.fd, file.offset + offset, nbytes)]
        index = bisect_right(self._starts, offset) - 1
        found = []
        while nbytes:
            file = self._files[index]
            within = offset - self._starts[index]
            taken = min(nbytes, file.view.nbytes - within)
            found.append(FileRange(file.fd, file.offset + within, taken))
            offset += taken
            nbytes -= taken
            index += 1
        return found


def joined(ranges: list[FileRange], more: list[FileRange]) -> None:
    """Appends `more`; what lies next to each other in the file becomes one range."""
    for item in more:
        if ranges:
            last = ranges[-1]
            if (last.fd, last.offset + last.nbytes) == (item.fd, item.offset):
                ranges[-1] = FileRange(last.fd, last.offset, last.nbytes + item.nbytes)
                continue
        ranges.append(item)
