"""The data of a plan's page: flows and roles add up, and say the same as the plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from prfaas.config import load_deployment
from prfaas.console.plan_curves import Curve, stage_curves, sweep_curve, total_rate_curves
from prfaas.console.plan_report import PlanTexts, as_network_plan, plan_report
from prfaas.console.text_table import TextTable
from prfaas.planner.comparison import Planner
from prfaas.planner.curves import Reading
from prfaas.planner.network.comparison import NetworkComparison
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Path as NetworkPath
from prfaas.planner.problem import Problem, Remote
from prfaas.scheduler.homes.plans import as_network
from prfaas.studies.network_plans import NetworkStudy
from tests.planner.builders import FAST, case_study, pool, problem

CONFIGS = Path(__file__).parents[2] / "configs"
TABLE = TextTable("a table", ("", "PrfaaS-PD"), (("rate", "1.0"),))
TEXTS = PlanTexts("a title", "a model", "paper", "Twice as much.", [TABLE], ["a note."])
T = TypeVar("T")


def at_once(items: Sequence[T], _: str) -> Iterable[T]:
    return items


def as_json(data: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(data, allow_nan=False))  # type: ignore[no-any-return]


def one_pd(
    given: Problem, reading: Reading = "paper"
) -> tuple[NetworkPlan, list[Curve], dict[str, Any]]:
    planner = Planner(given, reading)
    comparison = planner.compare(given)
    plan = as_network_plan(given, planner.curves, comparison)
    curves = stage_curves(given, planner.curves, comparison.prfaas_pd)
    return plan, curves, as_json(plan_report(TEXTS, as_network(given), plan, curves))


def check_flows(plan: NetworkPlan, data: dict[str, Any]) -> None:
    """Every request is prefilled somewhere, and links carry no more than they have."""
    flows = data["flows"]
    for column, home in enumerate(plan.homes):
        remote = [row[column] for row in flows["rps"] if row[column] is not None]
        assert sum(remote) + flows["local_rps"][column] == pytest.approx(home.rate_rps, rel=1e-3)
    links = {(link["source"], link["target"]): link for link in data["scene"]["links"]}
    for row, source in enumerate(flows["sources"]):
        for column, target in enumerate(flows["targets"]):
            link = links.get((source, target))
            bps = flows["bps"][row][column]
            assert (link is None) is (bps is None)
            if link is not None:
                assert link.get("rate_bps", 0) == bps
                assert bps <= link["capacity_bps"] * 1.001
                assert link["capacity_bps"] == flows["link_bps"][row][column]


def check_roles(plan: NetworkPlan, data: dict[str, Any]) -> None:
    clusters = {cluster["name"]: cluster for cluster in data["scene"]["clusters"]}
    for home in plan.homes:
        roles = [node["role"] for node in clusters[home.cluster]["nodes"]]
        assert roles == ["prefill"] * home.n_prefill + ["decode"] * home.n_decode
    for prfaas in plan.prfaas:
        nodes = clusters[prfaas.cluster]["nodes"]
        assert [node["role"] for node in nodes] == ["prefill"] * prfaas.instances
    ids = [node["id"] for cluster in clusters.values() for node in cluster["nodes"]]
    assert len(ids) == len(set(ids))


def check_curves(data: dict[str, Any], rate_rps: float) -> None:
    """The best point lies on an axis, and no point of the whole deployment is above it."""
    for curve in data["curves"]:
        assert curve["x"] == sorted(curve["x"])
        assert 2 <= len(curve["x"]) <= 202
        for line in curve["lines"]:
            assert len(line["y"]) == len(curve["x"])
        assert curve["best"]["x"] in curve["x"]
        assert curve["best"]["y"] == pytest.approx(rate_rps)
        least = [
            min(y for y in column if y is not None)
            for column in zip(*(line["y"] for line in curve["lines"]), strict=True)
        ]
        assert max(least) <= rate_rps * 1.0001
        assert least[curve["x"].index(curve["best"]["x"])] == pytest.approx(rate_rps, rel=1e-3)


@pytest.mark.parametrize("reading", ["paper", "exact"])
def test_the_case_study(reading: Reading) -> None:
    given = case_study()
    plan, _, data = one_pd(given, reading)
    assert (data["kind"], data["title"], data["reading"]) == ("plan", "a title", reading)
    check_flows(plan, data)
    check_roles(plan, data)
    check_curves(data, plan.rate_rps)
    assert [curve["x_label"] for curve in data["curves"]] == [
        "threshold (tokens)",
        "local nodes that prefill",
    ]
    # The planner of several clusters finds the same.
    other = NetworkPlanner(reading).solve(as_network(given))
    assert plan.rate_rps == pytest.approx(other.rate_rps, rel=1e-6)
    assert plan.homes[0].threshold_tokens == other.homes[0].threshold_tokens
    assert plan.homes[0].n_prefill == other.homes[0].n_prefill
    for ours, theirs in zip(plan.prfaas, other.prfaas, strict=True):
        assert ours.utilisation == pytest.approx(theirs.utilisation, rel=1e-4)
    assert plan.flows[0].bps == pytest.approx(other.flows[0].bps, rel=1e-4)
    (home,) = data["scene"]["homes"]
    assert home["planned_threshold_tokens"] == plan.homes[0].threshold_tokens
    assert data["headline"] == f"{plan.rate_rps:.2f} requests/s. Twice as much."
    assert data["tables"] == [TABLE.as_dict()]
    assert data["notes"] == ["a note."]


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem(bps=1e5),
        problem(bps=1e5, fixed_threshold=200),
        problem(prfaas=1, pd=60, fixed_prefill=2),
        problem(fixed_prefill=3, bs_max=1),
        problem(prfaas=0),
    ],
)
def test_what_limits_the_rate_is_used_completely(given: Problem) -> None:
    plan, _, data = one_pd(given)
    check_flows(plan, data)
    check_roles(plan, data)
    found = [limit["where"] for limit in data["limits"]]
    assert found
    places = {" -> ".join((flow.source, flow.target)): flow.utilisation for flow in plan.flows}
    places |= {prfaas.cluster: prfaas.utilisation for prfaas in plan.prfaas}
    for home in plan.homes:
        places[home.cluster] = max(home.prefill_utilisation, home.decode_utilisation)
    for where in found:
        assert places[where] == pytest.approx(1.0, abs=1e-3)


def test_a_slow_link_is_what_limits() -> None:
    _, _, data = one_pd(problem(bps=1e5, fixed_threshold=200))
    assert data["limits"] == [{"text": "the link far -> near", "where": "far -> near"}]
    (link,) = data["scene"]["links"]
    assert link["cause"] == "the plan uses it completely"


def test_a_deployment_without_a_choice_has_no_curve_of_it() -> None:
    plan, curves, data = one_pd(problem(prfaas=0))
    assert data["flows"]["sources"] == [] and data["scene"]["links"] == []
    assert [curve.x_label for curve in curves] == ["local nodes that prefill"]
    check_roles(plan, data)


def test_two_prfaas_clusters_for_one_pd_cluster() -> None:
    given = problem()
    second = Remote(pool("south", 3, FAST), NetworkPath(5e5, 0.04))
    plan, _, data = one_pd(replace(given, remotes=(*given.remotes, second)))
    check_flows(plan, data)
    check_roles(plan, data)
    check_curves(data, plan.rate_rps)
    assert data["flows"]["sources"] == ["far", "south"]
    assert sum(row[0] for row in data["flows"]["share"]) == pytest.approx(1.0, abs=1e-3)


@pytest.fixture(scope="module")
def several() -> tuple[NetworkComparison, dict[str, Any]]:
    file = CONFIGS / "two_by_two.toml"
    deployment = load_deployment(file)
    study = NetworkStudy(file, "paper")
    comparison = study.plan_network(deployment)
    network = study.network(deployment)
    curves = study.rate_curves(network, comparison.plan, at_once)
    shown = total_rate_curves(curves, comparison.plan)
    return comparison, as_json(plan_report(TEXTS, network, comparison.plan, shown))


def test_several_pd_clusters(several: tuple[NetworkComparison, dict[str, Any]]) -> None:
    comparison, data = several
    plan = comparison.plan
    check_flows(plan, data)
    check_roles(plan, data)
    check_curves(data, plan.rate_rps)
    assert [curve["x_label"] for curve in data["curves"]] == [
        "threshold of east (tokens)",
        "nodes of east that prefill",
        "threshold of west (tokens)",
        "nodes of west that prefill",
    ]
    assert len(data["limits"]) == len(plan.binding)
    assert {"text": "the link south -> west", "where": "south -> west"} in data["limits"]
    assert data["busy"]["south"]["prefill"] == pytest.approx(plan.prfaas[1].utilisation, abs=1e-4)
    assert {home["cluster"] for home in data["scene"]["homes"]} == {"east", "west"}
    assert len(json.dumps(data)) < 100_000


def test_a_sweep_is_a_curve_where_its_values_are_numbers() -> None:
    values = [1e5, 1e6, 1e7]
    plans = []
    for bps in values:
        given = problem(bps=bps)
        plans.append(Planner(given, "paper").compare(given))
    curve = sweep_curve("links.0.gbps", values, plans)
    assert curve is not None and curve.x_log
    data = curve.as_dict()
    assert [line["name"] for line in data["lines"]][0] == "PrfaaS-PD"
    assert data["lines"][0]["y"] == [round(plan.prfaas_pd.lambda_max_rps, 4) for plan in plans]
    assert sweep_curve("clusters.0.accelerator", ["h20", "h200"], plans[:2]) is None
