import numpy as np
import pytest

from prfaas.config.trace import TraceRow
from prfaas.errors import InputError
from prfaas.planner.workload import Workload, lognormal
from prfaas.sim.arrivals import poisson, replay

WORK = lognormal(6.5, 1.0, 20, 5000, output_tokens=100, cached_tokens=64)


def rows(*stamps_ms: float) -> list[TraceRow]:
    return [TraceRow(ms, 600, 10 + k, [k, 1000 + k]) for k, ms in enumerate(stamps_ms)]


def test_poisson_has_the_workloads_lengths_and_the_given_rate() -> None:
    many = poisson(WORK, 4.0, 40_000, seed=1)
    gaps = np.diff(many.at_s)
    assert gaps.mean() == pytest.approx(0.25, rel=0.02) and gaps.std() == pytest.approx(
        0.25, rel=0.02
    )
    new = many.prompt_tokens - many.cached_tokens
    assert new.mean() == pytest.approx(WORK.mean_new_tokens, rel=0.03)
    assert set(many.cached_tokens) == {64} and set(many.output_tokens) == {100}


def test_output_lengths_vary_as_in_the_workload() -> None:
    spread = Workload(WORK.new, WORK.cached, WORK.weight, output_tokens=100, output_cv2=0.5)
    output = poisson(spread, 1.0, 40_000, seed=1).output_tokens
    assert output.min() >= 1 and output.mean() == pytest.approx(100, rel=0.02)
    assert output.var() / output.mean() ** 2 == pytest.approx(0.5, rel=0.05)


def test_the_seed_decides_everything() -> None:
    for make in (
        lambda seed: poisson(WORK, 1.0, 50, seed),
        lambda seed: replay(rows(*range(0, 90_000, 3000)), seed),
    ):
        one, same, other = make(1), make(1), make(2)
        assert one.at_s.tolist() == same.at_s.tolist() and one.hashes == same.hashes
        assert one.at_s.tolist() != other.at_s.tolist()


def test_a_replay_spreads_each_tick_and_keeps_requests_whole() -> None:
    many = replay(rows(*[0.0] * 500, *[3000.0] * 500), seed=3)
    assert len(many) == 1000 and np.all(np.diff(many.at_s) >= 0)
    first = many.at_s[many.output_tokens < 510]
    assert 0 <= first.min() < 0.1 and 2.9 < first.max() <= 3.0
    assert many.hashes is not None
    for names, output in zip(many.hashes, many.output_tokens, strict=True):
        assert [int.from_bytes(name, "big") for name in names] == [output - 10], "whole blocks only"


def test_time_scales() -> None:
    slow = replay(rows(0, 3000, 6000), seed=1)
    fast = replay(rows(0, 3000, 6000), seed=1, speedup=2.0)
    assert fast.at_s.tolist() == pytest.approx((slow.at_s / 2).tolist())
    assert slow.scaled(2.0).at_s.tolist() == pytest.approx(fast.at_s.tolist())


@pytest.mark.parametrize(
    ("stamps", "what"), [((-1.0, 5.0), "negative"), ((0.0, 9.0, 4.0), "earlier")]
)
def test_invalid_times(stamps: tuple[float, ...], what: str) -> None:
    with pytest.raises(InputError, match=what):
        replay(rows(*stamps), seed=1)


def test_an_empty_trace() -> None:
    with pytest.raises(InputError, match="no request"):
        replay([], seed=1)
