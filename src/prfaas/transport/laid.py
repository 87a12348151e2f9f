"""Buffers laid end to end, addressed as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class Laid:
    """A segment's bytes, in one view or (as in pages) in several. Most have one: that is cheap."""

    __slots__ = ("_starts", "_views")

    def __init__(self, name: str, nbytes: int, views: Sequence[memoryview]) -> None:
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
