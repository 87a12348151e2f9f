"""The profile of an emulated engine is the profile it follows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.clock import MonotonicClock
from prfaas.engine.emulated import EmulatedEngine, Scales
from prfaas.engine.profiling import (
    TIMED_STEPS,
    WARM_STEPS,
    MeasuredProfile,
    Profiler,
    levelled,
    step_together_s,
)
from prfaas.errors import EngineError, InputError
from prfaas.planner.profile import DecodeStep, PrefillTime
from tests.engine.emulated.builders import PROFILE, SPEC, emulated

TIME_SCALE, OUTPUT_SCALE = 0.005, 0.1


@pytest.fixture
def engine() -> Iterator[EmulatedEngine]:
    made = emulated(scales=Scales(time=TIME_SCALE, output=OUTPUT_SCALE))
    yield made
    made.close()


def measure(
    engine: EmulatedEngine,
    lengths: list[int],
    cached: list[int],
    batches: list[int],
    rounds: int = 1,
) -> MeasuredProfile:
    profiler = Profiler(
        engine,
        lengths=lengths,
        cached=cached,
        batches=batches,
        rounds=rounds,
        clock=MonotonicClock(),
    )
    for task in profiler.tasks:
        profiler.perform(task)
    return profiler.measured()


def test_it_finds_the_times_and_bytes_of_the_engine(engine: EmulatedEngine) -> None:
    started_s = time.monotonic()
    measured = measure(engine, [300, 100], [200], [8, 1])
    elapsed_s = time.monotonic() - started_s
    points = [(p.new_tokens, p.cached_tokens) for p in measured.prefill]
    assert points == [(100, 0), (300, 0), (100, 200), (300, 200)]
    for point in measured.prefill:
        # Never early; how late is the machine's affair.
        expected_s = float(PROFILE.seconds(point.new_tokens, point.cached_tokens)) * TIME_SCALE
        assert point.seconds >= expected_s * 0.999
    assert measured.kv_bytes == {100: SPEC.kv_bytes(100), 300: SPEC.kv_bytes(300)}
    assert [step.batch for step in measured.decode] == [1, 8]
    assert all(step.step_s > 0 for step in measured.decode)
    assert measured.context_tokens == 100
    # Nothing was measured that did not take place.
    least_s = sum(point.seconds for point in measured.prefill)
    least_s += sum(TIMED_STEPS * step.step_s for step in measured.decode)
    assert least_s < elapsed_s


def test_a_step_is_timed_while_all_sequences_run() -> None:
    """From the moments of the sequence that came last, without its first steps, until the first
    sequence has ended."""
    steps = WARM_STEPS + 4
    early = [0.5 * at for at in range(4 + steps)]  # one sequence only: half a second per token
    alone_until_s = early[3]
    late = [alone_until_s + 2.0 * at for at in range(1, steps + 3)]
    early[4:] = late[:steps]
    assert step_together_s([early, late]) == pytest.approx(2.0)
    with pytest.raises(EngineError, match="never ran together"):
        step_together_s([[0.0, 1.0], [5.0, 6.0]])


def test_first_runs_do_not_count(engine: EmulatedEngine) -> None:
    profiler = Profiler(
        engine, lengths=[64, 80], cached=[], batches=[2], rounds=3, clock=MonotonicClock()
    )
    kinds = [(type(task).__name__, task.warm_up) for task in profiler.tasks]
    one_round = ["PrefillTask", "PrefillTask", "DecodeTask"]
    assert kinds == [(name, True) for name in one_round] + [(n, False) for n in one_round] * 3


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12))
def test_levelled_times_rise_and_keep_their_sum(times: list[float]) -> None:
    rising = levelled(times)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(rising, rising[1:], strict=False))
    assert sum(rising) == pytest.approx(sum(times))
    if times == sorted(times):
        assert rising == times


def test_noise_is_levelled_and_owned_up_to() -> None:
    assert levelled([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert levelled([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    times = (PrefillTime(10, 0, 1.0), PrefillTime(20, 0, 1.0))
    measured = MeasuredProfile(times, {}, (DecodeStep(1, 0.5),), 10, rounds=3, levelled=0.25)
    record = measured.record(model="m", accelerator="a", engine="e", by="me, today")
    assert record.provenance == (
        "measured: me, today; median of 3; decode after 10 tokens; "
        "times levelled by up to 25.0% to rise with length"
    )
    assert [point.seconds for point in record.prefill] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("lengths", "cached", "batches", "message"),
    [
        ([], [], [1], "lengths: no length; give one or more"),
        ([64, 64], [], [1], "lengths: a value is repeated"),
        ([0, 64], [], [1], "lengths: 0 is too small; use 1 or more"),
        ([64, 4000], [200], [1], "lengths: 4200 tokens are more than the model's 4096"),
        ([64, 128], [], [9], "batches: 9 sequences at once are more than the engine's 8"),
        ([64, 128], [0], [1], "cached: 0 is too small; use 1 or more"),
    ],
)
def test_what_cannot_be_measured(
    engine: EmulatedEngine,
    lengths: list[int],
    cached: list[int],
    batches: list[int],
    message: str,
) -> None:
    with pytest.raises(InputError, match=message):
        measure(engine, lengths, cached, batches)
