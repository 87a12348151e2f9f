"""Requests that `route` holds back, and the order in which they are retried. Bookkeeping only.

There is one queue per cluster that requests wait for, because room at one cluster does not help
requests that wait for another. One more queue has the requests that no node could take. The hold's
precedence orders a queue, lowest first. A retry calls `route` again, with the state of that time.
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
    """The request waits: retry it after a prefill of `cluster` has ended, or after new reports."""

    reason: str
    cluster: ClusterId | None  # None: no node can take the request
    work_s: float  # expected prefill time there
    precedence: float


class HeldWork(NamedTuple):
    """Prefill seconds that wait for one cluster, by the length of the prefills: class k has those
    of up to 2^k eighths of a second, and the last class also all longer ones."""

    by_class: tuple[float, ...] = (0.0,) * 8
    first: float = math.inf  # the lowest precedence in the queue

    def up_to(self, work_s: float) -> float:
        """Seconds of prefills of this length class or shorter: the work before a new request."""
        return sum(self.by_class[: length_class(work_s) + 1])

    @property
    def total_s(self) -> float:
        return sum(self.by_class)

    def add(self, kind: int, work_s: float) -> HeldWork:
        changed = self.by_class[kind] + work_s
        return self._replace(by_class=(*self.by_class[:kind], changed, *self.by_class[kind + 1 :]))


def length_class(work_s: float) -> int:
    return max(0, min(7, math.ceil(math.log2(max(work_s, 1e-9) * 8))))


T = TypeVar("T")


class WaitingRoom(Generic[T]):
    """The held requests of one router. Each item is in one queue at a time."""

    def __init__(self) -> None:
        self._queues: dict[ClusterId | None, list[tuple[float, int, float, T]]] = {}
        self._work: dict[ClusterId, HeldWork] = {}
        self._serial = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def work(self) -> Mapping[ClusterId, HeldWork]:
        """Prefill work that waits, per cluster that has any. A snapshot."""
        return self._work

    def count(self, cluster: ClusterId | None) -> int:
        return len(self._queues.get(cluster, ()))

    def put(self, item: T, hold: Hold) -> None:
        self._serial += 1
        self._count += 1
        queue = self._queues.setdefault(hold.cluster, [])
        heappush(queue, (hold.precedence, self._serial, hold.work_s, item))
        self._account(hold.cluster, hold.work_s, +1)

    def queues(self) -> Iterator[ClusterId | None]:
        return iter([cluster for cluster, queue in self._queues.items() if queue])

    def take(self, cluster: ClusterId | None) -> T | None:
        """Removes and returns the first item of a queue; None if the queue is empty."""
        queue = self._queues.get(cluster)
        if not queue:
            return None
        _, _, work_s, item = heappop(queue)
        self._count -= 1
        self._account(cluster, work_s, -1)
        return item

    def remove(self, item: T) -> bool:
        """Removes an item that does not wait any more. Returns whether the item was here."""
        for cluster, queue in self._queues.items():
            for place, (_, _, work_s, waiting) in enumerate(queue):
                if waiting is item:
                    del queue[place]
                    heapify(queue)
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
        # Replaced and not modified, because views in use share the old mapping.
        work = dict(self._work)
        if queue := self._queues[cluster]:
            known = work.get(cluster, HeldWork())
            changed = known.add(length_class(work_s), sign * work_s)
            work[cluster] = changed._replace(first=queue[0][0])
        else:
            work.pop(cluster, None)
        self._work = work
