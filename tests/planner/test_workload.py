import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import lognorm

from prfaas.config.trace import parse_rows
from prfaas.errors import InputError
from prfaas.planner.workload import (
    Part,
    TraceRequest,
    empirical,
    lognormal,
    mixture,
    uncached_requests,
)


def test_the_papers_workload() -> None:
    work = lognormal(9.90, 1.00, 128, 131072, output_tokens=1024)
    above = work.new > 19_400
    p = work.weight[above].sum()
    assert work.weight.sum() == pytest.approx(1)
    assert work.mean_new_tokens == pytest.approx(27_486, abs=1)
    assert p == pytest.approx(0.4957, abs=5e-5)  # printed 49.6%
    long = work.new[above] @ work.weight[above] / p
    assert long == pytest.approx(45_046, abs=2)  # printed 44K: 44.0 x 1,024


@given(st.floats(2, 12), st.floats(0.05, 3), st.integers(1, 5000), st.integers(0, 200_000))
def test_truncated_lognormal_against_scipy(mu: float, sigma: float, low: int, span: int) -> None:
    high = low + span
    whole = lognorm(s=sigma, scale=np.exp(mu))
    mass = whole.cdf(high) - whole.cdf(low)
    if span and mass < 1e-6:
        return
    work = lognormal(mu, sigma, low, high, output_tokens=1)
    assert work.weight.sum() == pytest.approx(1)
    assert np.all(work.weight >= 0)
    assert np.all(np.diff(work.new) > 0)
    assert work.new[0] >= low and work.new[-1] <= high
    if span > 10:
        middle = low + span // 2
        expected = (whole.cdf(middle + 0.5) - whole.cdf(low)) / mass
        assert work.weight[work.new <= middle].sum() == pytest.approx(expected, abs=1e-6)


def test_long_ranges_share_atoms_but_keep_their_mean() -> None:
    fine = lognormal(10, 1, 100, 200_000, output_tokens=1)
    coarse = lognormal(10, 1, 100, 2_000_000, output_tokens=1)
    assert len(coarse.new) <= 262_144
    tail = lognorm(s=1, scale=np.exp(10))
    expected = tail.expect(lb=100, ub=2_000_000, conditional=True)
    assert coarse.mean_new_tokens == pytest.approx(expected, rel=1e-4)
    assert fine.mean_new_tokens < coarse.mean_new_tokens


def test_a_range_without_probability_is_refused() -> None:
    with pytest.raises(InputError, match="no probability between 1000 and 2000"):
        lognormal(-4, 0.1, 1000, 2000, output_tokens=1)


def test_a_mixture_weighs_its_parts() -> None:
    short = lognormal(5, 0.5, 10, 1000, output_tokens=1)
    long = lognormal(9, 0.5, 2000, 50_000, output_tokens=1, cached_tokens=700)
    mixed = mixture([Part(3, short), Part(1, long)], output_tokens=9)
    assert np.all(np.diff(mixed.new) >= 0)
    assert mixed.weight[mixed.new >= 2000].sum() == pytest.approx(0.25)
    assert set(mixed.cached[mixed.new >= 2000]) == {700}
    assert set(mixed.cached[mixed.new < 2000]) == {0}
    expected = 0.75 * short.mean_new_tokens + 0.25 * long.mean_new_tokens
    assert mixed.mean_new_tokens == pytest.approx(expected)


def row(length: int, blocks: list[int], output: int = 10) -> str:
    return json.dumps(
        {"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": blocks}
    )


def test_uncached_lengths_of_a_trace() -> None:
    lines = [
        row(1300, [1, 2, 3]),  # nothing known yet
        row(1200, [1, 2, 9]),  # two blocks known
        row(900, [1, 8]),  # one
        row(1024, [1, 2]),  # all known, but one token is always computed
        row(600, [7, 2]),  # block 2 is known, but only after block 1: a run starts at the start
        "",
    ]
    assert uncached_requests(parse_rows(lines, 512), 512) == [
        TraceRequest(1300, 0, 10),
        TraceRequest(176, 1024, 10),
        TraceRequest(388, 512, 10),
        TraceRequest(1, 1023, 10),
        TraceRequest(600, 0, 10),
    ]


def test_an_empirical_workload_is_the_trace() -> None:
    work = empirical([TraceRequest(500, 5, 10), TraceRequest(100, 7, 30)])
    assert work.new.tolist() == [100, 500]
    assert work.cached.tolist() == [7, 5]
    assert work.weight.tolist() == [0.5, 0.5]
    assert (work.output_tokens, work.output_cv2) == (20, 0.25)
    assert empirical([TraceRequest(1, 0, 5)], output_tokens=80).output_tokens == 80


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InputError, match="no request"):
        uncached_requests([], 512)
