"""Planner and simulator agree on the case study: capacity, TTFT, waits, and overloaded stages.

The planner has a fixed threshold without adjustment, so `paper` runs with its adjustment off.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from prfaas.config.deployment import PaperSection, SchedulerSection
from prfaas.planner import baselines
from prfaas.planner.comparison import Planner, Solution
from prfaas.planner.latency import Prediction
from prfaas.planner.problem import Problem
from prfaas.sim.arrivals import poisson
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from tests.planner.builders import case_study

DEPLOYMENTS = ["prfaas_pd", "homogeneous", "naive"]
FIXED = SimConfig(scheduler=SchedulerSection(policy="paper", paper=PaperSection(limit=1.0)))


@cache
def study() -> tuple[dict[str, Problem], Planner, Planner]:
    given = case_study()
    homogeneous, naive = baselines.homogeneous(given), baselines.naive(given)
    assert homogeneous is not None and naive is not None
    problems = {"prfaas_pd": given, "homogeneous": homogeneous, "naive": naive}
    return problems, Planner(given, "exact"), Planner(given, "paper")


def planned(name: str, share: float) -> tuple[Solution, Prediction]:
    """The exact reading, at a share of its own capacity."""
    problems, exact, _ = study()
    solution = exact.solve(problems[name])
    at_load = exact.solve(problems[name], solution.lambda_max_rps * share)
    assert at_load.prediction is not None
    return solution, at_load.prediction


def simulated(name: str, rps: float, requests: int, seed: int = 1) -> Result:
    given = study()[0][name]
    return simulate(given, poisson(given.workload, rps, requests, seed), FIXED)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_saturated_throughput_is_the_planners_capacity(name: str) -> None:
    solution, _ = planned(name, 1.0)
    result = simulated(name, solution.lambda_max_rps * 1.3, 20_000)
    assert result.throughput_rps == pytest.approx(solution.lambda_max_rps, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [DEPLOYMENTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in DEPLOYMENTS[1:])],
)
def test_ttft_at_low_load(name: str) -> None:
    solution, prediction = planned(name, 0.05)
    result = simulated(name, solution.lambda_max_rps * 0.05, 12_000)
    assert prediction.ttft is not None
    ttft_s = result.requests.ttft_s[result.measured]
    assert ttft_s.mean() == pytest.approx(prediction.ttft.mean_s, rel=0.02)
    assert np.quantile(ttft_s, 0.9) == pytest.approx(prediction.ttft.p90_s, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_mean_wait_at_high_load(name: str) -> None:
    """A wait's mean converges slowly: neighbours wait together. Hence so many requests."""
    solution, prediction = planned(name, 0.8)
    result = simulated(name, solution.lambda_max_rps * 0.8, 80_000)
    waits_s = result.requests.wait_s[result.measured]
    assert waits_s.mean() == pytest.approx(prediction.prefill_wait_mean_s, rel=0.10)
    assert result.stable


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_queues_grow_where_only_the_paper_reading_claims_stability(name: str) -> None:
    """Jensen's gap: representative lengths understate the work."""
    problems, exact, paper = study()
    claimed = paper.solve(problems[name]).lambda_max_rps
    capacity = exact.solve(problems[name]).lambda_max_rps
    assert capacity < claimed
    rps = (capacity + claimed) / 2
    result = simulated(name, rps, 30_000)
    assert not result.stable and result.bottleneck is not None
    assert result.bottleneck.name in ("pd_p", "prfaas"), "prefill, not decode or the link"
    queued = sum(result.series.prefill_queue.values())
    last = int(result.window_s[1] / result.series.bin_s)
    quarters = [float(part.mean()) for part in np.array_split(queued[:last], 4)]
    assert quarters == sorted(quarters) and quarters[3] > 2 * quarters[0]
