"""The lengths of the gateways' requests, from one gateway to the others.

A gateway numbers its finished requests from 1. Every poll names the last number that its sender
has, and gets the rows after it. So nothing is counted twice, and nothing is lost while a gateway is
not reached for less time than it keeps rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from prfaas.contracts.gateway_api import (
    MAX_AGE_S,
    MAX_AMOUNT,
    MAX_COUNT,
    MAX_ROWS,
    GatewayReport,
    TrafficRow,
)
from prfaas.scheduler.long_term.traffic import TrafficHistory

KEPT_ROWS = 4096


class TrafficRows:
    """The newest requests of this gateway."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, int, int, int, float]] = deque(maxlen=KEPT_ROWS)
        self._last = 0  # number of the newest row

    def observe(
        self, at_s: float, new_tokens: int, cached_tokens: int, output_tokens: int, wait_s: float
    ) -> None:
        """Records a request, as `TrafficHistory.observe` does."""
        self._rows.append((at_s, new_tokens, cached_tokens, output_tokens, wait_s))
        self._last += 1

    def rows_after(self, number: int, now_s: float) -> tuple[int, tuple[TrafficRow, ...]]:
        """The first rows after the row of this number: the number of the first of them, and at most
        `MAX_ROWS`. They begin later where the row after it is no longer kept. A number that is
        higher than the newest comes from before this process started; it gets no rows."""
        oldest = self._last - len(self._rows) + 1
        first = min(max(number + 1, oldest), self._last + 1)
        chosen = islice(self._rows, first - oldest, first - oldest + MAX_ROWS)
        return first, tuple(
            (
                min(max(now_s - at_s, 0.0), MAX_AGE_S),
                min(new, MAX_COUNT),
                min(cached, MAX_COUNT),
                min(output, MAX_COUNT),
                min(max(wait_s, 0.0), MAX_AMOUNT),
            )
            for at_s, new, cached, output, wait_s in chosen
        )


class TrafficFollower:
    """Records the requests of one other gateway in a history of this one.

    Requests from before `started_s` are not recorded. This gateway knows the requests of its own
    home only from then on: in a longer history, the other home would seem to have more traffic.
    """

    def __init__(self, history: TrafficHistory, started_s: float) -> None:
        self.history = history
        self._started_s = started_s
        self._instance = ""
        self._last = 0  # number of the newest row that was received
        self._latest_s = started_s  # of the newest request that was recorded

    @property
    def after(self) -> int:
        """What the next poll asks for."""
        return self._last

    def receive(self, report: GatewayReport, after: int, now_s: float) -> None:
        """`after`: what the poll asked for. `now_s`: when the report arrived."""
        if report.instance != self._instance:
            self._instance, self._last = report.instance, 0
            if after:  # the rows that it sent begin too late for a process that is new here
                return
        known = max(self._last + 1 - report.first_row, 0)  # rows that were received before
        self._record(report.rows[known:], now_s)
        self._last = max(self._last, report.first_row + len(report.rows) - 1)

    def _record(self, rows: Sequence[TrafficRow], now_s: float) -> None:
        for age_s, new, cached, output, wait_s in rows:
            at_s = now_s - age_s
            if at_s < self._started_s:
                continue
            # Reports take unequal times to arrive, and a history's times must not fall.
            self._latest_s = max(self._latest_s, at_s)
            self.history.observe(self._latest_s, new, cached, output, wait_s)
