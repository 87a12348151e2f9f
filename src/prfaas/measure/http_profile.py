"""A profile of a running OpenAI server: T_prefill(new, cached) and decode steps, over HTTP.

What `engine.profiling` measures inside an engine, measured from outside: the time to the first
token of prompts that nobody has cached, and the pace of streams that run together. The median round
trip of a request that computes nothing is subtracted. The server must be idle. Paper: 3.4.1.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Callable, Sequence

from prfaas.engine.profiling import (
    TIMED_STEPS,
    WARM_STEPS,
    DecodeTask,
    MeasuredProfile,
    PrefillTask,
    TimingSamples,
    check_points,
    step_together_s,
)
from prfaas.errors import EngineError, InputError
from prfaas.measure.client import Target, TimedAnswer
from prfaas.measure.open_loop import Ask
from prfaas.measure.prompts import Prompts, Run

ROUND_TRIPS = 20
LONGER = (1, 4, 16)  # answers, until sequences are seen to run together


class HttpProfiler:
    def __init__(
        self,
        target: Target,
        prompts: Prompts,
        *,
        lengths: Sequence[int],
        cached: Sequence[int],
        batches: Sequence[int],
        rounds: int,
    ) -> None:
        check_points(lengths, cached, batches)
        assert target.model is not None
        self._target = target
        self._prompts = prompts
        # Nothing of an earlier run may be cached.
        self._ask = Ask(target.model, salt=secrets.token_hex(8))
        self._samples = TimingSamples(lengths, cached, batches, rounds)
        self._keys = 0

    async def measured(self, done: Callable[[int], None] = lambda count: None) -> MeasuredProfile:
        """`done` is told how many of `len(self)` tasks are."""
        for number, task in enumerate(self._samples.tasks, start=1):
            if isinstance(task, PrefillTask):
                await self._prefill(task)
            else:
                await self._decode(task)
            done(number)
        return self._samples.measured(kv_bytes={})

    def __len__(self) -> int:
        return len(self._samples.tasks)

    async def round_trip_s(self) -> float:
        """The first one opens the connection and does not count."""
        times = [await self._target.round_trip_s() for _ in range(1 + ROUND_TRIPS)]
        return statistics.median(times[1:])

    async def _prefill(self, task: PrefillTask) -> None:
        kept = [Run(b"cached", task.cached_tokens)] if task.cached_tokens else []
        if kept and task.warm_up:
            # One token more: a server keeps what lies before the last token it computes.
            await self._answer([*kept, Run(b"more", 1)], 1)
        round_trip_s = await self.round_trip_s()
        answer = await self._answer([*kept, Run(self._key(), task.new_tokens)], 1)
        self._check_cached(answer, task)
        self._samples.prefilled(task, max(1e-6, answer.ttft_s - round_trip_s))

    def _check_cached(self, answer: TimedAnswer, task: PrefillTask) -> None:
        """Where the server says what it had cached, that must be what was asked for."""
        if answer.cached_tokens in (None, task.cached_tokens):
            return
        raise InputError(
            f"the server had {answer.cached_tokens} tokens cached, not {task.cached_tokens}",
            where="--cached",
            fix="give multiples of its block size, and let it keep prefixes",
        )

    async def _decode(self, task: DecodeTask) -> None:
        """Prompts that share all but their last tokens, so that each begins almost at once."""
        common = Run(b"context", self._samples.context_tokens - 1)
        if task.warm_up:
            await self._answer([common, Run(b"more", 1)], 1)
        for longer in LONGER:
            steps = (task.batch + WARM_STEPS + TIMED_STEPS) * longer
            answers = await asyncio.gather(
                *(self._answer([common, Run(self._key(), 1)], steps) for _ in range(task.batch))
            )
            try:
                step_s = step_together_s([one.moments_s for one in answers])
            except EngineError:
                continue  # the first had ended when the last began
            self._samples.stepped(task, step_s)
            return
        raise InputError(
            f"{task.batch} sequences never ran together",
            where="--batches",
            fix="leave that batch out: the server decodes faster than it takes requests in",
        )

    async def _answer(self, runs: Sequence[Run], output_tokens: int) -> TimedAnswer:
        body = self._ask.body(self._prompts.text(runs), output_tokens)
        answer = await self._target.complete(body)
        if answer.error is not None:
            tokens = sum(run.tokens for run in runs)
            raise InputError(
                f"a prompt of {tokens} tokens: {answer.error}",
                where=self._target.url,
                fix="is it idle, and does it take prompts of that length?",
            )
        return answer

    def _key(self) -> bytes:
        self._keys += 1
        return b"%d" % self._keys
