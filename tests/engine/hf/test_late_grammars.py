"""Sequences whose grammars are late with masks: they alone wait, and every token stays the same."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from prfaas.engine.api import EngineJob, Finished, JobFailed, Sampling, Token
from prfaas.engine.hf import HFEngine
from prfaas.engine.hf import engine as hf_engine
from prfaas.engine.runner import RunningJob
from prfaas.errors import EngineError
from tests.engine.hf import models
from tests.waiting import wait_until

NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class EveryToken:
    """A grammar that allows everything. Its matcher is ready when `draw` says so, after some looks
    in vain; with `gate`, only once that is open."""

    draw: random.Random = field(default_factory=random.Random)
    gate: threading.Event | None = None
    field: str = "grammar"

    def matcher(self, stop_token_ids: frozenset[int] = frozenset()) -> EveryToken:
        return self

    def is_ready(self, within_s: float) -> bool:
        if self.gate is not None:
            return self.gate.wait(within_s)
        return self.draw.random() < 0.4

    def allowed_bits(self) -> npt.NDArray[np.uint8] | None:
        return None

    def consume(self, token: int) -> None:
        """Nothing to follow."""


@pytest.mark.parametrize("seed", (0, *(pytest.param(n, marks=models.grid) for n in range(1, 5))))
@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "falcon-h1", "gemma3"))
def test_tokens_do_not_depend_on_who_was_late_when(arch: str, seed: int) -> None:
    """Rows trade places whenever a sequence is late, goes on, joins or leaves."""
    draw = random.Random(seed)
    engine = HFEngine(models.loaded(arch), chunk_tokens=64, max_running=5)
    try:
        running = []
        for number in range(10):
            prompt = models.prompt(arch, draw.randint(1, 150), seed=100 * seed + number)
            tokens = draw.randint(1, NEW_TOKENS)
            late = EveryToken(random.Random(f"{seed} {number}")) if number % 3 else None
            sampling = Sampling(max_tokens=tokens, ignore_eos=True, grammar=late)
            job = RunningJob(engine, EngineJob(f"{number}", prompt, sampling))
            running.append((prompt, tokens, job))
        for prompt, tokens, job in running:
            expected = models.reference(arch, prompt, NEW_TOKENS).tokens[:tokens]
            assert job.result().tokens == tuple(expected)
        wait_until(lambda: engine.stats().running == 0)
    finally:
        engine.close()


def test_others_do_not_wait_for_a_late_grammar() -> None:
    arch, gate = "falcon-h1", threading.Event()
    engine = HFEngine(models.loaded(arch), chunk_tokens=64)
    try:
        prompt, other = models.prompt(arch, 100), models.prompt(arch, 80)
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        waiting = Sampling(max_tokens=4, ignore_eos=True, grammar=EveryToken(gate=gate))
        late = RunningJob(engine, EngineJob("late", prompt, waiting))
        beside = RunningJob(engine, EngineJob("beside", other, sampling)).result()
        assert beside.tokens == tuple(models.reference(arch, other, NEW_TOKENS).tokens)
        assert engine.stats().running == 1  # the late one, with no token yet
        gate.set()
        assert late.result().tokens == tuple(models.reference(arch, prompt, NEW_TOKENS).tokens[:4])
    finally:
        engine.close()


@pytest.mark.parametrize("is_cancelled", (True, False), ids=("cancelled", "too late"))
def test_a_late_sequence_ends_alone(is_cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_engine, "MOST_LATE_S", 60.0 if is_cancelled else 0.0)
    arch = "falcon-h1"
    engine = HFEngine(models.loaded(arch), chunk_tokens=64)
    try:
        prompt, other = models.prompt(arch, 100), models.prompt(arch, 80)
        waiting = Sampling(max_tokens=4, grammar=EveryToken(gate=threading.Event()))
        late = RunningJob(engine, EngineJob("late", prompt, waiting))
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        beside = RunningJob(engine, EngineJob("beside", other, sampling))
        late.next_event()  # it is prefilled
        if is_cancelled:
            engine.cancel("late")
            end = late.next_event()
            assert isinstance(end, Finished) and end.reason == "cancelled"
        else:
            end = late.next_event()
            assert isinstance(end, JobFailed) and isinstance(end.error, EngineError)
        expected = models.reference(arch, other, NEW_TOKENS).tokens
        assert beside.result().tokens == tuple(expected)
        assert not isinstance(end, Token)
        wait_until(lambda: engine.stats().running == 0)
    finally:
        engine.close()
