"""Requests that `route` told to wait, and whom to ask about next. Bookkeeping only.

One line per cluster that a request would go to, because room at one cluster says nothing to those
who wait for another; one more for those whom nobody could take. Within a line the hold's precedence
decides, lowest first. Whoever keeps the room asks again with `route`: by then things have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from prfaas.types import ClusterId


class Hold(NamedTuple):
    """Not now: ask again when a prefill of `cluster` has ended, or after the next reports."""

    reason: str
    cluster: ClusterId | None  # None: nobody can take it at all
    work_s: float  # of prefill, there
    precedence: float


T = TypeVar("T")


class WaitingRoom(Generic[T]):
    def __init__(self) -> None:
        self._lines: dict[ClusterId | None, list[tuple[float, int, float, T]]] = {}
        self._work_s: dict[ClusterId, float] = {}
        self._serial = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def work_s(self) -> Mapping[ClusterId, float]:
        """Prefill work that waits here, per cluster it would go to. A snapshot."""
        return self._work_s

    def put(self, who: T, hold: Hold) -> None:
        self._serial += 1
        self._count += 1
        line = self._lines.setdefault(hold.cluster, [])
        heappush(line, (hold.precedence, self._serial, hold.work_s, who))
        self._account(hold.cluster, hold.work_s)

    def lines(self) -> Iterator[ClusterId | None]:
        return iter([cluster for cluster, line in self._lines.items() if line])

    def take(self, cluster: ClusterId | None) -> T | None:
        """The next in line; None when nobody is."""
        line = self._lines.get(cluster)
        if not line:
            return None
        _, _, work_s, who = heappop(line)
        self._count -= 1
        self._account(cluster, -work_s)
        return who

    def _account(self, cluster: ClusterId | None, work_s: float) -> None:
        if cluster is not None:
            # Replaced, not changed: views in use keep what they saw.
            left = self._work_s.get(cluster, 0.0) + work_s
            self._work_s = {**self._work_s, cluster: left if self._lines[cluster] else 0.0}
