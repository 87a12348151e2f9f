"""Which heads of which tokens of one layer are written, as long as some are missing. Pure.

The ranks of an engine report the heads that they hold, for ranges of tokens that need not be equal:

    rank 0, heads 0-1   |-------------|------|
    rank 1, heads 2-3   |------|
    fragments                  |-------------|   has heads 0-1
"""

from __future__ import annotations

from typing import NamedTuple


class _Fragment(NamedTuple):
    start: int
    stop: int
    heads: int  # bit h: head h is written


class HeadShares:
    def __init__(self, heads: int) -> None:
        self._all = (1 << heads) - 1
        self._fragments: list[_Fragment] = []  # disjoint, ascending; equal neighbours are merged

    def __len__(self) -> int:
        """The number of fragments. n calls of `add` make it at most 2 * (earlier number + n)."""
        return len(self._fragments)

    def add(self, start: int, stop: int, heads: range) -> list[tuple[int, int]]:
        """Counts these heads of tokens [start, stop) as written. Returns the ranges of tokens that
        have every head now; they are no longer remembered."""
        added = ((1 << len(heads)) - 1) << heads.start
        split: list[_Fragment] = []
        at = start  # [start, at) is done
        for fragment in self._fragments:
            first, last, written = fragment
            if last <= at or stop <= first:
                split.append(fragment)
                continue
            if first < at:
                split.append(_Fragment(first, at, written))
            elif at < first:
                split.append(_Fragment(at, first, added))
                at = first
            end = min(last, stop)
            split.append(_Fragment(at, end, written | added))
            if end < last:
                split.append(_Fragment(end, last, written))
            at = end
        if at < stop:
            split.append(_Fragment(at, stop, added))
            split.sort()
        complete: list[tuple[int, int]] = []
        kept: list[_Fragment] = []
        for fragment in split:
            if fragment.heads == self._all:
                complete.append((fragment.start, fragment.stop))
            elif kept and kept[-1].stop == fragment.start and kept[-1].heads == fragment.heads:
                kept[-1] = kept[-1]._replace(stop=fragment.stop)
            else:
                kept.append(fragment)
        self._fragments = kept
        return complete
