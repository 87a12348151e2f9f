"""The optimiser against exhaustive search that shares no code with it but the profile."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.planner.curves import Atoms, Reading, WorkCurves, cut_workload
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Problem
from prfaas.planner.workload import Workload
from tests.planner.builders import case_study, problem


def curves_of(subject: Problem, reading: Reading) -> WorkCurves:
    return WorkCurves(
        cut_workload(subject.workload), Atoms(subject.workload, subject.spec), reading
    )


def brute_force(subject: Problem, reading: Reading) -> dict[int, float]:
    """Largest Lambda_max of every split over every integer threshold, by plain loops."""
    work, local = subject.workload, subject.local
    atoms = list(zip(work.new.tolist(), work.weight.tolist(), strict=True))
    best: dict[int, float] = {}
    for threshold in range(int(work.new[-1]) + 1):
        long = [(n, w) for n, w in atoms if n > threshold]
        short = [(n, w) for n, w in atoms if n <= threshold]
        p = math.fsum(w for _, w in long)

        def mean(part: list[tuple[float, float]], share: float, profile_of: object) -> float:
            if reading == "paper":
                length = math.fsum(n * w for n, w in part) / share
                return float(profile_of(length))  # type: ignore[operator]
            return math.fsum(float(profile_of(n)) * w for n, w in part) / share  # type: ignore[operator]

        for n_prefill in range(local.pool.instances):
            if local.fixed_prefill is not None and n_prefill != local.fixed_prefill:
                continue
            n_decode = local.pool.instances - n_prefill
            hold = local.decode.t_decode_s * work.output_tokens
            limit = n_decode * local.decode.bs_max / hold
            if long:
                remote = subject.remotes[0]
                seconds = mean(long, p, remote.pool.profile.seconds)
                size = mean(long, p, lambda n: subject.spec.kv_bytes(1) - 1000 + 1000 * n)
                theta = min(remote.pool.instances / seconds, remote.path.bps / (8 * size))
                limit = min(limit, theta / p)
            if short:
                seconds = mean(short, 1 - p, local.pool.profile.seconds)
                limit = min(limit, n_prefill / seconds / (1 - p))
            best[n_prefill] = max(best.get(n_prefill, 0.0), limit)
    return best


def small_workload(lengths: list[int], weights: list[float]) -> Workload:
    order = np.argsort(lengths)
    weight = np.array(weights)[order] / sum(weights)
    new = np.array(lengths, dtype=float)[order]
    return Workload(new, np.zeros(len(new)), weight, output_tokens=50)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 150), st.floats(0.01, 1)),
        min_size=1,
        max_size=6,
        unique_by=lambda pair: pair[0],
    ),
    st.integers(1, 3),
    st.integers(1, 6),
    st.floats(1e5, 1e8),
    st.integers(1, 30),
    st.sampled_from(["paper", "exact"]),
)
def test_no_threshold_and_split_is_better(
    requests: list[tuple[int, float]],
    prfaas: int,
    pd: int,
    bps: float,
    bs_max: int,
    reading: Reading,
) -> None:
    work = small_workload([n for n, _ in requests], [w for _, w in requests])
    subject = problem(work, prfaas=prfaas, pd=pd, bps=bps, bs_max=bs_max)
    curves = curves_of(subject, reading)
    choice = optimise(subject, curves)
    ours = stage_rates(subject, curves, choice).lambda_max
    rates = brute_force(subject, reading)
    best, prefilling = max(rates.values()), [rate for n, rate in rates.items() if n]
    if prefilling and max(prefilling) >= 0.98 * best:
        best = max(prefilling)
        assert choice.n_prefill > 0
    assert ours == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("reading", ["paper", "exact"])
def test_the_case_study_against_every_split_and_threshold(reading: Reading) -> None:
    subject = case_study()
    curves = curves_of(subject, reading)
    choice = optimise(subject, curves)
    best = stage_rates(subject, curves, choice).lambda_max
    p = curves.cuts.p
    remote, local = subject.remotes[0], subject.local
    with np.errstate(divide="ignore"):
        far = 4 / curves.prefill_long_s(remote.pool.profile)
        far = np.minimum(far, remote.path.bps / 8 / curves.kv_bytes_long) / p
        near = 1 / curves.prefill_short_s(local.pool.profile) / (1 - p)
    for n_prefill in range(1, 8):
        decode = (8 - n_prefill) * 20 / (0.025 * 1024)
        sustained = np.minimum(np.minimum(far, n_prefill * near), decode)
        assert sustained.max() <= best * (1 + 1e-12)
    assert choice.n_prefill == 3


def test_a_local_prefill_instance_may_cost_two_percent() -> None:
    """Decode is the limit: of 60 instances one serves 1/60 of the rate, of 40 one serves 1/40."""
    always = small_workload([1000], [1])
    for pd, expected in ((60, 1), (40, 0), (1, 0)):
        subject = problem(always, prfaas=500, pd=pd, bps=1e12)
        assert optimise(subject, curves_of(subject, "exact")).n_prefill == expected
        fixed = problem(always, prfaas=500, pd=pd, bps=1e12, fixed_prefill=0)
        assert optimise(fixed, curves_of(fixed, "exact")).n_prefill == 0


def test_hundreds_of_instances() -> None:
    subject = problem(prfaas=300, pd=700, bps=1e11)
    curves = curves_of(subject, "paper")
    choice = optimise(subject, curves)
    best = stage_rates(subject, curves, choice).lambda_max
    for n_prefill in range(0, 700):
        others = problem(prfaas=300, pd=700, bps=1e11, fixed_prefill=n_prefill)
        one = stage_rates(others, curves, optimise(others, curves))
        assert one.lambda_max <= best * (1 + 1e-12)


def test_fixed_variables_stay_fixed() -> None:
    subject = problem(fixed_prefill=1, fixed_threshold=777)
    curves = curves_of(subject, "paper")
    choice = optimise(subject, curves)
    assert choice.n_prefill == 1
    assert curves.cuts.threshold[choice.row] == 777
    between = problem(small_workload([10, 500], [1, 1]), fixed_threshold=300)
    curves = curves_of(between, "paper")
    assert curves.cuts.threshold[optimise(between, curves).row] == 10  # cuts as 300 would


def test_without_a_remote_cluster_nothing_is_offloaded() -> None:
    subject = problem(prfaas=0)
    curves = curves_of(subject, "exact")
    assert curves.cuts.p[optimise(subject, curves).row] == 0


def test_several_prfaas_clusters_add_up() -> None:
    import dataclasses

    one = problem(prfaas=4)
    remote = one.remotes[0]
    half = dataclasses.replace(remote, pool=dataclasses.replace(remote.pool, instances=2))
    two = dataclasses.replace(one, remotes=(half, half))
    curves = curves_of(one, "paper")
    single, double = (stage_rates(s, curves, optimise(s, curves)) for s in (one, two))
    assert len(double.each_prfaas) == 2
    # Compute is equal; the second link can only help.
    assert double.lambda_max >= single.lambda_max
