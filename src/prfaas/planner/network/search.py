"""The largest factor by which the rates of PD clusters can grow together.

Why a search over one number finds the global optimum: at a given rate a home needs a certain least
number of decode instances, and fewer never serve it. The other instances prefill, and more of them
never hurt. So at a given factor the split of each home is known, and so are the thresholds that its
prefill instances bear; `thresholds` chooses among them so that the flows fit. A choice that fits at
one factor also fits at each smaller one, because all work is proportional to the rate.

Let g(f) be the largest factor whose flows fit with the splits and thresholds that are allowed at f.
At a larger f fewer are allowed, so g never rises. Hence one linear programme narrows the interval
of the search from both sides:

    g(f) >= f   f is feasible; no factor above g(f) is
    g(f) <  f   f is not feasible; g(f) is, with the same thresholds

The search ends when the interval has closed to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prfaas.planner.curves import Array
from prfaas.planner.network.flows import Cut, FlowProgram, Mask
from prfaas.planner.network.thresholds import Chosen, ThresholdSearch
from prfaas.planner.network.work import TOLERANCE, HomeWork

# The width of the interval, relative to its end, at which the search stops. It is above the
# tolerance of the stages, so that each step narrows it.
_WIDTH = 1e-10
# From this width on, relative to its end, the search looks just above the lower end.
_NEAR = 1e-4
# After this many steps the search bisects, which always ends.
_MOST_GUESSES = 60
# A step is at least this part of the interval away from its ends.
_MARGIN = 0.02
# What a linear programme may miss of a factor that is feasible.
_ROUNDING = 1e-9
# A home whose rate cannot grow by this much has reached its limit.
_STEP = 1e-6


class Level(NamedTuple):
    """The homes' rates multiplied by a factor, and the thresholds that make it possible."""

    factor: float
    bound: float  # no choice reaches a larger factor
    rows: tuple[int, ...]


class _Attempt(NamedTuple):
    fits: bool  # at the factor of the attempt
    factor: float  # that its choice reaches
    bound: float  # of all factors at which the same or fewer choices are allowed
    rows: tuple[int, ...]


class _Steps:
    """Where to look next. With the reserve g(f) - f known on both sides, where the line through
    both crosses zero (the Illinois method); otherwise in the middle. Near the end the lower end is
    often the optimum already: every second step is then just above it, which shows that."""

    def __init__(self, upper: float) -> None:
        self.upper = upper
        self._steps = 0
        self._just_above = False  # the latest step
        self._fitted: bool | None = None  # the latest step
        self._below: tuple[float, float] | None = None  # a factor that fits, and its reserve
        self._above: tuple[float, float] | None = None  # one that does not fit

    def after(self, factor: float, attempt: _Attempt | None, low: float, high: float) -> float:
        self._steps += 1
        self._learn(factor, attempt)
        self._just_above = not self._just_above and high - low < _NEAR * high
        if self._just_above:
            return low * (1 + _WIDTH / 2)
        middle = (low + high) / 2
        if self._below is None or self._above is None or self._steps > _MOST_GUESSES:
            return middle
        (a, reserve_a), (b, reserve_b) = self._below, self._above
        if not math.isfinite(reserve_a) or reserve_a - reserve_b <= 0:
            return middle
        guess = a + (b - a) * reserve_a / (reserve_a - reserve_b)
        margin = _MARGIN * (high - low)
        return min(max(guess, low + margin), high - margin)

    def _learn(self, factor: float, attempt: _Attempt | None) -> None:
        again = attempt is not None and attempt.fits is self._fitted
        if attempt is None:
            self._fitted, self._above = False, None
        elif attempt.fits:
            self._fitted, self._below = True, (factor, attempt.bound - factor)
            if again and self._above is not None:
                self._above = (self._above[0], self._above[1] / 2)
        else:
            self._fitted, self._above = False, (factor, min(attempt.bound, factor) - factor)
            if again and self._below is not None:
                self._below = (self._below[0], self._below[1] / 2)


