"""Requests that `route` told to wait, and whom to ask about next. Bookkeeping only.

One line per cluster that a request would go to, because room at one cluster says nothing to those
who wait for another; one more for those whom nobody could take. Within a line the hold's precedence
decides, lowest first. Whoever keeps the room asks again with `route`: by then things have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from prfaas.types import ClusterId

# `retry` stops scanning a queue after this many refusals: the requests further back in the queue
# are unlikely to be placed either.
MAX_REFUSALS = 3


class Hold(NamedTuple):
    """Not now: ask again when a prefill of `cluster` has ended, or after the next reports."""

    reason: str
    cluster: ClusterId | None  # None: nobody can take it at all
    work_s: float  # of prefill, there
    precedence: float


class HeldWork(NamedTuple):
    """Prefill seconds held back for one cluster, by the length of the prefills: class k has those
    of up to 2^k eighths of a second, the last also all longer ones."""

    by_class: tuple[float, ...] = (0.0,) * 8
    first: float = math.inf  # the lowest precedence in the line: whose turn is next

    def up_to(self, work_s: float) -> float:
        """Of prefills about as long or shorter: what goes before a newcomer of that length."""
        return sum(self.by_class[: length_class(work_s) + 1])

    @property
    def total_s(self) -> float:
        return sum(self.by_class)

    def more(self, kind: int, work_s: float) -> HeldWork:
        changed = self.by_class[kind] + work_s
        return self._replace(by_class=(*self.by_class[:kind], changed, *self.by_class[kind + 1 :]))


def length_class(work_s: float) -> int:
    return max(0, min(7, math.ceil(math.log2(max(work_s, 1e-9) * 8))))


T = TypeVar("T")


class WaitingRoom(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[ClusterId | None, list[tuple[float, int, float, T]]] = {}
        self._work: dict[ClusterId, HeldWork] = {}
        self._serial = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def work(self) -> Mapping[ClusterId, HeldWork]:
        """Prefill work that waits here, per cluster it would go to, where any does. A snapshot."""
        return self._work

    def count(self, cluster: ClusterId | None) -> int:
        return len(self._queues.get(cluster, ()))

    def put(self, who: T, hold: Hold) -> None:
        self._serial += 1
        self._count += 1
        line = self._queues.setdefault(hold.cluster, [])
        heappush(line, (hold.precedence, self._serial, hold.work_s, who))
        self._account(hold.cluster, hold.work_s, +1)

    def queues(self) -> Iterator[ClusterId | None]:
        return iter([cluster for cluster, line in self._queues.items() if line])

    def take(self, cluster: ClusterId | None) -> T | None:
        """The next in line; None when nobody is."""
        line = self._queues.get(cluster)
        if not line:
            return None
        _, _, work_s, who = heappop(line)
        self._count -= 1
        self._account(cluster, work_s, -1)
        return who

    def remove(self, who: T) -> bool:
        """Somebody does not wait any more. Whether it was there."""
        for cluster, line in self._queues.items():
            for place, (_, _, work_s, waiting) in enumerate(line):
                if waiting is who:
                    del line[place]
                    heapify(line)
                    self._count -= 1
                    self._account(cluster, work_s, -1)
                    return True
        return False

    def retry(
        self,
        try_dispatch: Callable[[T], Hold | None],
        has_room: Callable[[ClusterId], bool],
        on_placed: Callable[[T], None] | None = None,
    ) -> None:
        """Retries the waiting items, queue by queue, as long as the queue's cluster `has_room`.

        `try_dispatch` dispatches an item and returns None, or returns the hold under which the item
        waits again. `on_placed` is called for each dispatched item, before the next one is tried.
        Items without a cluster are retried whether or not there is room anywhere.
        """
        for cluster in self.queues():
            refused: list[tuple[T, Hold]] = []
            while cluster is None or has_room(cluster):
                item = self.take(cluster)
                if item is None:
                    break
                hold = try_dispatch(item)
                if hold is not None:
                    refused.append((item, hold))
                    if len(refused) == MAX_REFUSALS:
                        break
                elif on_placed is not None:
                    on_placed(item)
            # An item goes back only after the scan, so that no scan meets it twice.
            for item, hold in refused:
                self.put(item, hold)

    def _account(self, cluster: ClusterId | None, work_s: float, sign: int) -> None:
        if cluster is None:
            return
        # Replaced, not changed: views in use keep what they saw.
        work = dict(self._work)
        if line := self._queues[cluster]:
            known = work.get(cluster, HeldWork())
            changed = known.more(length_class(work_s), sign * work_s)
            work[cluster] = changed._replace(first=line[0][0])
        else:
            work.pop(cluster, None)
        self._work = work
