from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.estimator.uncertainty import EstimateError
from prfaas.planner.comparison import compare
from prfaas.planner.problem import Problem
from prfaas.planner.profile import DecodeStep, decode_rate
from prfaas.planner.ranges import PlanRanges, Range, merged, plan_ranges
from prfaas.planner.workload import lognormal
from tests.planner.builders import case_study, problem

STEPS = [DecodeStep(1, 0.01), DecodeStep(8, 0.03)]


def error(instance: str, *, length: float = 0.0, **common: float) -> EstimateError:
    return EstimateError(instance, tuple(common.items()), length)


def estimated(
    far: EstimateError | None = None,
    near: EstimateError | None = None,
    decode: EstimateError | None = None,
    base: Problem | None = None,
) -> Problem:
    base = base or problem(lognormal(5.0, 1.0, 20, 900, output_tokens=100), prfaas=8, pd=40)
    (remote,) = base.remotes
    return replace(
        base,
        remotes=(replace(remote, pool=replace(remote.pool, error=far)),),
        local=replace(
            base.local,
            pool=replace(base.local.pool, error=near),
            decode=decode_rate(STEPS, 40),
            decode_error=decode,
            output_tokens_per_s=40,
        ),
    )


def ranges(of: Problem) -> PlanRanges:
    found = plan_ranges(of, "paper", draws=64)
    assert found is not None
    return found


def gain(of: Problem) -> Range:
    found = ranges(of).over_homogeneous
    assert found is not None
    return found


def width(found: Range) -> float:
    return found.high - found.low


def test_without_estimates_there_are_no_ranges() -> None:
    assert plan_ranges(problem(), "paper") is None


def test_ranges_hold_the_plan_and_are_the_same_each_time() -> None:
    given = estimated(
        error("f", model=0.2), error("n", model=0.2, near=0.2), error("decode", d=0.2)
    )
    found, plan = ranges(given), compare(given, "paper")
    assert found == ranges(given)
    best = plan.prfaas_pd
    assert best.threshold_tokens is not None and best.ttft is not None
    for within, value in (
        (found.threshold_tokens, best.threshold_tokens),
        (found.n_prefill, best.n_prefill),
        (found.lambda_max_rps, best.lambda_max_rps),
        (found.ttft_mean_s, best.ttft.mean_s),
        (found.ttft_p90_s, best.ttft.p90_s),
        (found.over_homogeneous, plan.ratios["prfaas_over_homogeneous"]),
        (found.over_equal_cost, plan.ratios["prfaas_over_equal_cost"]),
    ):
        assert within is not None and value is not None
        assert within.low <= value * 1.01 and value <= within.high * 1.01
        assert within.low <= within.median <= within.high
    assert found.slo_missed == 0


def without_decode() -> Problem:
    """Prefill limits: there is hardly any output, and the link is fast."""
    traffic = lognormal(5.0, 1.0, 20, 900, output_tokens=1e-3)
    return problem(traffic, prfaas=8, pd=40, bps=1e15)


def test_lambda_max_follows_the_log_normal_error_where_prefill_limits() -> None:
    given = estimated(error("f", model=0.3), error("n", model=0.3), base=without_decode())
    found = plan_ranges(given, "paper", narrow=False)
    assert found is not None
    rate, spread = found.lambda_max_rps, np.exp(0.3 * 1.645)
    assert rate.low == pytest.approx(rate.median / spread, rel=0.03)
    assert rate.high == pytest.approx(rate.median * spread, rel=0.03)


def test_an_error_of_the_model_cancels_in_the_gain_where_prefill_limits() -> None:
    base = without_decode()
    together = gain(estimated(error("f", model=0.3), error("n", model=0.3), base=base))
    apart = gain(estimated(error("f", far=0.3), error("n", near=0.3), base=base))
    assert width(together) < 1e-9 < 0.1 < width(apart)


