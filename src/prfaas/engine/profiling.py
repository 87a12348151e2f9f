"""Measures an engine through its contract: T_prefill(new, cached), S_kv(l), decode step by batch.

Torch-free. Works with any idle engine. Each point runs once unmeasured (first runs compile and
allocate), then all points run in turn, round after round, so that drift of the machine affects all
points alike; the result is the median of the rounds. T_prefill ends when the prompt's state is
complete, without an export; with a cached prefix it includes reading that state from host memory.
Paper: the profile of section 3.4.1, Tables 3 and 5.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prfaas.catalog import DecodePoint, PrefillPoint, ProfileRecord
from prfaas.clock import Clock
from prfaas.engine.api import (
    Engine,
    EngineJob,
    Event,
    Export,
    Finished,
    JobFailed,
    Prefilled,
    Resume,
    Sampling,
    Token,
)
from prfaas.engine.memory import MemorySegments, ScratchSink
from prfaas.engine.runner import run
from prfaas.errors import EngineError, InputError
from prfaas.planner.profile import DecodeStep, PrefillTime
from prfaas.types import NotNow

PATIENCE_S = 600.0  # for one job; the first run at a new shape may compile for minutes
WARM_STEPS = 4
TIMED_STEPS = 24
PREFILL_ONLY = Sampling(max_tokens=0)


@dataclass(frozen=True, slots=True)
class PrefillTask:
    new_tokens: int
    cached_tokens: int
    warm_up: bool


@dataclass(frozen=True, slots=True)
class DecodeTask:
    batch: int
    warm_up: bool


Task: TypeAlias = PrefillTask | DecodeTask


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    prefill: tuple[PrefillTime, ...]
    kv_bytes: dict[int, int]  # S_kv as exported, by length; nothing cached
    decode: tuple[DecodeStep, ...]
    context_tokens: int  # at which decode steps were timed
    rounds: int
    levelled: float  # largest relative change made so that times rise with length; 0: none

    def record(
        self, *, model: str, accelerator: str, engine: str, by: str, gpus: int = 1
    ) -> ProfileRecord:
        """The catalog record. `by` names the tool, date and hardware of the measurement."""
        parts = [by, f"median of {self.rounds}"]
        if self.decode:
            parts.append(f"decode after {self.context_tokens} tokens")
        if self.levelled:
            parts.append(f"times levelled by up to {self.levelled:.1%} to rise with length")
        return ProfileRecord(
            model=model,
            accelerator=accelerator,
            gpus=gpus,
            engine=engine,
            status="measured",
            source="; ".join(parts),
            prefill=[PrefillPoint(p.new_tokens, p.cached_tokens, p.seconds) for p in self.prefill],
            decode=[DecodePoint(step.batch, step.step_s) for step in self.decode],
        )


class TimingSamples:
    """The points to measure, their order, and the times measured."""

    def __init__(
        self, lengths: Sequence[int], cached: Sequence[int], batches: Sequence[int], rounds: int
    ) -> None:
        self.points = [(new, kept) for kept in (0, *sorted(cached)) for new in sorted(lengths)]
        # The middle length: short prompts decode fastest, long ones may not fit.
        self.context_tokens = sorted(lengths)[(len(lengths) - 1) // 2]
        self._batches = sorted(batches)
        self._rounds = rounds
        self._prefill_s: dict[tuple[int, int], list[float]] = {point: [] for point in self.points}
        self._step_s: dict[int, list[float]] = {batch: [] for batch in self._batches}

    @property
    def tasks(self) -> list[Task]:
        made: list[Task] = []
        for number in range(self._rounds + 1):
            made += [PrefillTask(new, kept, warm_up=number == 0) for new, kept in self.points]
            made += [DecodeTask(batch, warm_up=number == 0) for batch in self._batches]
        return made

    def prefilled(self, task: PrefillTask, seconds: float) -> None:
        if not task.warm_up:
            self._prefill_s[task.new_tokens, task.cached_tokens].append(seconds)

    def stepped(self, task: DecodeTask, step_s: float) -> None:
        if not task.warm_up:
            self._step_s[task.batch].append(step_s)

    def measured(self, kv_bytes: dict[int, int]) -> MeasuredProfile:
        prefill: list[PrefillTime] = []
        changed = 0.0
        for kept in sorted({kept for _, kept in self.points}):
            row = [new for new, of in self.points if of == kept]
            medians = [statistics.median(self._prefill_s[new, kept]) for new in row]
            rising = levelled(medians)
            changed = max(changed, *(abs(a / b - 1) for a, b in zip(rising, medians, strict=True)))
            prefill += [PrefillTime(new, kept, s) for new, s in zip(row, rising, strict=True)]
        steps = [DecodeStep(b, statistics.median(self._step_s[b])) for b in self._batches]
        return MeasuredProfile(
            prefill=tuple(prefill),
            kv_bytes=kv_bytes,
            decode=tuple(steps),
            context_tokens=self.context_tokens,
            rounds=self._rounds,
            levelled=changed,
        )


class Profiler:
    """Call `perform` with each of `tasks` in order; `measured` then has the result."""

    def __init__(
        self,
        engine: Engine,
        *,
        lengths: Sequence[int],
        cached: Sequence[int],
        batches: Sequence[int],
        rounds: int,
        clock: Clock,
    ) -> None:
        _check(engine, lengths, cached, batches)
        self._engine = engine
        self._clock = clock
        self._samples = TimingSamples(lengths, cached, batches, rounds)
        longest = max(new + kept for new, kept in self._samples.points)
        self._prompt = random.Random(0).choices(range(engine.limits.vocab_size), k=longest)
        self._states: dict[int, MemorySegments] = {}
        self._kv_bytes: dict[int, int] = {}

    @property
    def tasks(self) -> list[Task]:
        return self._samples.tasks

    def perform(self, task: Task) -> None:
        if isinstance(task, DecodeTask):
            self._samples.stepped(task, self._time_steps(task.batch))
            return
        if task.warm_up and not task.cached_tokens:
            self._kv_bytes[task.new_tokens] = self._export_once(task.new_tokens)
        seconds = self._time_prefill(task.new_tokens, task.cached_tokens)
        self._samples.prefilled(task, seconds)

    def measured(self) -> MeasuredProfile:
        return self._samples.measured(dict(self._kv_bytes))

    # Single runs ----------------------------------------------------------------------------------

    def _time_prefill(self, new: int, cached: int) -> float:
        job = EngineJob(f"prefill {new} after {cached}", self._prompt[: new + cached], PREFILL_ONLY)
        if cached:
            job = EngineJob(job.id, job.prompt, job.sampling, Resume(cached, self._state(cached)))
        started_s = self._clock.now()
        timed = _Timed(self._engine, job, self._clock)
        timed.wait()
        return timed.at(Prefilled)[0] - started_s

    def _export_once(self, tokens: int) -> int:
        sink = ScratchSink(self._engine.spec, self._engine.spec.kv_bytes(tokens))
        export = Export(sink, tokens)
        job = EngineJob(f"export {tokens}", self._prompt[:tokens], PREFILL_ONLY, export=export)
        run(self._engine, job, PATIENCE_S)
        return sink.nbytes

    def _state(self, tokens: int) -> MemorySegments:
        if tokens not in self._states:
            state = MemorySegments(self._engine.spec)
            prompt = self._prompt[:tokens]
            job = EngineJob(f"state {tokens}", prompt, PREFILL_ONLY, export=Export(state, tokens))
            run(self._engine, job, PATIENCE_S)
            self._states[tokens] = state
        return self._states[tokens]

    def _time_steps(self, batch: int) -> float:
        """Runs sequences that share all but the last prompt token, so that each starts at once and
        generates other tokens."""
        common = self._prompt[: self._samples.context_tokens - 1]
        resume = Resume(len(common), self._state(len(common))) if common else None
        # The first sequence decodes once per later sequence before the last one begins.
        sampling = Sampling(batch + WARM_STEPS + TIMED_STEPS, ignore_eos=True)
        together = []
        for number in range(batch):
            prompt = [*common, number % self._engine.limits.vocab_size]
            job = EngineJob(f"decode {number} of {batch}", prompt, sampling, resume)
            together.append(_Timed(self._engine, job, self._clock))
        for one in together:
            one.wait()
        return step_together_s([one.at(Token) for one in together])


def step_together_s(moments_s: Sequence[Sequence[float]]) -> float:
    """The mean step time while all sequences run, from the times of their tokens: those of the
    sequence that started last, until the first sequence ended."""
    last = max(moments_s, key=lambda moments: moments[0])
    until_s = min(moments[-1] for moments in moments_s)
    times = [at_s for at_s in last if at_s <= until_s][WARM_STEPS:]
    if len(times) < 2:
        raise EngineError(f"{len(moments_s)} sequences never ran together")
    return (times[-1] - times[0]) / (len(times) - 1)


def levelled(times: Sequence[float]) -> list[float]:
    """The nearest non-decreasing times (least squares): where noise makes a longer prompt look
    faster, neighbours get their mean. A profile must rise, and means keep the total."""
    pools: list[list[float]] = []
    for time_s in times:
        pools.append([time_s])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [statistics.fmean(pool) for pool in pools for _ in pool]


class _Timed:
    """One job and the times of its events, taken on the engine's thread."""

    def __init__(self, engine: Engine, job: EngineJob, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        self._events: list[tuple[Event, float]] = []
        self._ended = threading.Event()
        refused = engine.submit(job, self._emit)
        if isinstance(refused, NotNow):
            raise EngineError(f"{job.id}: the engine refused the job: {refused.reason}")

    def _emit(self, event: Event) -> None:
        self._events.append((event, self._clock.now()))
        if isinstance(event, Finished | JobFailed):
            self._ended.set()

    def wait(self) -> None:
        if not self._ended.wait(PATIENCE_S):
            raise EngineError(f"{self._job.id}: did not end within {PATIENCE_S:g} s")
        last, _ = self._events[-1]
        if isinstance(last, JobFailed):
            raise last.error

    def at(self, kind: type[Event]) -> list[float]:
        return [at_s for event, at_s in self._events if isinstance(event, kind)]


def check_points(lengths: Sequence[int], cached: Sequence[int], batches: Sequence[int]) -> None:
    for where, values in (("lengths", lengths), ("cached", cached), ("batches", batches)):
        if len(set(values)) != len(values):
            raise InputError("a value is repeated", where=where, fix="name each value once")
        if min(values, default=1) < 1:
            raise InputError(f"{min(values)} is too small", where=where, fix="use 1 or more")
    if not lengths:
        raise InputError("no length", where="lengths", fix="give one or more")


def _check(
    engine: Engine, lengths: Sequence[int], cached: Sequence[int], batches: Sequence[int]
) -> None:
    check_points(lengths, cached, batches)
    longest = max(lengths) + max(cached, default=0)
    if longest > engine.limits.max_tokens:
        raise InputError(
            f"{longest} tokens are more than the model's {engine.limits.max_tokens}",
            where="lengths",
            fix="measure shorter prompts",
        )
    if max(batches, default=0) > engine.limits.max_running:
        raise InputError(
            f"{max(batches)} sequences at once are more than the engine's "
            f"{engine.limits.max_running}",
            where="batches",
            fix="measure smaller batches",
        )
