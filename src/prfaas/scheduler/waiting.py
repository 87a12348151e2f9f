"""Requests that `route` holds back, and the order in which they are retried. Bookkeeping only.

There is one queue per cluster that requests wait for, because room at one cluster does not help
requests that wait for another. One more queue has the requests that no node could take. The hold's
precedence orders the requests of one tenant in a queue, lowest first. Between tenants the queue is
fair: see `FairClock`. A retry calls `route` again, with the state of that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from prfaas.types import ClusterId

# `retry` stops scanning a queue after this many refusals: the requests further back in the queue
# are unlikely to be placed either. Where several tenants wait, each of them has so many refusals,
# and all of them together have at most `MAX_REFUSALS_OF_ALL`.
MAX_REFUSALS = 3
MAX_REFUSALS_OF_ALL = 15
CLASSES = 8  # of prefills by their length


class Hold(NamedTuple):
    """The request waits: retry it after a prefill of `cluster` has ended, or after new reports."""

    reason: str
    cluster: ClusterId | None  # None: no node can take the request
    work_s: float  # expected prefill time there
    precedence: float


class HeldWork(NamedTuple):
    """Prefill seconds that wait for one cluster, by the length of the prefills: class k has those
    of up to 2^k eighths of a second, and the last class also all longer ones."""

    by_class: tuple[float, ...] = (0.0,) * CLASSES
    first: float = math.inf  # the lowest precedence in the queue
    own_s: float = 0.0  # of this, the work of the requests of whoever asks

    def up_to(self, work_s: float) -> float:
        """Seconds of prefills of this length class or shorter: the work before a new request."""
        return sum(self.by_class[: length_class(work_s) + 1])

    @property
    def total_s(self) -> float:
        return sum(self.by_class)

    def add(self, kind: int, work_s: float) -> HeldWork:
        changed = self.by_class[kind] + work_s
        by_class = (*self.by_class[:kind], changed, *self.by_class[kind + 1 :])
        return HeldWork(by_class, self.first, self.own_s + work_s)


def length_class(work_s: float) -> int:
    return max(0, min(CLASSES - 1, math.ceil(math.log2(max(work_s, 1e-9) * 8))))


class FairClock:
    """Start-time fair queueing over the prefill work of one cluster.

    The start tag of a tenant is the work that it has been given, divided by its weight. The tenant
    with the lowest tag is next. While tenants wait, their tags differ by no more than the last item
    of each. A tenant that had nothing to do starts at the tag of the latest dispatch, so that it
    has neither credit nor debt from that time.
    """

    __slots__ = ("now", "tags")

    def __init__(self) -> None:
        self.now = 0.0  # the start tag of the latest dispatch
        self.tags: dict[str, float] = {}

    def tag(self, tenant: str, *, waits: bool) -> float:
        """The start tag of the tenant's next item. `waits`: the tenant has an item that waits, so
        its tag stands."""
        known = self.tags.get(tenant, 0.0)
        return known if waits else max(known, self.now)

    def start(self, tenant: str) -> None:
        """The tenant has its first item that waits."""
        self.tags[tenant] = self.tag(tenant, waits=False)

    def charge(self, tenant: str, cost: float, *, waits: bool) -> None:
        """The tenant was given work. `cost` is the work divided by its weight."""
        start = self.tag(tenant, waits=waits)
        self.tags[tenant] = start + cost
        self.now = max(self.now, start)

    def forget(self, waiting: Collection[str]) -> None:
        """Forgets the tenants whose tag does not matter any more."""
        self.tags = {t: tag for t, tag in self.tags.items() if t in waiting or tag > self.now}


T = TypeVar("T")

_Entry: TypeAlias = tuple[float, int, float, T]  # precedence, serial number, work, item


class _TenantQueue(Generic[T]):
    """The items of one tenant that wait for one cluster, and their work by length class."""

    __slots__ = ("by_class", "heap")

    def __init__(self) -> None:
        self.heap: list[_Entry[T]] = []
        self.by_class = [0.0] * CLASSES

    @property
    def total_s(self) -> float:
        return sum(self.by_class)

    def account(self, work_s: float, sign: int) -> None:
        self.by_class[length_class(work_s)] += sign * work_s


def equal_weights(tenant: str) -> float:
    return 1.0


def equal_shares(cluster: ClusterId, tenant: str) -> float:
    return 1.0


def never_blocked(cluster: ClusterId, tenant: str, work_s: float) -> bool:
    return False


class WaitingRoom(Generic[T]):
    """The held requests of one router. Each item is in one queue at a time."""

    def __init__(self, weight: Callable[[str], float] = equal_weights) -> None:
        """`weight` returns the weight of a tenant, which is above 0."""
        self._weight = weight
        # Tenants may have unequal shares of clusters, each above 0, which multiply their weights in
        # `work_before`. Whoever records a dispatch divides its work by the share.
        self.share: Callable[[ClusterId, str], float] = equal_shares
        # Whether a tenant's item with this work need not be retried now, although the cluster has
        # room: it waits for something else on the way there.
        self.is_blocked: Callable[[ClusterId, str, float], bool] = never_blocked
        self._queues: dict[ClusterId | None, dict[str, _TenantQueue[T]]] = {}
        self._clocks: dict[ClusterId | None, FairClock] = {}
        self._work: dict[ClusterId, HeldWork] = {}
        self._serial = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def work(self) -> Mapping[ClusterId, HeldWork]:
        """Prefill work that waits, per cluster that has any. A snapshot."""
        return self._work

    def work_before(self, tenant: str) -> Mapping[ClusterId, HeldWork]:
        """The same as one tenant sees it: the work of its own requests, and as much of the work of
        other tenants as its fair share lets them do in the meantime. `first` is of its own
        requests. The same as `work` where no other tenant waits."""
        return {cluster: self._work_before(cluster, tenant) for cluster in self._work}

    def _work_before(self, cluster: ClusterId, tenant: str) -> HeldWork:
        queues = self._queues[cluster]
        own = queues.get(tenant)
        if own is None:
            return HeldWork()
        if len(queues) == 1:
            return self._work[cluster]
        own_s = own.total_s
        weight = self._weight(tenant) * self.share(cluster, tenant)
        others_s = sum(
            min(other.total_s, own_s * self._weight(name) * self.share(cluster, name) / weight)
            for name, other in queues.items()
            if name != tenant
        )
        factor = 1.0 + others_s / own_s if own_s > 0 else 1.0
        by_class = tuple([factor * work_s for work_s in own.by_class])
        return HeldWork(by_class, own.heap[0][0], own_s)

    def count(self, cluster: ClusterId | None, tenant: str | None = None) -> int:
        """The requests that wait for the cluster, or those of one tenant among them."""
        queues = self._queues.get(cluster, {})
        return sum(
            len(queue.heap) for name, queue in queues.items() if tenant is None or name == tenant
        )

    def tenants(self, cluster: ClusterId | None) -> Collection[str]:
        """The tenants whose requests wait for the cluster."""
        return self._queues.get(cluster, {}).keys()

    def wanting(self, cluster: ClusterId) -> list[str]:
        """Those of them whose first request would go now if the cluster had room."""
        blocked = self._blocked(cluster)
        return [tenant for tenant in self.tenants(cluster) if tenant not in blocked]

    def _blocked(self, cluster: ClusterId | None) -> list[str]:
        """The tenants whose first item is blocked."""
        if cluster is None:
            return []
        queues = self._queues.get(cluster, {})
        return [t for t, queue in queues.items() if self.is_blocked(cluster, t, queue.heap[0][2])]

    def put(self, item: T, hold: Hold, tenant: str = "") -> None:
        self._serial += 1
        self._count += 1
        queues = self._queues.setdefault(hold.cluster, {})
        queue = queues.get(tenant)
        if queue is None:
            self._clock(hold.cluster).start(tenant)
            queue = queues[tenant] = _TenantQueue()
        heappush(queue.heap, (hold.precedence, self._serial, hold.work_s, item))
        queue.account(hold.work_s, +1)
        self._account(hold.cluster, hold.work_s, +1)

    def queues(self) -> Iterator[ClusterId | None]:
        return iter([cluster for cluster, queues in self._queues.items() if queues])

    def take(self, cluster: ClusterId | None) -> T | None:
        """Removes and returns the first item of a queue; None if the queue is empty."""
        found = self._take(cluster, ())
        return None if found is None else found[1]

    def remove(self, item: T) -> bool:
        """Removes an item that does not wait any more. Returns whether the item was here."""
        for cluster, queues in self._queues.items():
            for tenant, queue in queues.items():
                for place, (_, _, work_s, waiting) in enumerate(queue.heap):
                    if waiting is item:
                        del queue.heap[place]
                        heapify(queue.heap)
                        self._removed(cluster, tenant, work_s)
                        return True
        return False

    def retry(
        self,
        try_dispatch: Callable[[T], Hold | None],
        has_room: Callable[[ClusterId], bool],
        on_placed: Callable[[T], None] | None = None,
    ) -> None:
        """Retries the waiting items, queue by queue, as long as the queue's cluster `has_room`,
        but no item of a tenant whose first one is blocked.

        `try_dispatch` dispatches an item and returns None, or returns the hold under which the item
        waits again. `on_placed` is called for each dispatched item, before the next one is tried.
        Items without a cluster are retried whether or not there is room anywhere.
        """
        for cluster in self.queues():
            refused: list[tuple[str, T, Hold]] = []
            refusals: dict[str, int] = {}
            while cluster is None or has_room(cluster):
                skipped = [name for name, count in refusals.items() if count == MAX_REFUSALS]
                skipped += self._blocked(cluster)
                found = self._take(cluster, skipped)
                if found is None:
                    break
                tenant, item = found
                hold = try_dispatch(item)
                if cluster is None and (hold is None or hold.cluster is not None):
                    # Its work is not known here, so tenants take turns by requests.
                    self.record_dispatch(None, 1.0, tenant)
                if hold is None:
                    if on_placed is not None:
                        on_placed(item)
                    continue
                refused.append((tenant, item, hold))
                refusals[tenant] = refusals.get(tenant, 0) + 1
                if len(refused) == MAX_REFUSALS_OF_ALL or all(
                    refusals.get(name) == MAX_REFUSALS for name in self._queues[cluster]
                ):
                    break
            # An item goes back only after the scan, so that no scan meets it twice.
            for tenant, item, hold in refused:
                self.put(item, hold, tenant)

    # Fairness between tenants ---------------------------------------------------------------------

    def record_dispatch(self, cluster: ClusterId | None, work_s: float, tenant: str) -> None:
        """The tenant was given prefill work of this cluster, whether its request has waited or not.
        A router with one tenant need not record it."""
        queues, clock = self._queues.get(cluster, {}), self._clock(cluster)
        clock.charge(tenant, work_s / self._weight(tenant), waits=tenant in queues)
        if len(clock.tags) > 2 * len(queues) + 16:
            clock.forget(queues)

    def others_are_before(self, cluster: ClusterId, tenant: str) -> bool:
        """Whether a request of another tenant waits for the cluster, is not blocked, and is before
        the next one of this tenant."""
        queues, clock = self._queues.get(cluster, {}), self._clock(cluster)
        tag = clock.tag(tenant, waits=tenant in queues)
        return any(clock.tags[name] < tag for name in self.wanting(cluster) if name != tenant)

    def first(self, cluster: ClusterId, tenant: str) -> float:
        """The lowest precedence of the tenant's requests that wait for the cluster."""
        queue = self._queues.get(cluster, {}).get(tenant)
        return math.inf if queue is None else queue.heap[0][0]

    def check(self) -> None:
        """Raises AssertionError where the books do not agree with the items that wait."""
        assert self._count == sum(self.count(cluster) for cluster in self._queues)
        assert self._work.keys() == {cluster for cluster in self.queues() if cluster is not None}
        for cluster, queues in self._queues.items():
            for tenant, queue in queues.items():
                assert queue.heap and tenant in self._clocks[cluster].tags
                assert queue.heap[0] == min(queue.heap, key=lambda entry: entry[:2])
                held_s = sum(entry[2] for entry in queue.heap)
                assert math.isclose(queue.total_s, held_s, rel_tol=1e-6, abs_tol=1e-6)
            if queues and cluster is not None:
                held_s = sum(queue.total_s for queue in queues.values())
                work = self._work[cluster]
                assert math.isclose(work.total_s, held_s, rel_tol=1e-6, abs_tol=1e-6)
                assert work.first == min(queue.heap[0][0] for queue in queues.values())

    def _clock(self, cluster: ClusterId | None) -> FairClock:
        clock = self._clocks.get(cluster)
        if clock is None:
            clock = self._clocks[cluster] = FairClock()
        return clock

    def _take(self, cluster: ClusterId | None, skipped: Collection[str]) -> tuple[str, T] | None:
        """Removes the first item of the tenant that is next. Also returns the tenant."""
        queues = self._queues.get(cluster)
        if not queues:
            return None
        if len(queues) == 1:
            tenant = next(iter(queues))
        else:
            tags = self._clocks[cluster].tags
            # Among equals, the request of the lowest precedence.
            waiting = [(tags[t], queue.heap[0][:2], t) for t, queue in queues.items()]
            tenant = min([entry for entry in waiting if entry[2] not in skipped] or waiting)[2]
        if tenant in skipped:
            return None
        _, _, work_s, item = heappop(queues[tenant].heap)
        self._removed(cluster, tenant, work_s)
        return tenant, item

    def _removed(self, cluster: ClusterId | None, tenant: str, work_s: float) -> None:
        self._count -= 1
        queues = self._queues[cluster]
        queues[tenant].account(work_s, -1)
        if not queues[tenant].heap:
            del queues[tenant]
        self._account(cluster, work_s, -1)

    def _account(self, cluster: ClusterId | None, work_s: float, sign: int) -> None:
        if cluster is None:
            return
        # Replaced and not modified, because views in use share the old mapping.
        work = dict(self._work)
        if queues := self._queues[cluster]:
            known = work.get(cluster, HeldWork())
            changed = known.add(length_class(work_s), sign * work_s)
            first = min([queue.heap[0][0] for queue in queues.values()])
            work[cluster] = changed._replace(first=first)
        else:
            work.pop(cluster, None)
        self._work = work
