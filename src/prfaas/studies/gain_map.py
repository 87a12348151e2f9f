"""Where PrfaaS begins to pay: its gain over link bandwidth and prompt length, for one deployment.

Each cell is planned anew: the link has another bandwidth, all prompts are longer or shorter by one
factor, and threshold and split are the best for that cell, also where the deployment fixes them.
The baselines are those of a plan: one homogeneous cluster with the same number of GPUs, and one
that costs the same. Pure; cells of equal prompt length share their work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from prfaas.config import Deployment
from prfaas.errors import InputError
from prfaas.planner import baselines
from prfaas.planner.comparison import Planner
from prfaas.planner.curves import Reading
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Problem
from prfaas.planner.ranges import merged
from prfaas.planner.workload import Workload, weighted_sum
from prfaas.studies.problem_files import Study

LINKS_GBPS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0)
MEAN_TOKENS = tuple(2**power for power in range(11, 19))  # 2K to 256K
# Steps of the grid of a figure, whose lines are interpolated between cells.
FINE_LINKS_GBPS = tuple(float(gbps) for gbps in np.geomspace(0.5, 400, 28))
FINE_MEAN_TOKENS = tuple(round(2 ** (half / 2)) for half in range(22, 37))
# A threshold is exact to a part in so many of the requests, which is more than a map can show.
ATOMS = 512

# A gain below this is within the coarseness of the atoms: PrfaaS does not pay there, nor cost.
PAYS = 1.005

# Builds the deployment's problem for other traffic. Raises where the model does not fit.
ProblemFor: TypeAlias = Callable[[Workload], Problem]
Gains: TypeAlias = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class MapRow:
    """One prompt length. A gain is None where the baseline does not exist."""

    mean_tokens: int
    over_homogeneous: Gains  # one per link bandwidth
    over_equal_cost: Gains
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

    def as_dict(self) -> dict[str, Any]:
        return {
            "links_gbps": list(self.links_gbps),
            "rows": [
                {
                    "mean_tokens": row.mean_tokens,
                    "over_homogeneous": list(row.over_homogeneous),
                    "over_equal_cost": list(row.over_equal_cost),
                    "pays_from_gbps": {
                        "homogeneous": pays_from_gbps(self.links_gbps, row.over_homogeneous),
                        "equal_cost": pays_from_gbps(self.links_gbps, row.over_equal_cost),
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
        none = (None,) * len(links_gbps)
        return MapRow(mean_tokens, none, none, refused=error.problem)


def _row(
    problem: Problem, reading: Reading, links_gbps: Sequence[float], mean_tokens: int
) -> MapRow:
    free = replace(problem, fixed_threshold=None, local=replace(problem.local, fixed_prefill=None))
    curves = Planner(free, reading).curves

    def lambda_max(other: Problem | None) -> float | None:
        if other is None:
            return None
        return stage_rates(other, curves, optimise(other, curves)).lambda_max

    # The baselines have no link, so that a row has one of each.
    homogeneous = lambda_max(baselines.homogeneous(free))
    equal_cost = lambda_max(baselines.equal_cost(free))
    rates = [lambda_max(_with_link(free, gbps)) for gbps in links_gbps]
    return MapRow(
        mean_tokens,
        tuple(_over(rate, homogeneous) for rate in rates),
        tuple(_over(rate, equal_cost) for rate in rates),
    )


def _over(rate: float | None, baseline: float | None) -> float | None:
    return None if rate is None or not baseline else rate / baseline


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
