"""The second tier: units spilled to a file, page by page, with a digest of what was written.

The file is read and written by position, never mapped: a truncated file would kill the process that
touches its mapping. A short read, an I/O error or changed bytes make the unit a miss. The caller
owns the file descriptor.

`write` and `read` may run in another thread than the rest, one at a time: they use the file and the
views only. The pages of the file are taken and freed by the pool's owner.
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
    """Where a spilled unit lies, and what its bytes must hash to (empty until it is written)."""

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
        self._taken: set[int] = set()

    @property
    def free_pages(self) -> int:
        return self.pages - len(self._taken)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Pages of the file for one unit. None when fewer are free."""
        if count > self.free_pages:
            return None
        reused = min(count, len(self._returned))
        pages = [self._returned.pop() for _ in range(reused)]
        pages += range(self._fresh, self._fresh + count - reused)
        self._fresh += count - reused
        self._taken.update(pages)
        return tuple(pages)

    def free(self, pages: Sequence[int]) -> None:
        assert self._taken.issuperset(pages), "not taken from this file"
        self._taken.difference_update(pages)
        self._returned.extend(pages)

    def write(self, pages: Sequence[int], views: Sequence[memoryview]) -> bytes | None:
        """Writes a unit of whole pages. The digest of its bytes, or None when the write fails."""
        try:
            for page, buffers in zip(pages, _per_page(views, self.page_bytes), strict=True):
                if os.pwritev(self._fd, buffers, page * self.page_bytes) != self.page_bytes:
                    raise OSError("short write")
        except OSError as error:
            self._failed("write", str(error))
            return None
        return _digest(views)

    def read(self, slot: Slot, views: Sequence[memoryview]) -> bool:
        """Fills `views` with the unit. False when the bytes are not those written; the content of
        the views is then undefined."""
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

    def check(self, owned: Sequence[Sequence[int]]) -> None:
        """Asserts that each page is free, or belongs to exactly one of the units `owned`."""
        pages = [page for unit in owned for page in unit]
        assert len(pages) == len(set(pages)), "an SSD page has two owners"
        assert set(pages) == self._taken, "an SSD page leaked"
        assert len(self._returned) == len(set(self._returned)), "an SSD page was returned twice"
        assert self._taken.isdisjoint(self._returned)
        assert self._taken.union(self._returned) == set(range(self._fresh))
        assert self._fresh <= self.pages

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
