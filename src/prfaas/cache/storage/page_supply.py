"""The numbers of a pool's pages: which are free, and which of them a reservation gets.

Free pages are kept as runs of neighbours. A reservation gets its pages from one run where one is
long enough, so that an engine copies them in few large pieces:

    fits into one run     the shortest such run (best fit), from its first page
    fits into no run      the longest run, and the same again for the rest
    more than is free     every free page, and fresh ones for the rest

Pages that are given back wait in a list until the next reservation. Evictions return units one by
one, and those of one prompt are neighbours, so most of them are joined before they become runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prfaas.cache.storage.budget import BudgetShare


class FreeRuns:
    """Runs of free pages, by place and by length. No two runs touch. There are few different
    lengths, the square root of twice the pages at most, so the list of them can stay sorted."""

    def __init__(self) -> None:
        self.pages = 0
        self._stops: dict[int, int] = {}  # by the first page
        self._starts: dict[int, int] = {}  # by the page after the last
        self._of_length: dict[int, dict[int, None]] = {}  # first pages, the latest run last
        self._lengths: list[int] = []  # sorted

    def __len__(self) -> int:
        return len(self._stops)

    def __iter__(self) -> Iterator[range]:
        return (range(start, stop) for start, stop in self._stops.items())

    def add(self, start: int, stop: int) -> None:
        """Pages [start, stop) are free. They become one run with the free pages on both sides."""
        self.pages += stop - start
        if start in self._starts:
            start = self._remove(self._starts[start]).start
        if stop in self._stops:
            stop = self._remove(stop).stop
        self._insert(start, stop)

    def take(self, pages: int) -> list[range]:
        """That many pages, in as few runs as possible, by their places. The caller has checked that
        they exist."""
        assert pages <= self.pages, f"{pages} pages requested, {self.pages} free"
        self.pages -= pages
        taken: list[range] = []
        while pages:
            at = bisect_left(self._lengths, pages)
            length = self._lengths[min(at, len(self._lengths) - 1)]
            run = self._remove(self._of_length[length].popitem()[0])  # the latest: no search
            if length > pages:
                self._insert(run.start + pages, run.stop)
                run = range(run.start, run.start + pages)
            taken.append(run)
            pages -= len(run)
        taken.sort(key=_first)
        return taken

    def check(self) -> None:
        assert self._starts == {stop: start for start, stop in self._stops.items()}
        assert self._stops.keys().isdisjoint(self._starts), "runs that touch are two"
        assert self.pages == sum(map(len, self))
        assert self._lengths == sorted(self._of_length)
        filed = [(start, length) for length, some in self._of_length.items() for start in some]
        assert sorted(filed) == sorted((run.start, len(run)) for run in self)
        assert all(self._of_length.values()) and all(map(len, self))

    def _insert(self, start: int, stop: int) -> None:
        length = stop - start
        self._stops[start] = stop
        self._starts[stop] = start
        same = self._of_length.get(length)
        if same is None:
            insort(self._lengths, length)
            self._of_length[length] = {start: None}
        else:
            same[start] = None

    def _remove(self, start: int) -> range:
        stop = self._stops.pop(start)
        del self._starts[stop]
        length = stop - start
        same = self._of_length[length]
        same.pop(start, None)  # `take` has taken it from there
        if not same:
            del self._of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return range(start, stop)


class PageSupply:
    """Pages that were used before come first, because every other page takes new memory."""

    def __init__(self, most_pages: int | None, share: BudgetShare | None) -> None:
        self.most_pages = most_pages  # if no other pool shared its memory
        self._share = share
        self._fresh = 0  # pages below this number have been handed out at least once
        self._free = FreeRuns()
        self._returned: list[tuple[int, int]] = []  # (start, stop), not among the free runs yet

    @property
    def capacity_pages(self) -> int | None:
        """The pages that the pool may have now. With a share it falls when other members of the
        budget grow, but never below the pages that the pool has used once."""
        if self.most_pages is None or self._share is None:
            return self.most_pages
        return min(self.most_pages, self._share.limit_pages)

    def take(self, units: Sequence[int]) -> list[tuple[int, ...]]:
        """The pages of a reservation, unit by unit; `units` are numbers of pages. The pages of a
        unit ascend, and those of the next unit follow them where the supply has neighbours."""
        self._join_returned()
        pages = sum(units)
        reused = min(pages, self._free.pages)
        runs = self._free.take(reused)
        if pages > reused:
            fresh = self._take_fresh(pages - reused)
            if runs and runs[-1].stop == fresh.start:
                fresh = range(runs.pop().start, fresh.stop)
            runs.append(fresh)
        return _divided(runs, units)

    def give_back(self, pages: Sequence[int]) -> None:
        """The pages of one unit, as `take` has given them."""
        start, last = pages[0], pages[-1]
        if last - start == len(pages) - 1:
            self._returned.append((start, last + 1))
        else:
            self._returned += ((page, page + 1) for page in pages)

    def free_runs(self) -> list[range]:
        """Free pages that were used before, by their places. No two runs touch."""
        self._join_returned()
        return sorted(self._free, key=_first)

    def check(self, used: Set[int]) -> None:
        """`used`: the pages that are on blocks. Every other one is free."""
        returned = [page for start, stop in self._returned for page in range(start, stop)]
        returned += (page for run in self._free for page in run)
        free = set(returned)
        assert len(free) == len(returned), "a page was returned twice"
        assert free.isdisjoint(used), "a page on a block is free"
        assert free | used == set(range(self._fresh)), "a page leaked"
        capacity = self.capacity_pages
        assert capacity is None or self._fresh <= capacity
        assert self._share is None or self._share.taken_pages == self._fresh
        self._free.check()

    def _join_returned(self) -> None:
        returned = self._returned
        if not returned:
            return
        returned.sort()
        start = stop = returned[0][0]
        for next_start, next_stop in returned:
            assert next_start >= stop, f"page {next_start} was returned twice"
            if next_start > stop:
                self._free.add(start, stop)
                start = next_start
            stop = next_stop
        self._free.add(start, stop)
        returned.clear()

    def _take_fresh(self, pages: int) -> range:
        if self._share is not None:
            self._share.take(pages)
        first = self._fresh
        self._fresh += pages
        return range(first, self._fresh)


def _divided(runs: Sequence[range], units: Sequence[int]) -> list[tuple[int, ...]]:
    """The pages of the runs, in order, for unit after unit."""
    found: list[tuple[int, ...]] = []
    left = iter(runs)
    at = stop = 0  # what is left of the current run
    for count in units:
        if at + count <= stop:
            found.append(tuple(range(at, at + count)))
            at += count
            continue
        pages: list[int] = []
        while count:
            if at == stop:
                run = next(left)
                at, stop = run.start, run.stop
            some = min(count, stop - at)
            pages += range(at, at + some)
            at += some
            count -= some
        found.append(tuple(pages))
    return found


def _first(run: range) -> int:
    return run.start
