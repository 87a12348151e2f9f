import dataclasses

import numpy as np
import pytest

from prfaas.planner.curves import Atoms
from prfaas.planner.latency import paper_ttft, predict
from prfaas.planner.problem import LatencyGoal, Path, Problem
from prfaas.planner.workload import Workload, lognormal
from tests.planner.builders import FAST, SLOW, case_study, problem
from tests.planner.queue_simulation import simulate_waits


def two_lengths(**options: object) -> Problem:
    new = np.array([200.0, 2000.0])
    work = Workload(new, np.zeros(2), np.array([0.75, 0.25]), output_tokens=100)
    return problem(work, **options)  # type: ignore[arg-type]


def test_paper_is_service_plus_transfer() -> None:
    subject = two_lengths(bps=1e8)
    ttft = paper_ttft(subject, Atoms(subject.workload, subject.spec), 200, [1.0])
    local = float(SLOW.seconds(200))
    remote = float(FAST.seconds(2000)) + (2000 * 1000 + 50_000) * 8 / 1e8
    assert ttft.mean_s == pytest.approx(0.75 * local + 0.25 * remote)
    assert ttft.p50_s == pytest.approx(local)
    assert ttft.p90_s == pytest.approx(remote)


@pytest.mark.parametrize("bps", [1e8, 1e6])
def test_exact_without_load_is_the_sum_of_its_parts(bps: float) -> None:
    subject = two_lengths(bps=bps, fabric=Path(1e9, 0.0))
    atoms = Atoms(subject.workload, subject.spec)
    prediction = predict(subject, atoms, 200, 2, [1.0], 1e-9)
    assert prediction.ttft is not None and prediction.stable
    prefill = float(FAST.seconds(2000))
    # The link carries the growing part while the prefill runs, or not all of it; then the state.
    exposed = max(0.0, 2_000_000 * 8 / bps - prefill) + 50_000 * 8 / bps
    remote = prefill + exposed + 0.01 + 0.02
    local = float(SLOW.seconds(200)) + 50_000 * 8 / 1e9 + 0.02
    assert prediction.ttft.mean_s == pytest.approx(0.75 * local + 0.25 * remote, rel=1e-6)
    assert prediction.ttft.p90_s == pytest.approx(remote, rel=0.002)
    assert prediction.ttft.p50_s == pytest.approx(local, rel=0.01)


def test_a_shared_link_slows_transfers() -> None:
    subject = two_lengths(bps=1e7)
    atoms = Atoms(subject.workload, subject.spec)
    link = [s for s in predict(subject, atoms, 200, 3, [1.0], 1.0).stages if "link" in s.name][0]
    assert link.utilisation == pytest.approx(0.25 * (2_000_000 + 50_000) * 8 / 1e7)


def test_an_overloaded_stage_has_no_ttft_and_is_named() -> None:
    subject = two_lengths(bps=1e5)
    prediction = predict(subject, Atoms(subject.workload, subject.spec), 200, 2, [1.0], 1.0)
    assert not prediction.stable and prediction.ttft is None
    worst = max(prediction.stages, key=lambda stage: stage.utilisation)
    assert worst.name == "link far"


@pytest.mark.parametrize("load_rps", [1.5, 2.5])
def test_the_case_study_against_an_event_simulation(load_rps: float) -> None:
    """Both prefill queues simulated request by request; link and decode are far from full."""
    subject = case_study()
    work, rng = subject.workload, np.random.default_rng(3)
    atoms = Atoms(work, subject.spec)
    threshold = 19_400
    prediction = predict(subject, atoms, threshold, 3, [1.0], load_rps)
    assert prediction.ttft is not None
    remote, local = subject.remotes[0], subject.local
    assert local.fabric is not None
    samples, shares = [], []
    link = next(s for s in prediction.stages if s.name.startswith("link")).utilisation
    for long in (False, True):
        chosen = (work.new > threshold) == long
        share = work.weight[chosen].sum()
        lengths = rng.choice(work.new[chosen], 300_000, p=work.weight[chosen] / share)
        pool = remote.pool if long else local.pool
        service = pool.profile.seconds(lengths)
        waits = simulate_waits(load_rps * share, 4 if long else 3, service, rng)
        bps = remote.path.bps * (1 - link) if long else local.fabric.bps
        growing, closing = lengths * 17_280 * 8 / bps, 182_353_920 * 8 / bps
        exposed = np.maximum(growing - service, 0) + closing
        fixed = exposed + (remote.path.rtt_s if long else 0.0) + 0.025
        samples.append(waits + (service + fixed)[-len(waits) :])
        shares.append(share)
    both = np.concatenate(samples)
    weight = np.repeat(shares, [len(s) for s in samples])
    order = np.argsort(both)
    cumulative = np.cumsum(weight[order]) / weight.sum()
    assert prediction.ttft.mean_s == pytest.approx(np.average(both, weights=weight), rel=0.03)
    for ours, quantile in ((prediction.ttft.p50_s, 0.5), (prediction.ttft.p90_s, 0.9)):
        assert ours == pytest.approx(both[order][np.searchsorted(cumulative, quantile)], rel=0.03)
    assert prediction.ttft.p99_s == pytest.approx(
        both[order][np.searchsorted(cumulative, 0.99)], rel=0.06
    )


def test_decode_slots_are_waited_for_when_scarce() -> None:
    ample, scarce = two_lengths(bs_max=50), two_lengths(bs_max=1, t_decode_s=0.02)
    waits = []
    for subject in (ample, scarce):
        # Two decode instances of batch 1 hold a request for 2 s each: 0.9 rps is 90% of them.
        prediction = predict(subject, Atoms(subject.workload, subject.spec), 200, 2, [1.0], 0.9)
        assert prediction.ttft is not None
        waits.append(prediction.ttft.mean_s)
    assert waits[1] > waits[0] + 1


def test_a_goal_is_met_or_not() -> None:
    for ttft_s, met in ((50.0, True), (0.1, False)):
        subject = dataclasses.replace(two_lengths(), goal=LatencyGoal(ttft_s, 0.9))
        atoms = Atoms(subject.workload, subject.spec)
        assert predict(subject, atoms, 200, 2, [1.0], 0.5).meets_goal is met


def test_a_few_giants_do_not_coarsen_the_quantiles() -> None:
    quantiles = []
    for longest in (200_000, 16_000_000):
        work = lognormal(6.0, 1.0, 20, longest, output_tokens=100)
        subject = problem(work)
        prediction = predict(subject, Atoms(work, subject.spec), 400, 2, [1.0], 1e-6)
        assert prediction.ttft is not None
        quantiles.append([prediction.ttft.p50_s, prediction.ttft.p90_s, prediction.ttft.p99_s])
    assert quantiles[1] == pytest.approx(quantiles[0], rel=0.02)
