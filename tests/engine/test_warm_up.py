"""A warm-up runs every length in every way, and a failure of it is not a ready node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.clock import MonotonicClock
from prfaas.engine.api import Emit, EngineJob, EngineLimits, Finished, JobFailed, Prefilled, Token
from prfaas.engine.emulated import EmulatedEngine, Scales
from prfaas.engine.warm_up import (
    MOST_LENGTHS,
    STEPS,
    TAILS,
    TOGETHER,
    WarmUpReport,
    default_lengths,
    warm_up,
)
from prfaas.errors import EngineError, InputError
from prfaas.kvspec import KVSpec
from prfaas.types import NotNow
from tests.engine.emulated.builders import SPEC, emulated

CLOCK = MonotonicClock()


@pytest.fixture
def engine() -> Iterator[EmulatedEngine]:
    made = emulated(scales=Scales(time=0.001))
    yield made
    made.close()


class Recording:
    """An engine that computes nothing: jobs end at once, fail at some lengths, or never end."""

    def __init__(
        self,
        *,
        fails: frozenset[int] = frozenset(),
        hangs: frozenset[int] = frozenset(),
        limits: EngineLimits | None = None,
    ) -> None:
        self.spec: KVSpec = SPEC
        self.limits = limits or EngineLimits(1000, 50, 16, 256)
        self.jobs: list[EngineJob] = []
        self.cancelled: list[str] = []
        self._fails, self._hangs = fails, hangs

    def submit(self, job: EngineJob, emit: Emit) -> NotNow | None:
        self.jobs.append(job)
        length = len(job.prompt)
        if length in self._hangs:
            return None
        if length in self._fails:
            emit(JobFailed(EngineError("the device has too little memory for this job")))
            return None
        emit(Prefilled(0, length, 0))
        for _ in range(job.sampling.max_tokens):
            emit(Token(1))
        emit(Finished("length"))
        return None

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def run(engine: object, lengths: list[int], **options: float) -> WarmUpReport:
    return warm_up(engine, lengths, CLOCK, **options)  # type: ignore[arg-type]


def test_every_length_is_exported_resumed_and_decoded() -> None:
    engine = Recording()
    report = run(engine, [20, 300, 20])
    exports = [len(job.prompt) for job in engine.jobs if job.export is not None]
    assert exports == [1, 300, 20, 20]  # one token first, then the longest; the last for decoding
    resumed = [
        (job.resume.tokens, len(job.prompt) - job.resume.tokens, job.sampling.max_tokens)
        for job in engine.jobs
        if job.resume is not None
    ]
    # The single token is followed by decode steps.
    tails = list(zip(TAILS, (1, 1 + STEPS), strict=True))
    assert resumed[:4] == [(length, *tail) for length in (300, 20) for tail in tails]
    together = resumed[4:]
    assert len(together) == TOGETHER and all(steps > TOGETHER for _, _, steps in together)
    assert {job.sampling.temperature for job in engine.jobs[-TOGETHER:]} == {0.0, 1.0}
    assert (report.lengths, report.skipped, report.together) == ((300, 20), (), TOGETHER)


def test_of_lengths_that_nobody_named_the_longest_and_the_shortest_are_resumed() -> None:
    engine = Recording()
    run(engine, [20, 100, 300], named=False)
    lengths = [job.resume.tokens for job in engine.jobs if job.resume is not None]
    assert set(lengths) == {300, 20}


def test_an_emulated_engine_is_warmed_up(engine: EmulatedEngine) -> None:
    report = run(engine, [100, 30])
    assert report.lengths == (100, 30)
    assert report.together == min(engine.limits.max_running, TOGETHER)
    assert engine.stats().waiting == engine.stats().running == 0


def test_an_engine_that_only_prefills() -> None:
    report = run(Recording(limits=EngineLimits(1000, 50, 0, 256)), [10])
    assert (report.lengths, report.together) == ((10,), 0)


def test_the_longest_prompt_leaves_no_room_for_more() -> None:
    engine = Recording(limits=EngineLimits(40, 50, 2, 256))
    run(engine, [40, 39])
    assert max(len(job.prompt) + job.sampling.max_tokens for job in engine.jobs) == 40


@pytest.mark.parametrize("lengths", [[0], [-3], [10, 1001]])
def test_lengths_that_the_model_cannot_have(lengths: list[int]) -> None:
    engine = Recording()
    with pytest.raises(InputError, match=r"node\.warm_up: .* use 1 to 1000"):
        run(engine, lengths)
    assert not engine.jobs


def test_too_many_lengths() -> None:
    with pytest.raises(InputError, match="more than 64"):
        run(Recording(), list(range(1, MOST_LENGTHS + 2)))


def test_a_named_length_without_memory_names_the_field() -> None:
    with pytest.raises(InputError) as caught:
        run(Recording(fails=frozenset({300})), [300, 20])
    message = str(caught.value)
    assert message.startswith("node.warm_up: the warm-up with 300 tokens failed")
    assert "too little memory" in message and "--warm-up none" in message


def test_a_default_length_without_memory_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    report = run(Recording(fails=frozenset({300})), [300, 20], named=False)
    assert (report.lengths, report.skipped) == ((20,), (300,))
    assert "left out prompts of 300 tokens" in caplog.text


def test_defaults_are_bounded_in_time() -> None:
    report = run(Recording(), [300, 20], named=False, default_s=0.0)
    assert (report.lengths, report.skipped, report.together) == ((), (300, 20), 0)


def test_an_engine_that_cannot_serve_one_token() -> None:
    with pytest.raises(EngineError, match="cannot serve a prompt of one token: the device has"):
        run(Recording(fails=frozenset({1})), [20], named=False)


@pytest.mark.parametrize("named", [True, False])
def test_a_job_that_does_not_end_is_an_error_and_is_cancelled(named: bool) -> None:
    engine = Recording(hangs=frozenset({20}))
    with pytest.raises(EngineError, match="20 tokens did not end within 0.05 s"):
        run(engine, [20], named=named, job_s=0.05)
    assert engine.cancelled == [engine.jobs[-1].id]


def test_an_interruption_ends_the_running_job() -> None:
    """As a signal's handler does it: with an exception in the waiting thread."""

    class Interrupted:
        def now(self) -> float:
            if len(engine.jobs) > 1:
                raise SystemExit
            return CLOCK.now()

    engine = Recording(hangs=frozenset({20}))
    with pytest.raises(SystemExit):
        warm_up(engine, [20], Interrupted())  # type: ignore[arg-type]
    assert engine.cancelled == [engine.jobs[-1].id]


def test_defaults_cover_ranges_remainders_and_resumed_chunks() -> None:
    lengths = default_lengths(8192, 131_072)
    assert max(lengths) == 2 * 8192 + 17
    # Every power of two of a chunk has a length, and some lengths are not multiples of 16.
    assert {2048, 4096, 8187} <= set(lengths)
    assert {length % 16 == 0 for length in lengths} == {True, False}
    assert default_lengths(8192, 100) == (16,)
    assert default_lengths(4, 3) == (1, 2)
