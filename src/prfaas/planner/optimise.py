"""The best threshold and split (paper, section 3.4.2): the global optimum, not that of a grid.

For a given number of local prefill instances, every threshold is evaluated at once. With more of
them, producers only gain and decode only loses, so the optimum is where the two cross. A bisection
finds it, with two candidates to compare, whatever the number of instances.

A split without local prefill instances is chosen only where one with them would serve noticeably
less (`LOCAL_PREFILL_SHARE`): with a local prefill instance requests are served as before when the
PrfaaS clusters are lost, only fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas.planner.curves import Array, WorkCurves
from prfaas.planner.equations import (
    eq3_theta_prfaas,
    eq4_theta_pd_p,
    eq5_theta_pd_d,
    eq6_lambda_max,
    per_share,
)
from prfaas.planner.problem import Problem

Rows = npt.NDArray[np.int64]

# A split with local prefill instances is preferred where it serves this share of the largest rate.
LOCAL_PREFILL_SHARE = 0.98


class Choice(NamedTuple):
    """The two decision variables of section 3.4.2."""

    row: int  # row of the curves, which stands for a threshold
    n_prefill: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Throughputs of the stages of one deployment at one choice."""

    each_prfaas: tuple[float, ...]  # per PrfaaS cluster; clusters add up
    pd_p: float
    pd_d: float
    lambda_max: float

    @property
    def prfaas(self) -> float:
        return sum(self.each_prfaas)


def stage_rates(problem: Problem, curves: WorkCurves, choice: Choice) -> Rates:
    rows = np.array([choice.row])
    each = tuple(float(theta[0]) for theta in _theta_prfaas(problem, curves, rows))
    short_s = float(curves.prefill_short_s(problem.local.pool.profile)[choice.row])
    pd_p = float(eq4_theta_pd_p(choice.n_prefill, short_s))
    pd_d = _theta_pd_d(problem, choice.n_prefill)
    p = float(curves.cuts.p[choice.row])
    return Rates(each, pd_p, pd_d, float(eq6_lambda_max(sum(each), pd_p, pd_d, p)))


def optimise(problem: Problem, curves: WorkCurves) -> Choice:
    """The choice of largest Lambda_max, or the one with a local prefill instance if it comes close.
    Fixed variables keep their values."""
    producers = Producers(problem, curves)
    fixed = problem.local.fixed_prefill
    if fixed is not None:
        return producers.best(fixed)
    low, high = 0, problem.local.pool.instances - 1  # at least one instance decodes
    while low < high:
        middle = (low + high) // 2
        if producers.sustained(middle).max() >= _theta_pd_d(problem, middle):
            high = middle
        else:
            low = middle + 1

    def lambda_max(choice: Choice) -> float:
        return stage_rates(problem, curves, choice).lambda_max

    best = max((producers.best(n) for n in (low - 1, low) if n >= 0), key=lambda_max)
    if best.n_prefill or problem.local.pool.instances < 2:
        return best
    # The rate has one peak over the splits: beyond 0 none is better than 1.
    some = producers.best(1)
    return some if lambda_max(some) >= LOCAL_PREFILL_SHARE * lambda_max(best) else best


class Producers:
    """The rate that PrfaaS and local prefill sustain together, for every allowed threshold: eq. 6
    without its decode term."""

    def __init__(self, problem: Problem, curves: WorkCurves) -> None:
        self.rows = allowed_rows(problem, curves)
        p = curves.cuts.p[self.rows]
        theta_prfaas = sum(_theta_prfaas(problem, curves, self.rows), np.zeros(len(p)))
        short_s = curves.prefill_short_s(problem.local.pool.profile)[self.rows]
        self.prfaas_bound = np.asarray(per_share(theta_prfaas, p))
        self._bound_per_instance = np.asarray(per_share(eq4_theta_pd_p(1, short_s), 1 - p))

    def pd_p_bound(self, n_prefill: int) -> Array:
        """The rate that local prefill sustains, per threshold. Infinite where no request stays
        local, even without an instance."""
        bound = np.full(len(self.rows), np.inf)
        some_local = np.isfinite(self._bound_per_instance)
        np.multiply(self._bound_per_instance, n_prefill, out=bound, where=some_local)
        return bound

    def sustained(self, n_prefill: int) -> Array:
        return np.asarray(np.minimum(self.prfaas_bound, self.pd_p_bound(n_prefill)))

    def best(self, n_prefill: int) -> Choice:
        """The threshold at which the producers are strongest. When decode is the limit, many
        thresholds reach the same Lambda_max; this one leaves prefill the most slack (eq. 7)."""
        return Choice(int(self.rows[int(np.argmax(self.sustained(n_prefill)))]), n_prefill)


def _theta_prfaas(problem: Problem, curves: WorkCurves, rows: Rows) -> list[Array]:
    kv_bytes = curves.kv_bytes_long[rows]
    return [
        np.asarray(
            eq3_theta_prfaas(
                remote.pool.instances,
                curves.prefill_long_s(remote.pool.profile)[rows],
                remote.path.bps,
                kv_bytes,
            )
        )
        for remote in problem.remotes
    ]


def _theta_pd_d(problem: Problem, n_prefill: int) -> float:
    decode = problem.local.decode
    n_decode = problem.local.pool.instances - n_prefill
    output_tokens = problem.workload.output_tokens
    return eq5_theta_pd_d(n_decode, decode.bs_max, decode.t_decode_s, output_tokens)


def allowed_rows(problem: Problem, curves: WorkCurves) -> Rows:
    threshold = curves.cuts.threshold
    if not problem.remotes:
        return np.array([len(threshold) - 1])
    if problem.fixed_threshold is None:
        return np.arange(len(threshold))
    # The row that cuts the same way: the longest length that still stays local.
    return np.array([np.searchsorted(threshold, problem.fixed_threshold, "right") - 1])
