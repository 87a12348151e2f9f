"""The second tier: units spilled to a file, page by page, with a digest of what was written.

The file is read and written by position, never mapped: a truncated file would kill the process that
touches its mapping. A short read, an I/O error or changed bytes make the unit a miss. The caller
owns the file descriptor.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prfaas.errors import InputError

_LOG = logging.getLogger(__name__)


class Slot(NamedTuple):
    """Where a spilled unit lies, and what its bytes must hash to."""

    pages: tuple[int, ...]
    digest: bytes


class SpillFile:
    def __init__(self, fd: int, page_bytes: int, pages: int) -> None:
        if page_bytes < 1 or pages < 0:
            raise InputError(
                f"a spill file cannot have {pages} pages of {page_bytes} bytes",
                fix="use at least 1 byte per page",
            )
        self._fd = fd
        self.page_bytes = page_bytes
        self.pages = pages
        self.failures = 0  # units that could not be written or read back
        self._fresh = 0
        self._returned: list[int] = []
        self._held: dict[tuple[int, ...], Slot] = {}

    @property
    def free_pages(self) -> int:
        return self.pages - self._fresh + len(self._returned)

    def write(self, views: Sequence[memoryview]) -> Slot | None:
        """Stores a unit given as whole pages. None when the file is full or the write fails."""
        nbytes = sum(view.nbytes for view in views)
        assert nbytes % self.page_bytes == 0, "a unit is whole pages"
        count = nbytes // self.page_bytes
        if count > self.free_pages:
            return None
        pages = self._take(count)
        try:
            for page, buffers in zip(pages, _per_page(views, self.page_bytes), strict=True):
                if os.pwritev(self._fd, buffers, page * self.page_bytes) != self.page_bytes:
                    raise OSError("short write")
        except OSError as error:
            self._failed("write", str(error))
            self._returned.extend(pages)
            return None
        slot = Slot(pages, _digest(views))
        self._held[pages] = slot
        return slot

    def read(self, slot: Slot, views: Sequence[memoryview]) -> bool:
        """Fills `views` with the unit. False when the bytes are not those written; the content of
        the views is then undefined."""
        assert self._held.get(slot.pages) is slot, "not a slot of this file"
        try:
            for page, buffers in zip(slot.pages, _per_page(views, self.page_bytes), strict=True):
                if os.preadv(self._fd, buffers, page * self.page_bytes) != self.page_bytes:
                    raise OSError("the file is shorter than it was")
        except OSError as error:
            self._failed("read", str(error))
            return False
        if _digest(views) != slot.digest:
            self._failed("read", "the bytes have changed")
            return False
        return True

    def free(self, slot: Slot) -> None:
        del self._held[slot.pages]
        self._returned.extend(slot.pages)

    def check(self) -> None:
        seen = set(self._returned)
        assert len(seen) == len(self._returned), "an SSD page was returned twice"
        for slot in self._held.values():
            assert seen.isdisjoint(slot.pages), "an SSD page has two owners"
            seen.update(slot.pages)
        assert seen == set(range(self._fresh)), "an SSD page leaked"
        assert self._fresh <= self.pages

    def _take(self, count: int) -> tuple[int, ...]:
        reused = min(count, len(self._returned))
        pages = [self._returned.pop() for _ in range(reused)]
        pages += range(self._fresh, self._fresh + count - reused)
        self._fresh += count - reused
        return tuple(pages)

    def _failed(self, what: str, error: str) -> None:
        # `error` is text: a log record with the exception would keep the pages' views alive.
        self.failures += 1
        if self.failures == 1:
            _LOG.warning(
                "SSD tier: %s failed (%s); the blocks count as misses; logged once", what, error
            )


def _per_page(views: Sequence[memoryview], page_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes, one list of views per page."""
    page: list[memoryview] = []
    room = page_bytes
    for view in views:
        while view.nbytes:
            piece, view = view[:room], view[room:]
            page.append(piece)
            room -= piece.nbytes
            if not room:
                yield page
                page, room = [], page_bytes
    assert not page, "a unit is whole pages"


def _digest(views: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.digest()
