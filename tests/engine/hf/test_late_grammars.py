"""Sequences whose grammars are late with masks: they alone wait, and every token stays the same."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prfaas.engine.api import EngineJob, Finished, JobFailed, Sampling, Token
from prfaas.engine.hf import HFEngine, slots
from prfaas.engine.hf import engine as hf_engine
from prfaas.errors import EngineError
from prfaas_lab.testing.engine_runs import RunningJob
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


class Drawn(random.Random):
    """What a test says."""

    value = 0.0

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("seed", (0, *(pytest.param(n, marks=models.grid) for n in range(1, 5))))
@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "falcon-h1", "gemma3"))
def test_tokens_do_not_depend_on_who_was_late_when(arch: str, seed: int) -> None:
    """Rows trade places whenever a sequence is late, goes on, joins or leaves. Jobs of one prompt
    are computed together."""
    draw = random.Random(seed)
    engine = HFEngine(models.loaded(arch), chunk_tokens=64, max_running=5)
    try:
        running = []
        prompts = [
            models.prompt(arch, draw.randint(1, 150), seed=100 * seed + number)
            for number in range(6)
        ]
        for number in range(14):
            prompt = prompts[max(0, number - 8) if number % 2 else number // 3]
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


@dataclass(frozen=True, slots=True)
class AlwaysLate(EveryToken):
    """Its mask comes after the first look at every step."""

    waits: list[float] = field(default_factory=list)

    def matcher(self, stop_token_ids: frozenset[int] = frozenset()) -> AlwaysLate:
        return self

    def is_ready(self, within_s: float) -> bool:
        self.waits.append(within_s)
        return not len(self.waits) % 2


def test_steps_wait_for_a_grammar_that_is_late_once() -> None:
    arch, grammar = "falcon-h1", AlwaysLate()
    engine = HFEngine(models.loaded(arch), chunk_tokens=64)
    try:
        prompt, other = models.prompt(arch, 60), models.prompt(arch, 80)
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        beside = RunningJob(engine, EngineJob("beside", other, sampling))
        slow = Sampling(max_tokens=4, ignore_eos=True, grammar=grammar)
        late = RunningJob(engine, EngineJob("late", prompt, slow)).result()
        assert engine.stats().running == 1, "the other one has run all the time"
        assert late.tokens == tuple(models.reference(arch, prompt, NEW_TOKENS).tokens[:4])
        assert beside.result().tokens == tuple(models.reference(arch, other, NEW_TOKENS).tokens)
        assert [wait for wait in grammar.waits if wait] == [hf_engine.LATE_S]
        assert len(grammar.waits) == 8
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


def test_others_do_not_wait_for_the_late_mask_of_a_single_token() -> None:
    arch, gate = "falcon-h1", threading.Event()
    engine = HFEngine(models.loaded(arch), chunk_tokens=64, max_running=4)
    try:
        prompt, other = models.prompt(arch, 100), models.prompt(arch, 80)
        waiting = Sampling(max_tokens=1, ignore_eos=True, grammar=EveryToken(gate=gate))
        late = [
            RunningJob(engine, EngineJob(f"late {number}", prompt, waiting, tenant="one"))
            for number in range(4)
        ]
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        unlike = EngineJob("beside", other, sampling, tenant="other")
        beside = RunningJob(engine, unlike).result()
        assert beside.tokens == tuple(models.reference(arch, other, NEW_TOKENS).tokens)
        # They have rows, with no token yet, and leave one to other tenants.
        wait_until(lambda: engine.stats().running == 3)
        assert engine.stats().waiting == 1
        gate.set()
        for job in late:
            expected = models.reference(arch, prompt, NEW_TOKENS).tokens[:1]
            assert job.result().tokens == tuple(expected)
        wait_until(lambda: engine.stats().running == 0)
    finally:
        engine.close()


class FailingSwaps:
    """Rows that trade places in the first layer and not in the second one, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._swap = slots._swap_rows
        self._left = -1
        monkeypatch.setattr(slots, "_swap_rows", self.swap)

    def fail_next(self) -> None:
        self._left = 5

    @property
    def has_failed(self) -> bool:
        return self._left == 0

    def swap(self, tensor: torch.Tensor, one: int, other: int) -> None:
        if self._left > 0:
            self._left -= 1
            if not self._left:
                raise torch.OutOfMemoryError("CUDA out of memory")
        self._swap(tensor, one, other)


