"""The best threshold and split for many draws of the times at once.

The same choice as `optimise`, which tests compare with it. A draw multiplies all times of a
profile with one factor, and both readings are linear in the times: nothing of a draw is computed
from the profiles again, and all draws and thresholds are evaluated together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.planner.curves import Array, WorkCurves
from prfaas.planner.equations import eq5_theta_pd_d, per_share
from prfaas.planner.optimise import LOCAL_PREFILL_SHARE, allowed_rows
from prfaas.planner.problem import Pool, Problem
from prfaas.planner.profile import DecodeRate, PrefillProfile

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draws:
    """By what the times of each draw differ from the stated ones."""

    prefill: Mapping[PrefillProfile, Array]  # one factor per draw; none: the times are as stated
    decode: tuple[DecodeRate, ...]  # the operating point of each draw

    def factor(self, pool: Pool) -> Array:
        return self.prefill.get(pool.profile, np.ones(len(self.decode)))


@dataclass(frozen=True, slots=True)
class DrawnPlans:
    """The best choice of each draw."""

    row: Whole  # of the curves, which stands for a threshold
    n_prefill: Whole
    lambda_max: Array
    each_prfaas: Array  # Theta of each PrfaaS cluster (rows) in each draw (columns)


def plan_draws(problem: Problem, curves: WorkCurves, draws: Draws) -> DrawnPlans:
    producers = _Producers(problem, curves, draws)
    decode = _DecodeRates(problem, draws)
    fixed = problem.local.fixed_prefill
    if fixed is not None:
        n_prefill = np.full(len(draws.decode), fixed)
    else:
        n_prefill = _best_split(problem, producers, decode)
    column, sustained = producers.best(n_prefill)
    each = np.array([theta[np.arange(len(column)), column] for theta in producers.each])
    return DrawnPlans(
        row=producers.rows[column],
        n_prefill=n_prefill,
        lambda_max=np.minimum(sustained, decode.rate(n_prefill)),
        each_prfaas=each.reshape(len(problem.remotes), len(column)),
    )


def _best_split(problem: Problem, producers: _Producers, decode: _DecodeRates) -> Whole:
    """The bisection of `optimise`, with a range of its own for each draw."""
    low = np.zeros(decode.draws, dtype=np.int64)
    high = np.full(decode.draws, problem.local.pool.instances - 1)  # at least one decodes
    while (low < high).any():
        middle = (low + high) // 2
        enough = producers.best(middle)[1] >= decode.rate(middle)
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        low = np.minimum(low, high)
    fewer = np.maximum(low - 1, 0)

    def rates(n_prefill: Whole) -> Array:
        return np.minimum(producers.best(n_prefill)[1], decode.rate(n_prefill))

    best = np.where(rates(fewer) >= rates(low), fewer, low)
    some = np.minimum(np.maximum(best, 1), problem.local.pool.instances - 1)
    return np.where(rates(some) >= LOCAL_PREFILL_SHARE * rates(best), some, best)


class _DecodeRates:
    """Theta_pd-d of each draw (eq. 5)."""

    def __init__(self, problem: Problem, draws: Draws) -> None:
        output = problem.workload.output_tokens
        self._instances = problem.local.pool.instances
        self._each = np.array(
            [eq5_theta_pd_d(1, rate.bs_max, rate.t_decode_s, output) for rate in draws.decode]
        )

    @property
    def draws(self) -> int:
        return len(self._each)

    def rate(self, n_prefill: Whole) -> Array:
        return np.asarray((self._instances - n_prefill) * self._each)


class _Producers:
    """What PrfaaS and local prefill sustain together: draws x allowed thresholds."""

    def __init__(self, problem: Problem, curves: WorkCurves, draws: Draws) -> None:
        self.rows = allowed_rows(problem, curves)
        p = curves.cuts.p[self.rows]
        self.each = [
            np.minimum(
                remote.pool.instances
                / np.outer(
                    draws.factor(remote.pool), curves.prefill_long_s(remote.pool.profile)[self.rows]
                ),
                remote.path.bps / (curves.kv_bytes_long[self.rows] * 8),
            )
            for remote in problem.remotes
        ]
        total = sum(self.each, np.zeros((len(draws.decode), len(p))))
        self._prfaas = np.asarray(per_share(total, p))
        local = problem.local.pool
        self._pace = 1 / draws.factor(local)
        short_s = curves.prefill_short_s(local.profile)[self.rows]
        self._stated = np.asarray(per_share(1 / short_s, 1 - p))
        self._none_local = np.isinf(self._stated)

    def best(self, n_prefill: Whole) -> tuple[Whole, Array]:
        """The threshold of each draw at which the producers are strongest, as an index into `rows`,
        and what they sustain there."""
        pace = np.outer(n_prefill * self._pace, np.where(self._none_local, 0.0, self._stated))
        pace[:, self._none_local] = np.inf
        sustained = np.minimum(self._prfaas, pace)
        column = sustained.argmax(axis=1)
        return column, sustained[np.arange(len(column)), column]
