"""The traffic that this gateway has served, by the PD cluster at which it arrived. Bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prfaas.scheduler.long_term.traffic import TrafficHistory
from prfaas.types import ClusterId

# Time, new tokens, cached tokens, output tokens, wait in seconds.
Observer = Callable[[float, int, int, int, float], None]


class HomeTraffic:
    def __init__(self, homes: Iterable[ClusterId], started_s: float, window_s: float) -> None:
        self.histories = {home: TrafficHistory(started_s, window_s) for home in homes}
        self._also: Observer | None = None

    def tell(self, also: Observer) -> None:
        """`also` is called with every request, too."""
        self._also = also

    def observe(
        self,
        home: ClusterId,
        at_s: float,
        new_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        wait_s: float,
    ) -> None:
        history = self.histories[home]
        history.observe(at_s, new_tokens, cached_tokens, output_tokens, wait_s)
        if self._also is not None:
            self._also(at_s, new_tokens, cached_tokens, output_tokens, wait_s)
