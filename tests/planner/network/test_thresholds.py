"""Under the paper reading the largest bearable threshold is not always the best one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.planner.network import thresholds
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.network.work import ThresholdWork
from prfaas.planner.problem import Path, Problem, Remote
from prfaas.planner.workload import lognormal
from tests.planner.builders import pool, problem, profile
from tests.planner.network.exhaustive import brute_force

# T grows with the square of the length: the mean of short and long prompts is then far cheaper than
# the prompts themselves, and the paper reading evaluates T at the mean.
QUADRATIC = profile((100, 0.001), (1000, 0.1), (10_000, 10.0))


def network(bps: float) -> NetworkProblem:
    smooth = lognormal(6.5, 1.0, 20, 5000, output_tokens=100)
    one = problem(smooth, pd=6, bs_max=40)
    remote = Remote(pool("far", 2, QUADRATIC), Path(bps, 0.01))
    other = Remote(pool("farther", 1, QUADRATIC), Path(bps / 2, 0.01))
    first = replace(one, remotes=(remote, other))
    smaller = replace(first.local.pool, cluster="second", instances=3)
    second = replace(first, local=replace(first.local, pool=smaller))
    return NetworkProblem((Home(0.7, first), Home(0.3, second)))


def work(one: Problem, planner: NetworkPlanner) -> ThresholdWork:
    return planner.work(Home(1.0, one)).work


def test_remote_work_may_rise_with_the_threshold_in_the_paper_reading_only() -> None:
    one = network(1e9).homes[0].problem
    for reading, rises in (("paper", True), ("exact", False)):
        found = work(one, NetworkPlanner(reading))  # type: ignore[arg-type]
        assert bool(np.any(np.diff(found.remote_s[0]) > 1e-12)) is rises
        assert not np.any(np.diff(found.bits) > 1e-6)
        rows = found.borne(rate_rps=20.0, n_prefill=4)
        assert (len(found.undominated(rows)) > 1) is rises


@pytest.mark.parametrize("bps", [6e7, 1e9])
def test_the_search_finds_the_best_thresholds(bps: float) -> None:
    """The slow links forbid the threshold 0 that the PrfaaS clusters would bear best."""
    subject = thinned(network(bps))
    plan = NetworkPlanner("paper").solve(subject)
    assert plan.rate_rps == pytest.approx(brute_force(subject, "paper"), rel=1e-6)


def test_a_search_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is then still possible, and its gap covers the best one."""
    subject = thinned(network(6e7))
    best = NetworkPlanner("paper").solve(subject).rate_rps
    monkeypatch.setattr(thresholds, "_MOST_INTERVALS", 0)
    plan = NetworkPlanner("paper").solve(subject)
    assert plan.rate_rps <= best * (1 + 1e-9) <= plan.rate_rps * (1 + plan.gap) * (1 + 1e-8)
    busiest = max(prfaas.utilisation for prfaas in plan.prfaas)
    assert max(busiest, *(flow.utilisation for flow in plan.flows)) <= 1 + 1e-8
    assert max(home.prefill_utilisation for home in plan.homes) <= 1 + 1e-8


@pytest.mark.parametrize(
    "bps",
    [
        pytest.param(6e7, marks=pytest.mark.slow),
        *(pytest.param(bps, marks=pytest.mark.grid) for bps in (2e7, 1e9)),
    ],
)
def test_the_search_ends_with_thousands_of_thresholds(bps: float) -> None:
    subject = network(bps)
    plan = NetworkPlanner("paper").solve(subject)
    assert plan.gap < 1e-8
    fewer = NetworkPlanner("paper").solve(thinned(subject)).rate_rps
    assert plan.rate_rps == pytest.approx(fewer, rel=0.2)  # almost the same lengths


def thinned(subject: NetworkProblem) -> NetworkProblem:
    """The same with 40 lengths."""

    def change(one: Problem) -> Problem:
        work = one.workload
        places = np.linspace(0, len(work.new) - 1, 40).astype(int)
        edges = np.append(places, len(work.new))
        weight = np.add.reduceat(work.weight, edges[:-1])
        fewer = replace(
            work, new=work.new[places], cached=work.cached[places], weight=weight / weight.sum()
        )
        return replace(one, workload=fewer)

    return subject.with_homes(change)
