"""Profiles a running OpenAI server over HTTP: T_prefill(new, cached) and decode steps.

It measures the time to the first token of prompts that are not cached, and the step time of streams
that run together. The profiler subtracts the median round trip of a request that computes nothing.
The server must be idle. Paper: 3.4.1.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Callable, Sequence

from prfaas.errors import EngineError, InputError
from prfaas.measure.client import Target, TimedResponse
from prfaas.measure.measured_profile import (
    TIMED_STEPS,
    WARM_STEPS,
    DecodeTask,
    MeasuredProfile,
    PrefillTask,
    TimingSamples,
    check_points,
    step_together_s,
)
from prfaas.measure.open_loop import RequestTemplate
from prfaas.measure.prompts import PromptGenerator, PromptPart

ROUND_TRIPS = 20
LENGTH_FACTORS = (1, 4, 16)  # longer responses, until the sequences overlap


class HttpProfiler:
    def __init__(
        self,
        target: Target,
        prompts: PromptGenerator,
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
        # A new salt: the server must not have cached anything for it.
        self._template = RequestTemplate(target.model, salt=secrets.token_hex(8))
        self._samples = TimingSamples(lengths, cached, batches, rounds)
        self._keys = 0

    async def measured(self, done: Callable[[int], None] = lambda count: None) -> MeasuredProfile:
        """Measures all tasks. Calls `done` with the number of finished tasks, of `len(self)`."""
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
        """The median round trip. The first one opens the connection and does not count."""
        times = [await self._target.round_trip_s() for _ in range(1 + ROUND_TRIPS)]
        return statistics.median(times[1:])

    async def _prefill(self, task: PrefillTask) -> None:
        cached = [PromptPart(b"cached", task.cached_tokens)] if task.cached_tokens else []
        if cached and task.warm_up:
            # One more token: a server caches the tokens before the last one it computes.
            await self._complete([*cached, PromptPart(b"more", 1)], 1)
        round_trip_s = await self.round_trip_s()
        response = await self._complete([*cached, PromptPart(self._key(), task.new_tokens)], 1)
        self._check_cached(response, task)
        self._samples.prefilled(task, max(1e-6, response.ttft_s - round_trip_s))

    def _check_cached(self, response: TimedResponse, task: PrefillTask) -> None:
        """If the server reports cached tokens, their number must be the requested one."""
        if response.cached_tokens in (None, task.cached_tokens):
            return
        raise InputError(
            f"the server had {response.cached_tokens} tokens cached, not {task.cached_tokens}",
            where="--cached",
            fix="give multiples of its block size, and enable prefix caching",
        )

    async def _decode(self, task: DecodeTask) -> None:
        """The prompts share all but their last token, so that all sequences start at once."""
        common = PromptPart(b"context", self._samples.context_tokens - 1)
        if task.warm_up:
            await self._complete([common, PromptPart(b"more", 1)], 1)
        for factor in LENGTH_FACTORS:
            steps = (task.batch + WARM_STEPS + TIMED_STEPS) * factor
            responses = await asyncio.gather(
                *(
                    self._complete([common, PromptPart(self._key(), 1)], steps)
                    for _ in range(task.batch)
                )
            )
            try:
                step_s = step_together_s([one.event_times_s for one in responses])
            except EngineError:
                continue  # the first sequence ended before the last one began
            self._samples.stepped(task, step_s)
            return
        raise InputError(
            f"{task.batch} sequences did not run at the same time",
            where="--batches",
            fix="leave that batch out: the server decodes faster than it accepts requests",
        )

    async def _complete(self, parts: Sequence[PromptPart], output_tokens: int) -> TimedResponse:
        body = self._template.body(self._prompts.text(parts), output_tokens)
        response = await self._target.complete(body)
        if response.error is not None:
            tokens = sum(part.tokens for part in parts)
            raise InputError(
                f"a prompt of {tokens} tokens failed: {response.error}",
                where=self._target.url,
                fix="check that the server is idle and accepts prompts of that length",
            )
        return response

    def _key(self) -> bytes:
        self._keys += 1
        return b"%d" % self._keys
