"""Baselines, gains, and the plan as plain data."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from prfaas.planner.comparison import compare as compare_one
from prfaas.planner.network import baselines
from prfaas.planner.network.comparison import compare
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.sensitivity import gains
from prfaas.planner.network.solve import NetworkPlanner
from tests.planner.builders import case_study, problem
from tests.planner.network.builders import random_network


def test_one_pd_cluster_has_the_baselines_of_the_papers_comparison() -> None:
    one = case_study()
    theirs = compare_one(one, "paper")
    assert theirs.homogeneous is not None and theirs.equal_cost is not None
    planner, subject = NetworkPlanner("paper"), NetworkProblem((Home(1.0, one),))
    same_gpus = baselines.homogeneous(planner, subject)
    assert same_gpus == pytest.approx(theirs.homogeneous.lambda_max_rps, rel=1e-9)
    same_money = baselines.equal_cost(planner, subject)
    assert same_money == pytest.approx(theirs.equal_cost.lambda_max_rps, rel=1e-9)
    pairs = baselines.one_each(planner, subject)
    assert pairs.rate_rps == pytest.approx(theirs.prfaas_pd.lambda_max_rps, rel=1e-9)
    assert pairs.prfaas == {"pd": "prfaas"}


def test_the_pairs_are_the_best_of_all_pairings() -> None:
    for seed in range(3):
        subject = random_network(np.random.default_rng(seed), 3, 2)
        planner = NetworkPlanner("exact")
        names = [*subject.prfaas_pools, None, None, None]
        best = 0.0
        for chosen in set(itertools.permutations(names, 3)):
            given = dict(zip((home.cluster for home in subject.homes), chosen, strict=True))
            divided = subject.with_remotes(
                lambda home, remote, given=given: (  # type: ignore[misc]
                    remote if remote.pool.cluster == given[home.cluster] else None
                )
            )
            best = max(best, planner.rate_rps(divided))
        found = baselines.one_each(planner, subject)
        assert found.rate_rps == pytest.approx(best, rel=1e-9)
        taken = [name for name in found.prfaas.values() if name is not None]
        assert len(taken) == len(set(taken))


def test_a_gain_is_the_difference_of_two_plans() -> None:
    one = problem(prfaas=2, pd=4, bps=1e9)
    other = replace(one, local=replace(one.local, pool=replace(one.local.pool, cluster="other")))
    subject = NetworkProblem((Home(0.6, one), Home(0.4, other)))
    planner = NetworkPlanner("exact")
    rate = planner.solve(subject).rate_rps
    found = {(g.cluster, g.target): g.gain_rps for g in gains(planner, subject, rate)}
    assert set(found) == {
        ("near", None),
        ("other", None),
        ("far", None),
        ("far", "near"),
        ("far", "other"),
    }
    larger = replace(one, local=replace(one.local, pool=replace(one.local.pool, instances=5)))
    changed = NetworkProblem((Home(0.6, larger), Home(0.4, other)))
    again = NetworkPlanner("exact").solve(changed).rate_rps
    assert found["near", None] == pytest.approx(again - rate, rel=1e-6)
    assert found["near", None] > 0


def test_an_instance_of_a_fixed_split_takes_the_better_role() -> None:
    """One prefill instance limits; a second one helps, a decode instance does not."""
    one = problem(prfaas=0, pd=6, fixed_prefill=1, bs_max=50)
    planner = NetworkPlanner("exact")
    subject = NetworkProblem((Home(1.0, one),))
    rate = planner.solve(subject).rate_rps
    (gain,) = gains(planner, subject, rate)
    assert gain.gain_rps == pytest.approx(rate, rel=1e-6)


def test_the_report_is_plain_data() -> None:
    subject = random_network(np.random.default_rng(5), 2, 2)
    comparison = compare(subject, "paper")
    report = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert [cluster["cluster"] for cluster in report["clusters"]] == ["pd-0", "pd-1"]
    for cluster in report["clusters"]:
        assert {"threshold_tokens", "split", "rate_rps"} <= set(cluster)
    for flow in report["flows"]:
        assert {"from", "to", "rps", "gbps"} <= set(flow)
    assert report["binding"]
    assert set(report["ratios"]) == {
        "over_alone",
        "over_one_each",
        "over_homogeneous",
        "over_equal_cost",
    }
