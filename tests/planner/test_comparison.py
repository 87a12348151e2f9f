"""The paper's section 4, reproduced: every figure of Table 6, and what it leaves out."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from prfaas.errors import InputError
from prfaas.planner.comparison import compare
from prfaas.planner.problem import LatencyGoal
from prfaas.planner.report import SYSTEMS, comparison_as_dict
from tests.planner.builders import CASE_STUDY, case_study, problem

PUBLISHED = tomllib.loads(CASE_STUDY.with_suffix(".published.toml").read_text())
PAPER = comparison_as_dict(compare(case_study(), "paper"))
EXACT = comparison_as_dict(compare(case_study(), "exact"))


def published() -> list[tuple[str, str, float]]:
    rows = []
    for system in SYSTEMS[:3]:
        for key, value in PUBLISHED[system].items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            rows += [(system, f"{key}.{k}".rstrip("."), v) for k, v in inner]
    return rows + [("ratios", key, value) for key, value in PUBLISHED["ratios"].items()]


@pytest.mark.parametrize(("system", "key", "value"), published())
def test_table_6(system: str, key: str, value: float) -> None:
    first, _, second = key.partition(".")
    ours = PAPER[system][first]
    ours = ours[second] if second else ours
    if key.startswith("n_"):
        assert ours == value
    elif key == "threshold_tokens":
        assert ours == pytest.approx(value, abs=100)
    else:
        assert ours == pytest.approx(value, rel=0.06 if key == "egress_gbps" else 0.015)


def test_stages_that_a_deployment_lacks_are_null() -> None:
    assert PAPER["homogeneous"]["threshold_tokens"] is None
    assert PAPER["homogeneous"]["theta_rps"]["prfaas"] is None
    assert PAPER["naive"]["threshold_tokens"] is None
    assert PAPER["naive"]["theta_rps"]["pd_p"] is None
    assert PAPER["equal_cost"]["n_prefill"] + PAPER["equal_cost"]["n_decode"] == 16


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_printed_lambda_is_unstable_with_true_means(system: str) -> None:
    assert EXACT[system]["stable_at_paper_lambda"] is False
    assert EXACT[system]["lambda_max_rps"] < PAPER[system]["lambda_max_rps"]
    at_paper_load = comparison_as_dict(
        compare(case_study(), "exact", load_rps=PAPER[system]["lambda_max_rps"])
    )[system]
    assert at_paper_load["stable"] is False
    assert at_paper_load["ttft_mean_s"] is None
    assert max(at_paper_load["utilisation"].values()) >= 1


def test_exact_capacity_is_stable_just_below_itself() -> None:
    for system in SYSTEMS:
        capacity = EXACT[system]["lambda_max_rps"]
        below = comparison_as_dict(compare(case_study(), "exact", load_rps=capacity * 0.999))[
            system
        ]
        above = comparison_as_dict(compare(case_study(), "exact", load_rps=capacity * 1.001))[
            system
        ]
        assert (below["stable"], above["stable"]) == (True, False)


def test_queueing_is_in_the_exact_ttft() -> None:
    for system in SYSTEMS:
        assert EXACT[system]["ttft_mean_s"] > PAPER[system]["ttft_mean_s"]
        order = [EXACT[system][f"ttft_{q}_s"] for q in ("p50", "p90", "p99")]
        assert order == sorted(order)


@pytest.mark.slow
def test_capacity_under_a_ttft_goal() -> None:
    subject = dataclasses.replace(case_study(), goal=LatencyGoal(6.0, 0.9))
    plan = compare(subject, "exact")
    capacity = plan.prfaas_pd.slo_capacity_rps
    assert capacity is not None and 0 < capacity < plan.prfaas_pd.lambda_max_rps
    at = compare(subject, "exact", load_rps=capacity).prfaas_pd
    assert at.ttft is not None and at.ttft.p90_s == pytest.approx(6.0, rel=0.01)
    # Without any load homogeneous PD has a P90 of 9.7 s: no load meets the goal.
    assert plan.homogeneous is not None
    assert plan.homogeneous.slo_capacity_rps == pytest.approx(0, abs=1e-3)


def test_extrapolation_is_reported() -> None:
    (pd, _) = PAPER["prfaas_pd"]["extrapolated"]
    assert pd["cluster"] == "pd"
    assert pd["fraction"] > 0.5
    assert pd["measured_new_tokens"] == [10_224, 62_410]
    assert pd["measured_cached_tokens"] == 0
    assert pd["profile"].startswith("inferred")


def test_a_slow_link_raises_the_threshold_and_becomes_the_limit() -> None:
    plans = [compare(problem(bps=bps), "paper").prfaas_pd for bps in (1e6, 1e7, 1e8)]
    assert [p.threshold_tokens for p in plans] == sorted(
        (p.threshold_tokens or 0 for p in plans), reverse=True
    )
    assert plans[0].egress_bps <= 1e6 * (1 + 1e-9)


def test_no_instance_can_prefill() -> None:
    with pytest.raises(InputError, match="no instance can prefill"):
        compare(problem(prfaas=0, fixed_prefill=0), "paper")
