"""The traffic of the last while, as the long-term loop sees it.

A shell tells a `Traffic` every finished request and takes a `Window` when it is time to plan.
Bookkeeping only: the time comes from outside. Paper: section 3.4.3, "Long-term".
"""

from __future__ import annotations

from array import array
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.types import NodeId

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Requests in the order they were seen, and what is alive."""

    now_s: float
    started_s: float  # when the deployment began to serve, with empty caches
    at_s: Array
    new_tokens: Array  # uncached where the request was prefilled
    cached_tokens: Array
    output_tokens: Array
    live_remotes: tuple[int, ...]  # instances, per PrfaaS cluster
    live_local: Set[NodeId]


class Traffic:
    """Remembers requests for `window_s`. Memory is bounded by the traffic of two windows."""

    def __init__(self, started_s: float, window_s: float) -> None:
        self._started_s = started_s
        self._window_s = window_s
        self._columns = tuple(array("d") for _ in range(4))

    def observe(self, at_s: float, new_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """`at_s` never falls from one call to the next."""
        at, new, cached, output = self._columns
        at.append(at_s)
        new.append(new_tokens)
        cached.append(cached_tokens)
        output.append(output_tokens)

    def window(
        self, now_s: float, live_remotes: tuple[int, ...], live_local: Set[NodeId]
    ) -> Window:
        """Forgets what is older than the window."""
        first = int(np.searchsorted(np.array(self._columns[0]), now_s - self._window_s))
        for column in self._columns:
            del column[:first]
        at, new, cached, output = (np.array(column) for column in self._columns)
        return Window(now_s, self._started_s, at, new, cached, output, live_remotes, live_local)
