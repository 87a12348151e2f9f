"""Runs an engine before its node is ready, so that no request waits for a compiler. Torch-free.

A GPU compiles, tunes and loads kernels when they are first used, and which ones are used depends on
the length of a chunk, on whether a state precedes it, and on the number of sequences that decode
together. So for every length the engine prefills a prompt and exports its state, continues the
longest and the shortest (or every named one) with one token and with a few, and then decodes with
every number of sequences up to a limit.

    one token          must succeed: an engine that cannot serve it never becomes ready
    each length        longest first, because kernels are tuned by their first run
    decode together    1, 2, 3, ... sequences, as they join one by one

Works with any idle engine, through its contract. Nothing of it reaches a kvd.
"""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prfaas.clock import Clock
from prfaas.engine.api import (
    Engine,
    EngineJob,
    Event,
    Export,
    Finished,
    JobFailed,
    Resume,
    Sampling,
)
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError, InputError, PrfaasError
from prfaas.types import NotNow

_LOG = logging.getLogger(__name__)
WHERE = "node.warm_up"
MOST_LENGTHS = 64
JOB_S = 300.0  # for one job; a kernel with many variants may compile for a minute
DEFAULT_S = 120.0  # for lengths that the operator has not named
TAILS = (37, 1)  # tokens after a resumed state: a short chunk, and the step for a single token
TOGETHER = 8  # sequences; more of them may load a few kernels more
# Some attention kernels differ by the remainder of a length modulo 8.
STEPS = 9
FEW_TOKENS = 100  # the context of sequences that decode together


@dataclass(frozen=True, slots=True)
class WarmUpReport:
    lengths: tuple[int, ...]  # that were run, in this order
    skipped: tuple[int, ...]
    together: int  # the most sequences that decoded together
    seconds: float