class GrowthSearch:
    """`splits` fixes each home's prefill instances; decode then does not limit the rates. Without
    it, each home has its least sufficient number of decode instances."""

    def __init__(
        self, program: FlowProgram, rates: Array, growing: Mask, splits: Sequence[int] | None = None
    ) -> None:
        self._homes: Sequence[HomeWork] = program.homes
        self._rates = rates
        self._growing = growing
        self._splits = splits
        self._thresholds = ThresholdSearch(program, rates, growing)

    def largest(self, known: float = 0.0) -> Level:
        """The largest factor. The factor `known` is known to be feasible; a growth from there by
        less than a millionth is not looked for."""
        if known > 0 and not self._fits(known * (1 + _STEP)):
            attempt = self.attempt(known, target=known * (1 - _ROUNDING))
            assert attempt is not None, "the factor is known to be feasible"
            return Level(known, known * (1 + _STEP), attempt.rows)
        low, high = known, self._upper(known)
        best: tuple[int, ...] | None = None
        steps = _Steps(high)
        unproven, factor = 0.0, high
        while high - low > _WIDTH * high and high > _WIDTH * steps.upper:
            attempt = self.attempt(factor)
            if attempt is None:
                high = factor
            else:
                if attempt.factor > low:
                    low, best = attempt.factor, attempt.rows
                if attempt.fits:
                    high = min(high, max(attempt.bound, low))
                else:
                    if attempt.bound >= factor:  # the search for thresholds gave up
                        unproven = max(unproven, min(attempt.bound, high))
                    high = factor
            factor = steps.after(factor, attempt, low, high)
        rows = best or tuple(len(home.work.threshold) - 1 for home in self._homes)
        return Level(low, max(low, high, unproven), rows)

    def attempt(self, factor: float, target: float | None = None) -> _Attempt | None:
        """With the splits and thresholds that are allowed at this factor. The search for thresholds
        ends where the flows fit at the target, which is the factor unless stated. None: nothing is
        allowed."""
        candidates, limit = [], math.inf
        splits = []
        for number, home in enumerate(self._homes):
            rate = float(self._rates[number]) * (factor if self._growing[number] else 1.0)
            split = home.n_prefill(rate) if self._splits is None else self._splits[number]
            rows = None if split is None else home.candidates(rate, split)
            if split is None or rows is None:
                return None
            splits.append(split)
            candidates.append(rows)
        chosen: Chosen = self._thresholds.best(candidates, target or factor)
        for number, home in enumerate(self._homes):
            if self._growing[number]:
                rate, split = float(self._rates[number]), splits[number]
                limit = min(limit, home.prefill_limit_rps(split, chosen.rows[number]) / rate)
                if self._splits is None:
                    limit = min(limit, home.decode_limit_rps(split) / rate)
        fits = chosen.factor >= factor * (1 - TOLERANCE)
        return _Attempt(fits, min(chosen.factor, limit), chosen.bound, chosen.rows)

    def _upper(self, known: float) -> float:
        """A factor that no choice exceeds."""
        if self._splits is None:
            return min(
                home.most_decode_rps / float(self._rates[number])
                for number, home in enumerate(self._homes)
                if self._growing[number]
            )
        factor = max(known, 1.0) * 2
        while self._fits(factor):
            factor *= 2
        return factor

    def _fits(self, factor: float) -> bool:
        attempt = self.attempt(factor)
        return attempt is not None and attempt.fits


def serves(program: FlowProgram, rates: Array, splits: Sequence[int]) -> bool:
    """Whether these splits leave enough prefill for the rates."""
    all_homes = np.ones(len(rates), dtype=bool)
    target = 1 - _ROUNDING
    attempt = GrowthSearch(program, rates, all_homes, splits).attempt(1.0, target)
    return attempt is not None and attempt.factor >= target


def fits(program: FlowProgram, rates: Array, splits: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether the rates are possible with these splits and thresholds."""
    target = 1 - _ROUNDING
    for home, rate, split, row in zip(program.homes, rates, splits, rows, strict=True):
        if home.prefill_limit_rps(split, row) < float(rate) * target:
            return False
    cuts = [Cut(number, row) for number, row in enumerate(rows)]
    return program.grow(cuts, rates, np.ones(len(rates), dtype=bool)).factor >= target


def grow_in_turn(
    program: FlowProgram, rates: Array, splits: Sequence[int] | None = None
) -> tuple[Array, tuple[int, ...]]:
    """Grows all rates together from feasible ones; those of homes that reach a limit stay, and the
    others grow on, until every home has reached a limit. The result are the rates and the rows of
    the thresholds. This gives homes without a bottleneck a split and a threshold with reserves on
    every side."""
    rates = rates.copy()
    growing = np.ones(len(rates), dtype=bool)
    rows: tuple[int, ...] = ()

    def is_stuck(number: int) -> bool:
        alone = np.arange(len(rates)) == number
        attempt = GrowthSearch(program, rates, alone, splits).attempt(1 + _STEP)
        return attempt is None or not attempt.fits

    while growing.any():
        level = GrowthSearch(program, rates, growing, splits).largest(known=1.0)
        rates[growing] *= level.factor
        rows = level.rows
        stuck = [n for n in np.flatnonzero(growing).tolist() if is_stuck(n)]
        if not stuck:  # each could grow alone, by less than the search distinguishes
            break
        growing[stuck] = False
    return rates, rows
