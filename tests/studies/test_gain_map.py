"""The map of gains: its cells are plans, its line is where they cross 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.config import load_deployment
from prfaas.errors import InputError
from prfaas.planner.comparison import compare
from prfaas.planner.problem import Problem
from prfaas.planner.workload import Workload
from prfaas.studies.gain_map import GainMap, deployment_map, gain_map, pays_from_gbps, scaled
from prfaas.studies.problem_files import Study

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
STUDY = Study(CASE_STUDY, "paper")
DEPLOYMENT = load_deployment(CASE_STUDY)
LINKS = (1.0, 2.0, 5.0, 10.0, 100.0)
PROBLEM = STUDY.problem(DEPLOYMENT)


def with_traffic(workload: Workload) -> Problem:
    return STUDY.problem(DEPLOYMENT, workload)


@pytest.fixture(scope="module")
def gains() -> GainMap:
    return deployment_map(STUDY, DEPLOYMENT, "paper")


def test_the_own_point_has_the_gains_of_the_plan(gains: GainMap) -> None:
    ratios = STUDY.plan(DEPLOYMENT).ratios
    assert gains.own.over_homogeneous == pytest.approx(ratios["prfaas_over_homogeneous"])
    assert gains.own.over_equal_cost == pytest.approx(ratios["prfaas_over_equal_cost"])
    assert gains.own.gbps == 100
    assert gains.own.mean_tokens == pytest.approx(PROBLEM.workload.mean_new_tokens)


@pytest.mark.parametrize(("column", "row"), [(2, 1), (4, 4), (9, 7)])
def test_a_cell_is_a_plan_with_that_link_and_traffic(gains: GainMap, column: int, row: int) -> None:
    cells = gains.rows[row]
    factor = cells.mean_tokens / PROBLEM.workload.mean_new_tokens
    problem = with_traffic(scaled(PROBLEM.workload, factor))
    remote = problem.remotes[0]
    path = replace(remote.path, bps=gains.links_gbps[column] * 1e9)
    whole = compare(replace(problem, remotes=(replace(remote, path=path),)), "paper")
    over = whole.ratios["prfaas_over_homogeneous"]
    assert cells.over_homogeneous[column] == pytest.approx(over, rel=5e-3)


def test_a_wider_link_never_lowers_the_gain(gains: GainMap) -> None:
    for row in gains.rows:
        known = [gain for gain in row.over_homogeneous if gain is not None]
        assert len(known) == len(gains.links_gbps)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(known, known[1:], strict=False))


def test_a_fixed_threshold_and_split_are_chosen_anew(gains: GainMap) -> None:
    fixed = replace(PROBLEM, fixed_threshold=128, local=replace(PROBLEM.local, fixed_prefill=1))
    again = gain_map(fixed, lambda work: replace(fixed, workload=work), "paper", [100.0], [])
    assert again.own == gains.own


def test_links_keep_their_proportions() -> None:
    remote = PROBLEM.remotes[0]
    halves = [
        replace(
            remote,
            pool=replace(remote.pool, instances=2),
            path=replace(remote.path, bps=gbps * 1e9),
        )
        for gbps in (75, 25)
    ]
    two = replace(PROBLEM, remotes=tuple(halves))
    assert gain_map(two, lambda _: two, "paper", [100.0], []).own.gbps == 100
    (row,) = gain_map(two, lambda _: two, "paper", [10.0, 100.0], [27486]).rows
    (one,) = gain_map(PROBLEM, lambda _: PROBLEM, "paper", [10.0, 100.0], [27486]).rows
    assert row.over_homogeneous[1] == pytest.approx(one.over_homogeneous[1])
    assert row.over_homogeneous[0] is not None and one.over_homogeneous[0] is not None
    assert row.over_homogeneous[0] < one.over_homogeneous[0]  # a share of the link lies idle


def test_a_length_that_does_not_fit_says_why() -> None:
    def refusing(workload: Workload) -> Problem:
        if workload.max_new_tokens > 200_000:
            raise InputError("the KV of one sequence does not fit")
        return with_traffic(workload)

    gains = gain_map(PROBLEM, refusing, "paper", [10.0], [2048, 65536])
    assert gains.rows[0].refused is None and gains.rows[0].over_homogeneous[0] is not None
    assert gains.rows[1].refused == "the KV of one sequence does not fit"
    assert gains.rows[1].over_homogeneous == (None,)


def test_without_prices_there_is_no_equal_cost() -> None:
    pool = replace(PROBLEM.local.pool, usd_per_gpu_hour=None)
    free = replace(PROBLEM, local=replace(PROBLEM.local, pool=pool))
    gains = gain_map(free, lambda _: free, "paper", [10.0], [])
    assert gains.own.over_equal_cost is None and gains.own.over_homogeneous is not None


def test_without_a_remote_cluster_there_is_no_map() -> None:
    with pytest.raises(InputError, match="no prfaas cluster"):
        gain_map(replace(PROBLEM, remotes=()), with_traffic, "paper")


@pytest.mark.parametrize(
    ("gains", "gbps"),
    [
        ((0.5, 0.8, 1.2), 2.0),  # half-way on the logarithmic axis between 1 and 4
        ((1.1, 1.2, 1.3), 0.25),
        ((0.5, 0.8, 1.0), None),
        ((0.5, 1.002, 1.2), 1.0),  # a gain of 0.2% is not one
        ((0.5, 0.8, 1.002), None),
        ((0.5, None, 1.2), None),
    ],
)
def test_where_it_begins_to_pay(gains: tuple[float | None, ...], gbps: float | None) -> None:
    found = pays_from_gbps((0.25, 1.0, 4.0), gains)
    assert found == (None if gbps is None else pytest.approx(gbps))


def test_as_json(gains: GainMap) -> None:
    data = gains.as_dict()
    assert data["links_gbps"][0] == 0.5 and data["links_gbps"][-1] == 400
    assert [row["mean_tokens"] for row in data["rows"]] == [2**n for n in range(11, 19)]
    begins = data["rows"][4]["pays_from_gbps"]["homogeneous"]
    assert begins["gbps"] == pytest.approx(3.5, rel=0.1)
    # Nothing of the case study is estimated.
    assert not data["estimated"] and begins["low"] == begins["high"] == begins["gbps"]


def test_errors_of_estimates_give_a_range_of_the_beginning() -> None:
    file = CASE_STUDY.with_name("mimo_mi300x_h200.toml")
    deployment, study = load_deployment(file), Study(file, "paper")
    problem = study.problem(deployment)
    gains = gain_map(problem, lambda work: study.problem(deployment, work), "paper", LINKS, [27486])
    (row,) = gains.rows
    begins = row.pays_over_equal_cost
    assert gains.estimated and begins.gbps is not None and begins.low is not None
    assert begins.low < begins.gbps and (begins.high is None or begins.gbps < begins.high)
