"""A sequence of buffers that is addressed as one range of bytes, in memory and in mapped files.

Most segments have one buffer, and a transfer may have tens of thousands of segments, so that case
is kept cheap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from prfaas.errors import InputError

DISCARDED = -1  # instead of a descriptor: bytes that are received and dropped


class FileSlice(NamedTuple):
    """Memory that maps a file, such as a kvd's arena. The kernel can send it without a copy."""

    view: memoryview
    fd: int
    offset: int  # position of the view in the file


@dataclass(slots=True)
class FileRange:
    fd: int
    offset: int
    nbytes: int


class BufferSequence:
    """The buffers of one segment, in order. Their memoryviews must have items of one byte."""

    __slots__ = ("_files", "_starts", "_view", "_views")

    def __init__(self, name: str, nbytes: int, parts: Sequence[memoryview | FileSlice]) -> None:
        self._view: memoryview | None = None
        if len(parts) == 1 and isinstance(parts[0], memoryview):
            self._view = parts[0]
            given_bytes, item_bytes = self._view.nbytes, self._view.itemsize
        else:
            self._views = [part.view if isinstance(part, FileSlice) else part for part in parts]
            self._starts = list(accumulate((view.nbytes for view in self._views), initial=0))
            files = [part for part in parts if isinstance(part, FileSlice)]
            self._files = files if len(files) == len(parts) else []
            given_bytes = self._starts[-1]
            item_bytes = max((view.itemsize for view in self._views), default=1)
        if item_bytes != 1:
            raise InputError(
                f"the views have {item_bytes}-byte items", where=name, fix="cast them to bytes"
            )
        if given_bytes != nbytes:
            raise InputError(
                f"{nbytes} bytes announced, but the buffers have {given_bytes}", where=name
            )

    @property
    def on_file(self) -> bool:
        """Whether all bytes lie in files."""
        return self._view is None and bool(self._files)

    def count(self, offset: int, nbytes: int) -> int:
        """The number of views that `slices` would return."""
        return 1 if self._view is not None else len(self._parts_of(offset, nbytes))

    def slices(self, offset: int, nbytes: int) -> list[memoryview]:
        """The range [offset, offset + nbytes), as one or more views."""
        view = self._view
        if view is not None:
            return [view if nbytes == view.nbytes else view[offset : offset + nbytes]]
        return [
            self._views[index][within : within + taken]
            for index, within, taken in self._parts_of(offset, nbytes)
        ]

    def add_ranges(self, offset: int, nbytes: int, ranges: list[FileRange]) -> None:
        """Appends the same bytes as file ranges; adjacent ranges of one file are merged."""
        for index, within, taken in self._parts_of(offset, nbytes):
            file = self._files[index]
            _append(ranges, file.fd, file.offset + within, taken)

    def _parts_of(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """For each part that the range touches: its index, the offset in it, and the bytes."""
        index = bisect_right(self._starts, offset) - 1
        found = []
        while nbytes:
            within = offset - self._starts[index]
            taken = min(nbytes, self._views[index].nbytes - within)
            found.append((index, within, taken))
            offset += taken
            nbytes -= taken
            index += 1
        return found


def check_buffers(
    name: str, nbytes: int, parts: Sequence[memoryview | FileSlice]
) -> BufferSequence | FileSlice:
    """The buffers of a segment of `nbytes`. A single part of a file stays as it is: transfers of
    small segments have tens of thousands of them. Raises InputError."""
    if len(parts) == 1:
        part = parts[0]
        if type(part) is FileSlice and part.view.nbytes == nbytes and part.view.itemsize == 1:
            return part
    return BufferSequence(name, nbytes, parts)


def is_on_file(buffers: BufferSequence | FileSlice) -> bool:
    return buffers.on_file if isinstance(buffers, BufferSequence) else True


def slices_of(buffers: BufferSequence | FileSlice, offset: int, nbytes: int) -> list[memoryview]:
    """The range [offset, offset + nbytes), as one or more views."""
    if type(buffers) is FileSlice:
        view = buffers.view
        return [view if nbytes == view.nbytes else view[offset : offset + nbytes]]
    assert isinstance(buffers, BufferSequence)
    return buffers.slices(offset, nbytes)


def add_ranges(
    buffers: BufferSequence | FileSlice, offset: int, nbytes: int, ranges: list[FileRange]
) -> None:
    """Appends the same bytes as file ranges; adjacent ranges of one file are merged."""
    if type(buffers) is FileSlice:
        _append(ranges, buffers.fd, buffers.offset + offset, nbytes)
        return
    assert isinstance(buffers, BufferSequence)
    buffers.add_ranges(offset, nbytes, ranges)


def _append(ranges: list[FileRange], fd: int, offset: int, nbytes: int) -> None:
    if ranges:
        last = ranges[-1]
        if last.offset + last.nbytes == offset and last.fd == fd:
            last.nbytes += nbytes
            return
    ranges.append(FileRange(fd, offset, nbytes))
