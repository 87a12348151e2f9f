"""The planner's results for a scaled deployment differ from the original's only by the scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from prfaas.config import load_deployment
from prfaas.config.write import deployment_toml
from prfaas.engine.emulated.pace import Scales, scaled_spec
from prfaas.errors import InputError
from prfaas.launch.preparation import emulated_deployment
from prfaas.launch.scaling import scaled_catalog, scaled_deployment
from prfaas.planner.alone import alone_rps
from prfaas.planner.profile import PrefillTime
from prfaas.scheduler.homes.plans import solve_network
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.problem_files import Study

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
# Bytes per token and layer stay whole, so that nothing is rounded.
SCALES = Scales(time=0.25, bytes=1 / 576, output=1 / 64)


def test_rates_times_and_splits(tmp_path: Path) -> None:
    deployment = load_deployment(CASE_STUDY)
    study = Study(CASE_STUDY, "exact")
    problem = study.problem(deployment)
    (tmp_path / "catalog.toml").write_text(scaled_catalog(deployment.model.name, [problem], SCALES))
    text = 'catalog = ["catalog.toml"]\n' + deployment_toml(scaled_deployment(deployment, SCALES))
    (tmp_path / "small.toml").write_text(text)
    small_study = Study(tmp_path / "small.toml", "exact")
    small = small_study.problem(load_deployment(tmp_path / "small.toml"))
    assert small.spec == scaled_spec(problem.spec, SCALES.bytes)

    large, little = (
        s.planner(p).solve(p, load)
        for s, p, load in ((study, problem, 2.5), (small_study, small, 2.5 / SCALES.time))
    )
    assert little.threshold_tokens == large.threshold_tokens
    assert (little.n_prefill, little.n_decode) == (large.n_prefill, large.n_decode)
    assert little.lambda_max_rps == pytest.approx(large.lambda_max_rps / SCALES.time)
    assert large.prediction is not None and little.prediction is not None
    wait_s = large.prediction.prefill_wait_mean_s * SCALES.time
    assert little.prediction.prefill_wait_mean_s == pytest.approx(wait_s, rel=1e-3)
    # TTFT ends with one decode step, which is as much longer as its tokens stand for more.
    (step,) = study.catalog(deployment).profiles_of("case-study-1t")[1].decode
    assert large.ttft is not None and little.ttft is not None
    longer_s = step.step_s * (1 / SCALES.output - 1) * SCALES.time
    expected_s = large.ttft.mean_s * SCALES.time + longer_s
    assert little.ttft.mean_s == pytest.approx(expected_s, rel=1e-3)
    egress = large.egress_bps * SCALES.bytes / SCALES.time
    assert little.egress_bps == pytest.approx(egress, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["qwen3.5_h200_h20", "mimo_mi300x_h200", "kimi_linear_b200_rtxpro"]
)
def test_estimated_times_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    """Weights of another format, times of which only some are estimated, and steps that are."""
    file = CASE_STUDY.with_name(f"{name}.toml")
    scales = Scales(time=0.25, output=1 / 8)
    deployment = load_deployment(file)
    given = NetworkStudy(file, "exact")
    made = emulated_deployment(deployment, given, tmp_path, scales)
    large, small = given.problem(deployment), Study(tmp_path / "made.toml", "exact").problem(made)

    def seconds(points: Sequence[PrefillTime]) -> list[float]:
        return [point.seconds for point in points]

    for pool, little in zip(large.pools, small.pools, strict=True):
        points = seconds(little.profile.points)
        assert points == pytest.approx([s / 4 for s in seconds(pool.profile.points)])
    decode, emulated = large.local.decode, small.local.decode
    assert emulated.bs_max == decode.bs_max
    assert emulated.t_decode_s == pytest.approx(2 * decode.t_decode_s)
    assert small.local.decode_provenance.startswith("estimated: ")
    assert small.local.decode_error is not None
    rates = [alone_rps(problem) for problem in (large, small)]
    assert rates[1] == pytest.approx(4 * rates[0])


def test_constants_in_seconds_shrink_with_time() -> None:
    deployment = load_deployment(CASE_STUDY)
    rules, small = deployment.scheduler, scaled_deployment(deployment, SCALES).scheduler
    assert small.replan.every_s == rules.replan.every_s / 4
    assert small.replan.min_gain == rules.replan.min_gain
    assert small.paper.surge_wait_s == rules.paper.surge_wait_s / 4
    assert small.adaptive.patience == rules.adaptive.patience * 4


def test_bytes_that_would_vanish() -> None:
    deployment = load_deployment(CASE_STUDY)
    study = Study(CASE_STUDY, "exact")
    with pytest.raises(InputError, match="--byte-scale"):
        scaled_catalog("case-study-1t", [study.problem(deployment)], Scales(bytes=1e-4))


def test_workloads_of_pd_clusters_are_scaled(tmp_path: Path) -> None:
    file = CASE_STUDY.with_name("two_by_two.toml")
    deployment = load_deployment(file)
    large = NetworkStudy(file, "exact")
    problem = large.network(deployment)
    (tmp_path / "catalog.toml").write_text(
        scaled_catalog("case-study-1t", [home.problem for home in problem.homes], SCALES)
    )
    small = msgspec.structs.replace(scaled_deployment(deployment, SCALES), catalog=["catalog.toml"])
    study = NetworkStudy(tmp_path / "small.toml", "exact")
    found, little = solve_network(problem), solve_network(study.network(small))
    assert little.rate_rps == pytest.approx(found.rate_rps / SCALES.time, rel=1e-3)
    for one, other in zip(found.homes, little.homes, strict=True):
        assert (other.n_prefill, other.n_decode) == (one.n_prefill, one.n_decode)
        assert other.threshold_tokens == pytest.approx(one.threshold_tokens, rel=0.02)
        assert other.decode_utilisation == pytest.approx(one.decode_utilisation, rel=1e-3)
