"""The best threshold of every home at once, where the largest bearable one is not always the best.

Only the paper reading needs this search (see `work`); a single candidate per home is one linear
programme. Otherwise: branch and bound over intervals of rows. The bound of an interval is a
relaxation in which a home may divide its traffic among the rows of the interval. The relaxation is
solved by column generation: the prices of a linear programme over few rows show which other row
would help most, until none does. Where a relaxed home uses several rows, its interval is divided
between them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prfaas.planner.curves import Array
from prfaas.planner.network.flows import Cut, FlowProgram, Growth, Mask, Prices
from prfaas.planner.network.work import Rows

# A plan this close to the bound is as good as the best one.
_GAP = 1e-9
# Intervals that a search looks at before it gives up; its bound is then above its plan.
_MOST_INTERVALS = 400


class Chosen(NamedTuple):
    rows: tuple[int, ...]
    factor: float  # by which the growing homes may grow with these rows
    bound: float  # no choice among the candidates reaches more


class _Relaxed(NamedTuple):
    candidates: list[Rows]
    bound: float
    shares: list[dict[int, float]]  # per home: the rows in use, and how much of the traffic


class ThresholdSearch:
    """Chooses one row per home so that the growing homes' rates may grow by the largest factor."""

    def __init__(self, program: FlowProgram, rates: Array, growing: Mask) -> None:
        self._program = program
        self._rates = rates
        self._growing = growing
        self._seen: dict[tuple[int, ...], Growth] = {}

    def best(self, candidates: Sequence[Rows], target: float) -> Chosen:
        """The best choice, or any choice that reaches the target. The search also ends when no
        choice can reach the target."""
        if all(len(rows) == 1 for rows in candidates):
            rows = tuple(int(found[0]) for found in candidates)
            factor = self._factor(rows)
            return Chosen(rows, factor, factor)
        return self._branch(list(candidates), target)

    def _branch(self, candidates: list[Rows], target: float) -> Chosen:
        number = itertools.count()
        root = self._relax(candidates)
        best, best_factor = self._rounded(root)
        queue = [(-root.bound, next(number), root)]
        for _ in range(_MOST_INTERVALS):
            bound = -queue[0][0] if queue else best_factor
            if best_factor >= target or bound < target or bound <= best_factor * (1 + _GAP):
                break
            relaxed = heapq.heappop(queue)[2]
            for part in self._divided(relaxed):
                child = self._relax(part)
                rows, factor = self._rounded(child)
                if factor > best_factor:
                    best, best_factor = rows, factor
                if child.bound > best_factor * (1 + _GAP):
                    heapq.heappush(queue, (-child.bound, next(number), child))
        left = -queue[0][0] if queue else best_factor
        return Chosen(best, best_factor, max(best_factor, left))

    def _divided(self, relaxed: _Relaxed) -> list[list[Rows]]:
        """Two problems: the rows of the most divided home up to their mean, and those above it."""
        spread = [1 - max(shares.values()) for shares in relaxed.shares]
        home = int(np.argmax(spread))
        rows, weights = zip(*relaxed.shares[home].items(), strict=True)
        mean = float(np.average(rows, weights=weights))
        parts = []
        for keep in (relaxed.candidates[home] <= mean, relaxed.candidates[home] > mean):
            part = list(relaxed.candidates)
            part[home] = part[home][keep]
            parts.append(part)
        return parts

    def _rounded(self, relaxed: _Relaxed) -> tuple[tuple[int, ...], float]:
        """The row with the most traffic for each home."""
        rows = tuple(max(shares, key=lambda row: shares[row]) for shares in relaxed.shares)
        return rows, self._factor(rows)

    def _factor(self, rows: tuple[int, ...]) -> float:
        if rows not in self._seen:
            cuts = [Cut(home, row) for home, row in enumerate(rows)]
            self._seen[rows] = self._program.grow(cuts, self._rates, self._growing)
        return self._seen[rows].factor

    def _relax(self, candidates: list[Rows]) -> _Relaxed:
        active = [self._first_rows(home, rows) for home, rows in enumerate(candidates)]
        while True:
            cuts = [Cut(home, row) for home, rows in enumerate(active) for row in sorted(rows)]
            growth = self._program.grow(cuts, self._rates, self._growing)
            if growth.prices is None:
                break
            found = False
            for home, rows in enumerate(candidates):
                row = self._helpful_row(home, rows, growth.prices)
                if row is not None and row not in active[home]:
                    active[home].add(row)
                    found = True
            if not found:
                break
        shares: list[dict[int, float]] = [{} for _ in candidates]
        for cut, amounts in zip(cuts, growth.amounts, strict=True):
            shares[cut.home][cut.row] = float(amounts.sum())
        return _Relaxed(candidates, growth.factor, [_normalised(rows) for rows in shares])

    def _first_rows(self, home: int, rows: Rows) -> set[int]:
        """The largest threshold, and the row with the least of each kind of work."""
        if len(rows) == 1:
            return {int(rows[0])}
        work = self._program.homes[home].work.every_kind[:, rows]
        return {int(rows[-1]), *(int(row) for row in rows[np.argmin(work, axis=1)])}

    def _helpful_row(self, home: int, rows: Rows, prices: Prices) -> int | None:
        """The row whose work costs least at these prices, where it costs less than the rows in
        use."""
        if len(rows) == 1:
            return None
        best, least = self._program.cheapest(home, rows, float(self._rates[home]), prices)
        price = float(prices.homes[home])
        return best if least < price - _GAP * max(1.0, abs(price)) else None


def _normalised(shares: dict[int, float]) -> dict[int, float]:
    total = sum(shares.values())
    if total <= 0:  # no request is offloaded: the largest threshold
        return {max(shares): 1.0}
    return {row: share / total for row, share in shares.items() if share > 1e-9 * total}
