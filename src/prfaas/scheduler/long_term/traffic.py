"""The recent traffic, as the long-term loop sees it.

The gateway and the simulator record every finished request in a `TrafficHistory`, and take a
`TrafficWindow` to replan. Bookkeeping only: the caller passes the time. Paper: section 3.4.3,
"Long-term".
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas.types import ClusterId, NodeId

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TrafficWindow:
    """Requests in the order in which they were recorded, and the live nodes."""

    now_s: float
    started_s: float  # when the deployment started, with empty caches
    at_s: Array
    new_tokens: Array  # uncached where the request was prefilled
    cached_tokens: Array
    output_tokens: Array
    live_remotes: tuple[int, ...]  # live instances, per PrfaaS cluster
    live_local: Set[NodeId]
    paces: Mapping[ClusterId, float] = field(default_factory=dict)  # observed over stated time


class TrafficSummary(NamedTuple):
    """The requests of a window in a few numbers, for people."""

    requests: int
    rps: float
    new_tokens: float  # means
    cached_tokens: float
    output_tokens: float
    wait_s: float
    p90_wait_s: float


class TrafficHistory:
    """Keeps requests for `window_s`. Its memory is bounded by the traffic of two windows."""

    def __init__(self, started_s: float, window_s: float) -> None:
        self._started_s = started_s
        self._window_s = window_s
        self._columns = tuple(array("d") for _ in range(5))

    def observe(
        self, at_s: float, new_tokens: int, cached_tokens: int, output_tokens: int, wait_s: float
    ) -> None:
        """Records a request. `at_s` must not fall from one call to the next. `wait_s` is the time
        from arrival to prefill."""
        at, new, cached, output, wait = self._columns
        at.append(at_s)
        new.append(new_tokens)
        cached.append(cached_tokens)
        output.append(output_tokens)
        wait.append(wait_s)
        if at_s - at[0] > 2 * self._window_s:
            self._drop_old(at_s)  # where nothing replans, nothing takes a window

    def window(
        self,
        now_s: float,
        live_remotes: tuple[int, ...],
        live_local: Set[NodeId],
        paces: Mapping[ClusterId, float] | None = None,
    ) -> TrafficWindow:
        at, new, cached, output, _ = self._drop_old(now_s)
        return TrafficWindow(
            now_s, self._started_s, at, new, cached, output, live_remotes, live_local, paces or {}
        )

    def summarise(self, now_s: float) -> TrafficSummary | None:
        """Summarises the window's requests. None if it has none."""
        at, *lengths, wait = self._drop_old(now_s)
        if not len(at):
            return None
        since_s = max(self._started_s, now_s - self._window_s)
        new, cached, output = (float(column.mean()) for column in lengths)
        rps = len(at) / max(now_s - since_s, 1e-9)
        return TrafficSummary(
            len(at), rps, new, cached, output, float(wait.mean()), float(np.quantile(wait, 0.9))
        )

    def _drop_old(self, now_s: float) -> list[Array]:
        """Drops requests older than the window, and returns the columns of the rest."""
        first = int(np.searchsorted(np.array(self._columns[0]), now_s - self._window_s))
        for column in self._columns:
            del column[:first]
        return [np.array(column) for column in self._columns]
