import math

import numpy as np
import pytest

from prfaas.planner.queueing import Service, erlang_c, mean_wait_s, predict_wait
from tests.planner.builders import case_study
from tests.planner.queue_simulation import Array, simulate_waits

REQUESTS = 600_000


def stations() -> dict[str, tuple[int, Array, Array]]:
    """The prefill queues of the case study: servers, service times, their weights."""
    subject = case_study()
    work = subject.workload
    far, near = subject.remotes[0].pool.profile, subject.local.pool.profile
    long = work.new > 19_400
    return {
        "PrfaaS": (4, far.seconds(work.new[long]), work.weight[long]),
        "PD-P": (3, near.seconds(work.new[~long]), work.weight[~long]),
        "homogeneous": (9, near.seconds(work.new), work.weight),
        "naive": (4, far.seconds(work.new), work.weight),
    }


@pytest.mark.parametrize("name", ["PrfaaS", "PD-P", "homogeneous", "naive"])
def test_waits_at_80_per_cent_load_against_an_event_simulation(name: str) -> None:
    servers, seconds, weight = stations()[name]
    service = Service.of(seconds, weight)
    rate = 0.8 * servers / service.mean_s
    rng = np.random.default_rng(7)
    drawn = rng.choice(seconds, REQUESTS, p=weight / weight.sum())
    seen = simulate_waits(rate, servers, drawn, rng)
    wait = predict_wait(rate, servers, service)
    assert wait is not None
    assert mean_wait_s(rate, servers, service) == pytest.approx(seen.mean(), rel=0.05)
    assert wait.mean_s == pytest.approx(seen.mean(), rel=0.05)
    assert wait.p_wait == pytest.approx(np.mean(seen > 0), abs=0.02)
    for quantile in (0.9, 0.99):
        at = np.quantile(seen, quantile)
        assert float(wait.exceeds(np.array(at))) == pytest.approx(1 - quantile, rel=0.15)


def test_exact_special_cases() -> None:
    exponential = Service.from_cv2(2.0, 1.0)
    # M/M/1: rho / (1 - rho) service times. M/D/1: half of it.
    assert mean_wait_s(0.4, 1, exponential) == pytest.approx(0.8 / 0.2 * 2)
    assert mean_wait_s(0.4, 1, Service.from_cv2(2.0, 0.0)) == pytest.approx(0.8 / 0.2)
    # M/M/2 at rho = 0.5: Erlang C is 1/3.
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert mean_wait_s(0.5, 2, exponential) == pytest.approx((1 / 3) * 2 / (2 * 0.5))
    # M/G/1 beyond exponential spread: Pollaczek and Khinchine.
    wide = Service.from_cv2(1.0, 4.0)
    assert mean_wait_s(0.5, 1, wide) == pytest.approx(0.5 * wide.second_s2 / (2 * 0.5))


def test_no_steady_state() -> None:
    service = Service.from_cv2(1.0, 0.5)
    assert mean_wait_s(2.0, 2, service) == math.inf
    assert predict_wait(2.0, 2, service) is None
    assert predict_wait(1.999, 2, service) is not None


def test_idle_and_thousands_of_servers() -> None:
    service = Service.from_cv2(25.6, 0.0)
    idle = predict_wait(0.0, 3, service)
    assert idle is not None and idle.mean_s == 0
    assert idle.exceeds(np.array([0.0, 1.0])).tolist() == [0, 0]
    crowd = predict_wait(0.9 * 12_500 / 25.6, 12_500, service)
    assert crowd is not None and crowd.mean_s < 1e-6


def test_waits_grow_with_load() -> None:
    service = Service.from_cv2(1.0, 0.3)
    waits = [mean_wait_s(load * 4, 4, service) for load in np.linspace(0.05, 0.99, 40)]
    assert waits == sorted(waits)