@pytest.mark.parametrize("when", ("it joins", "another is cancelled", "another is late"))
def test_no_answer_goes_on_with_rows_of_which_some_layers_traded_places(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, gate = "falcon-h1", threading.Event()
    failing = FailingSwaps(monkeypatch)
    engine = HFEngine(models.loaded(arch), chunk_tokens=64)
    try:
        prompt, other = models.prompt(arch, 100), models.prompt(arch, 80)
        endless = Sampling(max_tokens=1500, ignore_eos=True)

        def begun(name: str, sampling: Sampling) -> RunningJob:
            job = RunningJob(engine, EngineJob(name, other, sampling))
            job.next_event()  # it is prefilled
            return job

        jobs, drawn = [begun("one", endless), begun("two", endless)], Drawn()
        if when == "another is late":
            timely = Sampling(max_tokens=1500, ignore_eos=True, grammar=EveryToken(drawn))
            jobs += [begun("late", timely), begun("three", endless)]
            failing.fail_next()
            drawn.value = 1.0
        else:
            waiting = Sampling(max_tokens=4, ignore_eos=True, grammar=EveryToken(gate=gate))
            jobs += [begun("late", waiting)]
            wait_until(lambda: engine._late == 1)
            failing.fail_next()
            if when == "it joins":
                jobs += [begun("three", endless)]
            else:
                engine.cancel("one")
        for job in jobs:
            while isinstance(end := job.next_event(), Token):
                pass
            assert isinstance(end, JobFailed) and "too little memory" in str(end.error)
        assert failing.has_failed and engine.stats().running == 0
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        after = RunningJob(engine, EngineJob("after", prompt, sampling)).result()
        assert after.tokens == tuple(models.reference(arch, prompt, NEW_TOKENS).tokens)
    finally:
        engine.close()


def test_only_tokens_in_use_trade_places(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: list[int] = []
    swap = slots._swap_rows

    def noted(tensor: torch.Tensor, one: int, other: int) -> None:
        columns.append(tensor.shape[2])  # of keys or values
        swap(tensor, one, other)

    monkeypatch.setattr(slots, "_swap_rows", noted)
    arch, gate = "qwen3", threading.Event()
    engine = HFEngine(models.loaded(arch), chunk_tokens=64)
    try:
        prompt = models.prompt(arch, 100)
        waiting = Sampling(max_tokens=1500, grammar=EveryToken(gate=gate))
        RunningJob(engine, EngineJob("late", prompt, waiting))
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        RunningJob(engine, EngineJob("beside", models.prompt(arch, 80), sampling)).result()
        assert columns and max(columns) <= 100 + 4
    finally:
        engine.close()


def test_a_sequence_without_memory_for_its_row_leaves_the_rows_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers have grown then, and the next sequence lets the others grow."""
    arch, resized = "qwen3", slots.FullSlots.resize
    engine = HFEngine(models.loaded(arch), chunk_tokens=64)
    try:
        calls: list[int] = []

        def limited(layer: slots.FullSlots, rows: int, capacity: int) -> None:
            if rows == 2:
                calls.append(rows)
                if len(calls) == 2:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            resized(layer, rows, capacity)

        monkeypatch.setattr(slots.FullSlots, "resize", limited)
        prompt, other = models.prompt(arch, 100), models.prompt(arch, 80)
        long = Sampling(max_tokens=300, ignore_eos=True)
        first = RunningJob(engine, EngineJob("first", prompt, long))
        first.next_event()  # it is prefilled
        sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
        second = RunningJob(engine, EngineJob("second", other, sampling))
        with pytest.raises(EngineError, match="too little memory"):
            second.result()
        third = RunningJob(engine, EngineJob("third", other, sampling)).result()
        assert third.tokens == tuple(models.reference(arch, other, NEW_TOKENS).tokens)
        expected = models.reference(arch, prompt, NEW_TOKENS).tokens
        assert first.result().tokens[:NEW_TOKENS] == tuple(expected)
    finally:
        engine.close()
