"""Where PrfaaS begins to pay: its gain over link bandwidth and prompt length, for one deployment.

Each cell is planned anew: the link has another bandwidth, all prompts are longer or shorter by one
factor, and threshold and split are the best for that cell, also where the deployment fixes them.
The baselines are those of a plan: one homogeneous cluster with the same number of GPUs, and one
that costs the same. Gains are those of the most likely times; where times are estimated, their
errors give a range of the bandwidth from which PrfaaS pays. Pure; cells of equal prompt length
share their work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from prfaas.config import Deployment
from prfaas.errors import InputError
from prfaas.planner import baselines
from prfaas.planner.curves import Array, Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.drawn_plans import Draws, plan_draws
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Problem
from prfaas.planner.ranges import HIGH, LOW, error_draws, merged
from prfaas.planner.workload import Workload, weighted_sum
from prfaas.studies.problem_files import Study

LINKS_GBPS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0)
MEAN_TOKENS = tuple(2**power for power in range(11, 19))  # 2K to 256K
# Steps of the grid of a figure, whose lines are interpolated between cells.
FINE_LINKS_GBPS = tuple(float(gbps) for gbps in np.geomspace(0.5, 400, 28))
FINE_MEAN_TOKENS = tuple(round(2 ** (half / 2)) for half in range(22, 37))
# A threshold is exact to a part in so many of the requests, which is more than a map can show.
ATOMS = 512

# Draws of the errors of estimates, for the range of the bandwidth from which PrfaaS pays.
DRAWS = 64
# A gain below this is within the coarseness of the atoms: PrfaaS does not pay there, nor cost.
PAYS = 1.005

# Builds the deployment's problem for other traffic. Raises where the model does not fit.
ProblemFor: TypeAlias = Callable[[Workload], Problem]
Gains: TypeAlias = tuple[float | None, ...]


class Beginning(NamedTuple):
    """The link bandwidth from which PrfaaS pays; None: at no bandwidth of the map. `low` and `high`
    are the 5% and 95% quantiles over the errors of the estimates."""

    gbps: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class MapRow:
    """One prompt length. A gain is None where the baseline does not exist."""

    mean_tokens: int
    over_homogeneous: Gains  # one per link bandwidth
    over_equal_cost: Gains
    pays_over_homogeneous: Beginning
    pays_over_equal_cost: Beginning
    refused: str | None = None  # why this length cannot be planned


@dataclass(frozen=True, slots=True)
class OwnPoint:
    """The deployment as it is, in the coordinates of the map."""

    gbps: float
    mean_tokens: float
    over_homogeneous: float | None
    over_equal_cost: float | None


@dataclass(frozen=True, slots=True)
class GainMap:
    links_gbps: tuple[float, ...]
    rows: tuple[MapRow, ...]
    own: OwnPoint
    estimated: bool  # some times are estimated, so that beginnings have ranges

    def as_dict(self) -> dict[str, Any]:
        return {
            "links_gbps": list(self.links_gbps),
            "estimated": self.estimated,
            "rows": [
                {
                    "mean_tokens": row.mean_tokens,
                    "over_homogeneous": list(row.over_homogeneous),
                    "over_equal_cost": list(row.over_equal_cost),
                    "pays_from_gbps": {
                        "homogeneous": row.pays_over_homogeneous._asdict(),
                        "equal_cost": row.pays_over_equal_cost._asdict(),
                    },
                    "refused": row.refused,
                }
                for row in self.rows
            ],
            "own": {
                "gbps": self.own.gbps,
                "mean_tokens": self.own.mean_tokens,
                "over_homogeneous": self.own.over_homogeneous,
                "over_equal_cost": self.own.over_equal_cost,
            },
        }


def deployment_map(
    study: Study, deployment: Deployment, reading: Reading, *, fine: bool = False
) -> GainMap:
    """The map of a deployment, on the grid of a figure if `fine`, else on that of a table."""
    return gain_map(
        study.problem(deployment),
        lambda workload: study.problem(deployment, workload),
        reading,
        FINE_LINKS_GBPS if fine else LINKS_GBPS,
        FINE_MEAN_TOKENS if fine else MEAN_TOKENS,
    )


def gain_map(
    problem: Problem,
    problem_for: ProblemFor,
    reading: Reading,
    links_gbps: Sequence[float] = LINKS_GBPS,
    mean_tokens: Sequence[int] = MEAN_TOKENS,
) -> GainMap:
    """Links keep their proportions where there are several."""
    if not problem.remotes:
        raise InputError(
            "the deployment has no prfaas cluster, so there is no gain to map",
            where="clusters",
            fix='add a cluster of kind = "prfaas" and its link',
        )
    workload = merged(problem.workload, ATOMS)
    mean = _mean_prompt(workload)
    gbps = _link_gbps(problem)
    here = _row(problem, reading, [gbps], round(mean))
    return GainMap(
        links_gbps=tuple(links_gbps),
        rows=tuple(
            _row_of_length(problem_for, workload, tokens / mean, reading, links_gbps, tokens)
            for tokens in mean_tokens
        ),
        own=OwnPoint(gbps, mean, here.over_homogeneous[0], here.over_equal_cost[0]),
        estimated=any(pool.error is not None for pool in problem.pools)
        or problem.local.decode_error is not None,
    )


def pays_from_gbps(links_gbps: Sequence[float], gains: Gains) -> float | None:
    """The bandwidth at which the gain passes 1, interpolated between the cells: the lowest of the
    map if PrfaaS always pays. None if it never does."""
    before: tuple[float, float] | None = None
    for gbps, gain in zip(links_gbps, gains, strict=True):
        if gain is None:
            return None
        if gain > PAYS:
            if before is None:
                return gbps
            share = max(0.0, 1 - before[1]) / (gain - before[1])
            return float(math.exp(_between(math.log(before[0]), math.log(gbps), share)))
        before = (gbps, gain)
    return None


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _row_of_length(
    problem_for: ProblemFor,
    workload: Workload,
    factor: float,
    reading: Reading,
    links_gbps: Sequence[float],
    mean_tokens: int,
) -> MapRow:
    try:
        problem = problem_for(scaled(workload, factor))
        return _row(problem, reading, links_gbps, mean_tokens)
    except InputError as error:
        none, never = (None,) * len(links_gbps), Beginning(None, None, None)
        return MapRow(mean_tokens, none, none, never, never, refused=error.problem)


def _row(
    problem: Problem, reading: Reading, links_gbps: Sequence[float], mean_tokens: int
) -> MapRow:
    free = replace(problem, fixed_threshold=None, local=replace(problem.local, fixed_prefill=None))
    curves = WorkCurves(cut_workload(free.workload), Atoms(free.workload, free.spec), reading)
    draws = error_draws(free, DRAWS) if len(links_gbps) > 1 else None
    linked = [_with_link(free, gbps) for gbps in links_gbps]
    rates = np.array([_lambda_max(problem, curves) for problem in linked])
    drawn = None if draws is None else np.array([_drawn(p, curves, draws) for p in linked])

    def over(baseline: Problem | None) -> tuple[Gains, Beginning]:
        if baseline is None:
            return (None,) * len(links_gbps), Beginning(None, None, None)
        gains = tuple((rates / _lambda_max(baseline, curves)).tolist())
        middle = pays_from_gbps(links_gbps, gains)
        if draws is None or drawn is None:
            return gains, Beginning(middle, middle, middle)
        return gains, Beginning(
            middle, *_range(links_gbps, drawn / _drawn(baseline, curves, draws))
        )

    homogeneous, pays_homogeneous = over(baselines.homogeneous(free))
    equal_cost, pays_equal_cost = over(baselines.equal_cost(free))
    return MapRow(mean_tokens, homogeneous, equal_cost, pays_homogeneous, pays_equal_cost)


def _lambda_max(problem: Problem, curves: WorkCurves) -> float:
    return stage_rates(problem, curves, optimise(problem, curves)).lambda_max


def _drawn(problem: Problem, curves: WorkCurves, draws: Draws) -> Array:
    return plan_draws(problem, curves, draws).lambda_max


def _range(links_gbps: Sequence[float], ratios: Array) -> tuple[float | None, float | None]:
    """The quantiles of the beginning; `ratios` are gains at each link (rows) in each draw."""
    found = [pays_from_gbps(links_gbps, tuple(gains.tolist())) for gains in ratios.T]
    never = [math.inf if gbps is None else gbps for gbps in found]
    # Quantiles are values of the draws: between a bandwidth and infinity there is no middle.
    low, high = np.quantile(never, (LOW, HIGH), method="closest_observation")
    return (_or_none(float(low)), _or_none(float(high)))


def _or_none(gbps: float) -> float | None:
    return gbps if gbps < math.inf else None


def _link_gbps(problem: Problem) -> float:
    return sum(remote.path.bps for remote in problem.remotes) / 1e9


def _with_link(problem: Problem, gbps: float) -> Problem:
    factor = gbps / _link_gbps(problem)
    remotes = tuple(
        replace(remote, path=replace(remote.path, bps=remote.path.bps * factor))
        for remote in problem.remotes
    )
    return replace(problem, remotes=remotes)


def scaled(workload: Workload, factor: float) -> Workload:
    """All prompts longer by one factor, what is cached of them too. At least one token is new."""
    return replace(
        workload, new=np.maximum(workload.new * factor, 1.0), cached=workload.cached * factor
    )


def _mean_prompt(workload: Workload) -> float:
    return weighted_sum(workload.new + workload.cached, workload.weight)
