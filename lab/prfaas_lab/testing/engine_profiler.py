"""Measures an engine through its contract: T_prefill(new, cached), S_kv(l), decode step by batch.

Torch-free. Works with any idle engine. T_prefill ends when the prompt's state is complete, without
an export; with a cached prefix it includes reading that state from host memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

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
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError, InputError
from prfaas.measure.measured_profile import (
    TIMED_STEPS,
    WARM_STEPS,
    DecodeTask,
    MeasuredProfile,
    Task,
    TimingSamples,
    check_points,
    step_together_s,
)
from prfaas.types import NotNow
from prfaas_lab.testing.engine_runs import ScratchSink, run

PATIENCE_S = 600.0  # for one job; the first run at a new shape may compile for minutes
PREFILL_ONLY = Sampling(max_tokens=0)


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
