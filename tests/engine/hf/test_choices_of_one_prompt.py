"""Jobs of one prompt object are computed once, and each of them ends as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from prfaas.engine.api import EngineJob, Finished, JobFailed, Prefilled, Sampling
from prfaas.engine.hf import HFEngine
from prfaas.errors import EngineError
from prfaas_lab.testing.engine_runs import RunningJob
from tests.engine.hf import models
from tests.waiting import PATIENCE_S, wait_until

ARCH = "kimi-linear"
NEW_TOKENS = 12


class Held:
    """An engine whose thread waits at the begin of a first job until `go`, so that the jobs that
    are submitted meanwhile are all in the queue."""

    def __init__(self, engine: HFEngine) -> None:
        self.engine = engine
        self.computed: list[int] = []  # prompt tokens of each computation that is begun
        self._gate = threading.Event()
        first = EngineJob("first", models.prompt(ARCH, 5), Sampling(max_tokens=0))
        self.first = RunningJob(engine, replace(first, on_begin=self._wait))
        wait_until(lambda: engine.stats().prefilling == 1)

    def _wait(self) -> None:
        assert self._gate.wait(PATIENCE_S)

    def submit(self, job: EngineJob) -> RunningJob:
        return RunningJob(self.engine, job)

    def go(self) -> None:
        self._gate.set()


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, running: int) -> Iterator[Held]:
    with closing(HFEngine(models.loaded(ARCH), chunk_tokens=64, max_running=running)) as engine:
        subject, compute = Held(engine), HFEngine._prefilled

        def prefilled(engine: HFEngine, sequence: object, logits: object) -> None:
            subject.computed.append(len(sequence.job.prompt))  # type: ignore[attr-defined]
            compute(engine, sequence, logits)  # type: ignore[arg-type]

        monkeypatch.setattr(HFEngine, "_prefilled", prefilled)
        try:
            yield subject
        finally:
            subject.go()


def sampled(seed: int, tokens: int = NEW_TOKENS) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=seed)


def test_each_choice_has_the_tokens_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = models.prompt(ARCH, 90)
    samplings = [Sampling(max_tokens=NEW_TOKENS, ignore_eos=True), *map(sampled, range(1, 7))]
    samplings += [sampled(7, 1), Sampling(max_tokens=0)]
    with held(monkeypatch, 4) as subject:
        jobs = [
            subject.submit(EngineJob(f"{number}", prompt, sampling))
            for number, sampling in enumerate(samplings)
        ]
        subject.go()
        outcomes = [job.result() for job in jobs]
        first = outcomes[0].tokens
        assert first == tuple(models.reference(ARCH, prompt, NEW_TOKENS).tokens)
        # Four find slots with the first one, and those that need none; three begin later.
        assert subject.computed[:2] == [5, 90] and len(subject.computed) < 2 + len(samplings) - 5
        for sampling, outcome in zip(samplings, outcomes, strict=True):
            alone = subject.submit(EngineJob("alone", list(prompt), sampling)).result()
            assert outcome.tokens == alone.tokens
            assert outcome.prefilled is not None and alone.prefilled is not None
            assert outcome.prefilled.computed_tokens == alone.prefilled.computed_tokens


def test_equal_prompts_of_different_requests_are_computed_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may have different salts."""
    with held(monkeypatch, 4) as subject:
        jobs = [
            subject.submit(EngineJob(f"{number}", models.prompt(ARCH, 90), sampled(1)))
            for number in range(2)
        ]
        subject.go()
        assert jobs[0].result().tokens == jobs[1].result().tokens
        assert subject.computed == [5, 90, 90]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_choice_that_is_cancelled_ends_alone(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    prompt = models.prompt(ARCH, 90)
    begins, gate = threading.Event(), threading.Event()

    def on_begin() -> None:
        begins.set()
        assert gate.wait(PATIENCE_S)

    with held(monkeypatch, 4) as subject:
        jobs = [EngineJob(f"{number}", prompt, sampled(number)) for number in range(3)]
        running = [subject.submit(replace(jobs[0], on_begin=on_begin))]
        running += [subject.submit(job) for job in jobs[1:]]
        subject.go()
        assert begins.wait(PATIENCE_S)
        assert subject.engine.stats().prefilling == 3 and not subject.engine.stats().waiting
        subject.engine.cancel(str(which))
        gate.set()
        outcomes = [job.result() for job in running]
        reasons = ["cancelled" if number == which else "length" for number in range(3)]
        assert [outcome.finished.reason for outcome in outcomes] == reasons
        for number, outcome in enumerate(outcomes):
            if number != which:
                alone = subject.submit(EngineJob("alone", list(prompt), sampled(number))).result()
                assert outcome.tokens == alone.tokens


def test_the_others_begin_again_where_the_first_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = models.prompt(ARCH, 90)

    def fail() -> None:
        raise EngineError("its state is lost")

    with held(monkeypatch, 4) as subject:
        jobs = [EngineJob(f"{number}", prompt, sampled(number)) for number in range(3)]
        failing = subject.submit(replace(jobs[0], on_begin=fail))
        others = [subject.submit(job) for job in jobs[1:]]
        subject.go()
        with pytest.raises(EngineError, match="is lost"):
            failing.result()
        assert [len(other.result().tokens) for other in others] == [NEW_TOKENS] * 2
        assert subject.computed == [5, 90]


def test_a_choice_that_may_choose_no_token_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = models.prompt(ARCH, 90)
    with held(monkeypatch, 4) as subject:
        none = replace(sampled(1), allowed_token_ids=(7,), bad_words_token_ids=((7,),))
        samplings = [sampled(0), none, sampled(2)]
        jobs = [
            subject.submit(EngineJob(f"{number}", prompt, sampling))
            for number, sampling in enumerate(samplings)
        ]
        subject.go()
        assert [len(jobs[number].result().tokens) for number in (0, 2)] == [NEW_TOKENS] * 2
        event = jobs[1].next_event()
        assert isinstance(event, Prefilled)
        event = jobs[1].next_event()
        assert isinstance(event, JobFailed) and not isinstance(event, Finished)


def test_an_engine_that_closes_ends_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = models.prompt(ARCH, 90)
    begins, gate = threading.Event(), threading.Event()

    def on_begin() -> None:
        begins.set()
        assert gate.wait(PATIENCE_S)

    with held(monkeypatch, 4) as subject:
        jobs = [EngineJob(f"{number}", prompt, sampled(number, 2_000)) for number in range(3)]
        running = [subject.submit(replace(jobs[0], on_begin=on_begin))]
        running += [subject.submit(job) for job in jobs[1:]]
        subject.go()
        assert begins.wait(PATIENCE_S)
        gate.set()
    assert {job.result().finished.reason for job in running} == {"cancelled"}