def default_lengths(chunk_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Lengths for a GPU: parts of a chunk, because kernels are chosen by ranges of lengths; two
    chunks and a remainder, so that a whole chunk follows a state; lengths that are not multiples of
    16, for which compilers make other code; short prompts. Few, because a start waits for them: a
    GPU takes half a second for a chunk."""
    parts = (chunk_tokens // 4, chunk_tokens // 2)
    wanted = {2 * chunk_tokens + 17, chunk_tokens - 5, *parts, FEW_TOKENS, 16}
    return tuple(sorted(length for length in wanted if 1 <= length < max_tokens))


def check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    """InputError for lengths that the engine can never run."""
    if len(lengths) > MOST_LENGTHS:
        raise InputError(
            f"{len(lengths)} lengths are more than {MOST_LENGTHS}",
            where=WHERE,
            fix="name the lengths of a few typical prompts",
        )
    for length in lengths:
        if not 1 <= length <= max_tokens:
            raise InputError(
                f"a prompt of {length} tokens cannot be run: the model has {max_tokens}",
                where=WHERE,
                fix=f"use 1 to {max_tokens}",
            )


def warm_up(
    engine: Engine,
    lengths: Sequence[int],
    clock: Clock,
    *,
    named: bool = True,
    job_s: float = JOB_S,
    default_s: float = DEFAULT_S,
) -> WarmUpReport:
    """Returns when the engine has run every length.

    EngineError when it cannot serve one token, or a job does not end within `job_s`. A length that
    fails is an InputError where the operator has `named` it. Where it is a default, it is skipped
    with a warning, as are those left after `default_s`. An interruption ends the running job.
    """
    check_lengths(lengths, engine.limits.max_tokens)
    return _WarmUp(engine, clock, job_s).run(lengths, named=named, default_s=default_s)


class _WarmUp:
    def __init__(self, engine: Engine, clock: Clock, job_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._job_s = job_s
        self._limits = engine.limits
        self._random = random.Random(0)
        self._number = 0

    def run(self, lengths: Sequence[int], *, named: bool, default_s: float) -> WarmUpReport:
        started_s = self._clock.now()
        try:
            self._prefill(1)
        except PrfaasError as error:
            raise EngineError(f"the engine cannot serve a prompt of one token: {error}") from error
        done, skipped = [], []
        ordered = sorted(set(lengths), reverse=True)
        for length in ordered:
            late = not named and self._clock.now() - started_s > default_s
            # The kernels of a continued state depend on what follows it. A long and a short one
            # suffice where no length is named.
            resumed = named or length in (ordered[0], ordered[-1])
            if late or not self._ran(partial(self._at, length, resumed=resumed), length, named):
                skipped.append(length)
            else:
                done.append(length)
        together = 0
        if done:
            count = min(self._limits.max_running, self._limits.max_waiting, TOGETHER)
            context = min(FEW_TOKENS, *done)
            if count and self._ran(partial(self._decode, context, count), context, named):
                together = count
        if skipped:
            _LOG.warning(
                "start: the warm-up left out prompts of %s tokens; the first ones of these lengths "
                "may take longer",
                ", ".join(map(str, skipped)),
            )
        seconds = self._clock.now() - started_s
        return WarmUpReport(tuple(done), tuple(skipped), together, seconds)

    def _ran(self, work: Callable[[], None], length: int, named: bool) -> bool:
        try:
            work()
        except _TimedOut:
            raise
        except PrfaasError as error:
            problem = f"the warm-up with {length} tokens failed: {error}"
            if named:
                fix = "name shorter lengths, or use --warm-up none"
                raise InputError(problem, where=WHERE, fix=fix) from error
            _LOG.warning("start: %s", problem)
            return False
        return True

    def _at(self, length: int, *, resumed: bool) -> None:
        prompt, state = self._prefill(length)
        for tail in TAILS if resumed else ():
            if length + tail + 1 <= self._limits.max_tokens:
                longer = [*prompt, *self._tokens(tail)]
                # Attention to a long context has kernels of its own for single tokens.
                steps = 1 + STEPS if tail == TAILS[-1] else 1
                self._finish([self._job(longer, steps, resume=Resume(length, state))])

    def _prefill(self, length: int) -> tuple[list[int], MemorySegments]:
        prompt, state = self._tokens(length), MemorySegments(self._engine.spec)
        self._finish([self._job(prompt, 1, export=Export(state, length))])
        return prompt, state

    def _decode(self, context: int, count: int) -> None:
        """One sequence joins the batch per step, so that every size of a batch occurs."""
        prompt, state = self._prefill(context)
        steps = min(count + STEPS, self._limits.max_tokens - context - 1)
        if steps < 1:
            return
        resume = Resume(context, state)
        jobs = [self._job([*prompt, *self._tokens(1)], steps, resume=resume) for _ in range(count)]
        # Every second one draws its tokens, because that uses kernels of its own.
        drawn = Sampling(steps, temperature=1.0, top_p=0.9, seed=0, ignore_eos=True)
        jobs[1::2] = [replace(job, sampling=drawn) for job in jobs[1::2]]
        self._finish(jobs)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._limits.vocab_size), k=count)

    def _job(
        self,
        prompt: list[int],
        generated: int,
        *,
        resume: Resume | None = None,
        export: Export | None = None,
    ) -> EngineJob:
        self._number += 1
        room = self._limits.max_tokens - len(prompt)
        sampling = Sampling(max_tokens=min(generated, room), ignore_eos=True)
        return EngineJob(f"warm-up {self._number}", prompt, sampling, resume, export)

    def _finish(self, jobs: Sequence[EngineJob]) -> None:
        """Runs the jobs together. What ends the wait also ends the jobs."""
        until_s = self._clock.now() + self._job_s
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            for job in jobs:
                refused = self._engine.submit(job, events.put)
                if isinstance(refused, NotNow):
                    raise EngineError(f"the engine refused a job: {refused.reason}")
            left = len(jobs)
            while left:
                left -= self._ended(events, jobs[0], until_s)
        except BaseException:
            for job in jobs:
                self._engine.cancel(job.id)
            raise

    def _ended(self, events: queue.SimpleQueue[Event], job: EngineJob, until_s: float) -> bool:
        """Waits for the next event. Whether it ends a job; raises what a job has failed with."""
        try:
            event = events.get(timeout=max(0.0, until_s - self._clock.now()))
        except queue.Empty:
            raise _TimedOut(
                f"a prompt of {len(job.prompt)} tokens did not end within {self._job_s:g} s"
            ) from None
        if isinstance(event, JobFailed):
            raise event.error
        return isinstance(event, Finished)


class _TimedOut(EngineError):
    """A job did not end in its time, so the engine cannot serve others either."""