def test_the_measurement_that_narrows_most_is_of_the_larger_error() -> None:
    for far, near, cluster in ((0.4, 0.05, "far"), (0.05, 0.4, "near")):
        given = estimated(error("f", far=far), error("n", near=near), error("decode", d=0.02))
        found = ranges(given)
        best = found.narrow_with
        assert best is not None and best.cluster == cluster
        assert best.figure == "gain" and best.before == found.over_homogeneous
        assert width(best.after) < width(best.before) / 2
        assert f"--accelerator {cluster} --gpus 1 --lengths 32,256,512 " in best.command
        assert ("--batches ''" in best.command) == (cluster == "far")


def test_a_measurement_of_one_pool_narrows_another_of_the_model() -> None:
    def remaining(far: EstimateError, near: EstimateError) -> float:
        best = ranges(estimated(far, near)).narrow_with
        assert best is not None
        return width(best.after)

    own = remaining(error("f", far=0.2), error("n", near=0.4))
    shared = remaining(error("f", model=0.2), error("n", model=0.4))
    assert own > 0.01 and shared < 1e-9


def test_without_a_baseline_the_rate_is_narrowed() -> None:
    base = estimated(error("f", far=0.3), error("n", near=0.1), base=problem(prfaas=1, pd=2))
    (remote,) = base.remotes
    wide = replace(remote, pool=replace(remote.pool, gpus_per_instance=1))
    narrow = replace(base.local.pool, gpus_per_instance=8)
    given = replace(base, remotes=(wide,), local=replace(base.local, pool=narrow))
    assert gain(given) is not None
    alone = replace(given, local=replace(given.local, pool=replace(narrow, instances=1)))
    found = ranges(alone)
    assert found.over_homogeneous is None and found.narrow_with is not None
    assert found.narrow_with.figure == "lambda_max_rps"


def test_draws_in_which_decode_is_too_slow_are_counted_apart() -> None:
    # The fastest step takes 10 ms; 25 ms are allowed: factors above 2.5 fail.
    found = ranges(estimated(decode=error("decode", d=1.0)))
    assert found.slo_missed == pytest.approx(0.18, abs=0.03)  # 1 - Phi(ln 2.5)
    assert found.lambda_max_rps.low > 0


def test_an_unstable_load_has_no_finite_ttft() -> None:
    given = estimated(error("f", model=0.3), error("n", model=0.3))
    capacity = compare(given, "exact").prfaas_pd.lambda_max_rps
    found = plan_ranges(given, "exact", capacity, draws=32, narrow=False)
    assert found is not None and found.ttft_mean_s is not None
    assert np.isinf(found.ttft_mean_s.high) and np.isfinite(found.ttft_mean_s.low)


def test_merging_atoms_keeps_means_and_plans() -> None:
    given = case_study()
    coarse = replace(given, workload=merged(given.workload))
    assert len(coarse.workload.new) < 1100 < len(given.workload.new)
    assert coarse.workload.weight.sum() == pytest.approx(1)
    assert coarse.workload.mean_new_tokens == pytest.approx(given.workload.mean_new_tokens)
    for reading in ("paper", "exact"):
        exact, near = compare(given, reading), compare(coarse, reading)
        assert near.prfaas_pd.n_prefill == exact.prfaas_pd.n_prefill
        for pick in ("threshold_tokens", "lambda_max_rps"):
            assert getattr(near.prfaas_pd, pick) == pytest.approx(
                getattr(exact.prfaas_pd, pick), rel=0.01
            )
        assert near.prfaas_pd.ttft is not None and exact.prfaas_pd.ttft is not None
        assert near.prfaas_pd.ttft.mean_s == pytest.approx(exact.prfaas_pd.ttft.mean_s, rel=0.01)
        assert near.prfaas_pd.ttft.p90_s == pytest.approx(exact.prfaas_pd.ttft.p90_s, rel=0.01)
        for name, ratio in exact.ratios.items():
            assert near.ratios[name] == pytest.approx(ratio, rel=0.01)


def test_a_small_workload_is_not_merged() -> None:
    small = lognormal(3, 0.5, 8, 64, output_tokens=16)
    assert merged(small) is small
