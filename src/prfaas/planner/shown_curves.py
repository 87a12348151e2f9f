"""The curves that explain a plan (figures 5a and 5b of the paper): throughput over the split at the
chosen threshold, and over the threshold at the chosen split."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prfaas.planner.comparison import Solution
from prfaas.planner.curves import Array, WorkCurves
from prfaas.planner.optimise import Choice, Producers, stage_rates
from prfaas.planner.problem import Problem

# The range the paper shows: up to about three times the best threshold.
SHOWN_THRESHOLDS = 3.1


class SplitCurve(NamedTuple):
    """Requests per second, for each number of local prefill instances."""

    n_prefill: Array
    prefill_rps: Array
    decode_rps: Array
    lambda_max_rps: Array


class ThresholdCurve(NamedTuple):
    """The arrivals per second that each stage sustains, for each threshold. Infinite where no
    request reaches the stage."""

    threshold_tokens: Array
    prfaas_rps: Array
    pd_p_rps: Array
    pd_d_rps: float  # does not depend on the threshold


def split_curve(problem: Problem, curves: WorkCurves, best: Solution) -> SplitCurve:
    row = chosen_row(curves, best)
    splits = np.arange(0, problem.local.pool.instances)
    at = [stage_rates(problem, curves, Choice(row, int(n))) for n in splits]
    return SplitCurve(
        n_prefill=splits.astype(float),
        prefill_rps=np.array([rates.prfaas + rates.pd_p for rates in at]),
        decode_rps=np.array([rates.pd_d for rates in at]),
        lambda_max_rps=np.array([rates.lambda_max for rates in at]),
    )


def threshold_curve(problem: Problem, curves: WorkCurves, best: Solution) -> ThresholdCurve | None:
    """None where one cluster prefills everything, so that no threshold is chosen."""
    if best.threshold_tokens is None:
        return None
    producers = Producers(problem, curves)
    threshold = np.asarray(curves.cuts.threshold[producers.rows], dtype=float)
    shown = (threshold >= 1) & (threshold <= SHOWN_THRESHOLDS * best.threshold_tokens)
    return ThresholdCurve(
        threshold_tokens=threshold[shown],
        prfaas_rps=producers.prfaas_bound[shown],
        pd_p_rps=producers.pd_p_bound(best.n_prefill)[shown],
        pd_d_rps=best.theta.pd_d,
    )


def chosen_row(curves: WorkCurves, best: Solution) -> int:
    """The row of the curves that stands for the threshold of a solution."""
    threshold = curves.cuts.threshold
    if best.threshold_tokens is None:
        return 0 if best.offload_fraction else len(threshold) - 1
    return int(np.searchsorted(threshold, best.threshold_tokens, "right") - 1)
