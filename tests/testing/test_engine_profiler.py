"""The profile of an emulated engine is the profile it follows."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from prfaas.clock import MonotonicClock
from prfaas.engine.emulated import EmulatedEngine, Scales
from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, Segment
from prfaas.measure.measured_profile import TIMED_STEPS, MeasuredProfile
from prfaas_lab.testing.engine_profiler import Profiler
from prfaas_lab.testing.engine_runs import ScratchSink
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


def test_first_runs_do_not_count(engine: EmulatedEngine) -> None:
    profiler = Profiler(
        engine, lengths=[64, 80], cached=[], batches=[2], rounds=3, clock=MonotonicClock()
    )
    kinds = [(type(task).__name__, task.warm_up) for task in profiler.tasks]
    one_round = ["PrefillTask", "PrefillTask", "DecodeTask"]
    assert kinds == [(name, True) for name in one_round] + [(n, False) for n in one_round] * 3


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


def test_scratch_memory_is_used_again() -> None:
    sink = ScratchSink(KVSpec((FullAttention("full0", (0,), 2),)), 10)
    for start in range(0, 12, 4):
        segment = Segment("full0", 0, start, start + 4)
        (view,) = sink.buffers(segment)
        assert view.nbytes == 8
        sink.ready(segment)
    assert sink.nbytes == 24
