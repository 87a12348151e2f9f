import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.planner.profile import (
    DecodeRate,
    DecodeStep,
    PrefillProfile,
    PrefillTime,
    decode_rate,
)

TABLE_5 = [(1024, 0.44), (8192, 0.72), (32_000, 1.84), (130_000, 7.40)]


def profile(points: list[tuple[int, float]], cached: int = 0) -> PrefillProfile:
    return PrefillProfile([PrefillTime(n, cached, s) for n, s in points], provenance="measured: x")


points = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3)),
    min_size=2,
    max_size=8,
    unique_by=lambda point: point[0],
).map(lambda p: list(zip(sorted(n for n, _ in p), sorted(s for _, s in p), strict=True)))


@given(points)
def test_passes_through_every_point_and_never_falls(points: list[tuple[int, float]]) -> None:
    curve = profile(points)
    for new, seconds in points:
        assert float(curve.seconds(new)) == pytest.approx(seconds, rel=1e-9)
    lengths = np.unique(np.geomspace(1, 4e6, 3000).round())
    times = curve.seconds(lengths)
    assert np.all(times > 0)
    assert np.all(np.diff(times) >= -1e-9 * times[1:])


@given(st.floats(0.01, 1), st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-9))
def test_a_quadratic_is_recovered_also_beyond_its_points(a: float, b: float, c: float) -> None:
    def true(n: float) -> float:
        return a + b * n + c * n * n

    curve = profile([(n, true(n)) for n in (1000, 8000, 30_000, 120_000)])
    for n in (100, 3000, 60_000, 500_000):
        assert float(curve.seconds(n)) == pytest.approx(true(n), rel=1e-6)


def test_what_one_more_token_costs() -> None:
    curve = profile([(n, 0.5 + 2e-5 * n + 3e-10 * n * n) for n in (1000, 8000, 30_000)])
    assert curve.marginal_s(1000, 0) == pytest.approx(2e-5 * 1000 + 3e-10 * 1e6, rel=1e-6)
    after_prefix = 2e-5 * 1000 + 3e-10 * (9000**2 - 8000**2)
    assert curve.marginal_s(1000, 8000) == pytest.approx(after_prefix, rel=1e-6)


def test_extrapolation_is_flagged() -> None:
    curve = profile(TABLE_5)
    new = np.array([1000, 1024, 50_000, 130_000, 130_001])
    assert curve.extrapolated(new).tolist() == [True, False, False, False, True]
    assert curve.extrapolated(2000, 10).tolist() is True


def test_a_cached_prefix_costs_its_attention() -> None:
    # c ((n + k)^2 - k^2) = c n^2 + 2 c n k
    curve = profile([(n, 0.5 + 1e-5 * n + 1e-9 * n * n) for n in (1000, 5000, 20_000)])
    extra = float(curve.seconds(3000, 10_000)) - float(curve.seconds(3000))
    assert extra == pytest.approx(2 * 1e-9 * 3000 * 10_000, rel=1e-6)


def test_measured_rows_of_cached_prefixes() -> None:
    rows = {0: (1.0, 2.0), 1000: (1.5, 3.0), 3000: (2.5, 5.0)}
    times = [
        PrefillTime(new, cached, seconds)
        for cached, row in rows.items()
        for new, seconds in zip((100, 200), row, strict=True)
    ]
    curve = PrefillProfile(times, provenance="measured: x")
    for time in times:
        at_point = float(curve.seconds(time.new_tokens, time.cached_tokens))
        assert at_point == pytest.approx(time.seconds)
    assert float(curve.seconds(200, 2000)) == pytest.approx(4.0)  # linear between rows
    assert float(curve.seconds(200, 4000)) == pytest.approx(6.0)  # and beyond, flagged
    assert curve.extrapolated(200, 3000).tolist() is False
    assert curve.extrapolated(200, 4000).tolist() is True


def test_a_dip_between_rows_is_noise() -> None:
    times = [
        PrefillTime(n, k, s)
        for n, k, s in [(100, 0, 1.0), (200, 0, 2.0), (100, 500, 0.9), (200, 500, 2.5)]
    ]
    curve = PrefillProfile(times, provenance="measured: x")
    assert float(curve.seconds(100, 500)) == 1.0


def test_the_same_time_everywhere() -> None:
    curve = profile([(10, 1.0), (1000, 1.0)])
    assert curve.seconds(np.array([1.0, 50, 10**6])).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([(100, 0, 1.0)], "one point; give at least two"),
        ([(100, 5, 1.0), (200, 5, 2.0)], "no points at cached = 0"),
        ([(100, 0, 2.0), (200, 0, 1.0)], "200 tokens take 1 s, less than 100 tokens"),
        ([(100, 0, 1.0), (100, 0, 2.0)], "new = 100 twice"),
        ([(1, 0, 1.0), (2, 0, 2.0), (1, 9, 1.0)], "cached = 9: only one point"),
    ],
)
def test_unusable_points(times: list[tuple[int, int, float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrefillProfile([PrefillTime(*t) for t in times], provenance="measured: x")


def test_equal_points_are_one_profile() -> None:
    assert profile(TABLE_5) == profile(list(reversed(TABLE_5)))
    assert len({profile(TABLE_5), profile(TABLE_5)}) == 1
    assert profile(TABLE_5) != profile(TABLE_5[:3])


def test_decode_takes_the_best_batch_the_slo_allows() -> None:
    steps = [DecodeStep(1, 0.010), DecodeStep(21, 0.020), DecodeStep(41, 0.060)]
    measured = tuple(steps)
    assert decode_rate(steps, 50) == DecodeRate(21, 0.020, measured)
    # 40 tokens/s allow 25 ms: 2.5 batches past 21 at 2 ms each, but 21 at 20 ms serves more.
    assert decode_rate(steps, 40) == DecodeRate(21, 0.020, measured)
    assert decode_rate(steps, 80) == DecodeRate(6, pytest.approx(0.0125), measured)
    only = DecodeStep(20, 0.025)
    assert decode_rate([only], 40) == DecodeRate(20, 0.025, (only,))
    with pytest.raises(InputError, match="no measured decode batch gives 200 tokens/s"):
        decode_rate(steps, 200)


def test_a_step_is_linear_between_measured_batches() -> None:
    rate = DecodeRate(21, 0.020, (DecodeStep(1, 0.010), DecodeStep(21, 0.020)))
    assert [rate.step_s(batch) for batch in (0, 1, 11, 21, 30)] == pytest.approx(
        [0.010, 0.010, 0.015, 0.020, 0.020]
    )
    assert DecodeRate(20, 0.025).step_s(3) == 0.025
