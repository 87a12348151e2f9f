"""The curves that explain a plan of several clusters: the total rate with another threshold or
another split of one PD cluster, where everything else is the best for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from prfaas.planner.network.plan import HomePlan, NetworkPlan
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Problem
from prfaas.planner.shown_curves import SHOWN_THRESHOLDS

_POINTS = 24  # of a curve; each is a problem to solve

Varied: TypeAlias = Literal["threshold", "split"]


class CurvePoint(NamedTuple):
    """A value to try, and the problem that has it."""

    cluster: str
    varied: Varied
    value: int  # tokens, or prefill instances
    problem: NetworkProblem


class RateCurve(NamedTuple):
    cluster: str  # a PD cluster
    varied: Varied
    values: tuple[int, ...]
    rates_rps: tuple[float, ...]  # of all PD clusters together


# Yields the items, and shows how many are done.
WithProgress: TypeAlias = Callable[[Sequence[CurvePoint], str], Iterable[CurvePoint]]


def rate_curves(
    planner: NetworkPlanner,
    problem: NetworkProblem,
    plan: NetworkPlan,
    with_progress: WithProgress,
) -> list[RateCurve]:
    """Two curves per PD cluster. One that has no choice, of a threshold or of a split, has none."""
    points = [point for home in plan.homes for point in _points(problem, home)]
    rates: dict[tuple[str, Varied], list[tuple[int, float]]] = {}
    for point in with_progress(points, "curves"):
        rate = planner.rate_rps(point.problem)
        rates.setdefault((point.cluster, point.varied), []).append((point.value, rate))
    return [
        RateCurve(cluster, varied, *zip(*found, strict=True))
        for (cluster, varied), found in rates.items()
        if len(found) > 1
    ]


def _points(problem: NetworkProblem, home: HomePlan) -> list[CurvePoint]:
    tokens: list[int] = []
    if home.threshold_tokens is not None:
        best = home.threshold_tokens
        tokens = _even(1, round(SHOWN_THRESHOLDS * best), best)
    splits = _even(0, home.n_prefill + home.n_decode - 1, home.n_prefill)
    return [
        *(_point(problem, home.cluster, "threshold", value) for value in tokens),
        *(_point(problem, home.cluster, "split", value) for value in splits),
    ]


def _even(low: int, high: int, best: int) -> list[int]:
    """Whole numbers from `low` to `high`, with the best one among them."""
    even = np.linspace(low, max(high, low), _POINTS).round().astype(int).tolist()
    return sorted({*even, best})


def _point(problem: NetworkProblem, cluster: str, varied: Varied, value: int) -> CurvePoint:
    def change(given: Problem) -> Problem:
        if given.local.pool.cluster != cluster:
            return given
        if varied == "threshold":
            # No threshold is beyond the longest prompt.
            return replace(given, fixed_threshold=min(value, given.workload.max_new_tokens))
        return replace(given, local=replace(given.local, fixed_prefill=value))

    return CurvePoint(cluster, varied, value, problem.with_homes(change))
