"""Open-loop load: requests leave when their time has come, however slow the answers are.

The arrivals are the simulator's, so that one stream of requests can be simulated and served. Each
body is made while the generator waits for its time: one body is held ahead, and of a request that
has ended only its figures are kept. What the generator itself was late by is part of the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from prfaas.clock import Clock
from prfaas.config.trace import TRACE_BLOCK_TOKENS
from prfaas.measure.client import Target, TimedResponse
from prfaas.measure.prompts import PromptGenerator, PromptPart
from prfaas.sim.arrivals import Arrivals

SHARED = b"shared"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request's figures; times in seconds, None where it never came to that."""

    at_s: float  # when it was due, from the beginning of the load
    late_s: float  # of the generator
    took_s: float
    ttft_s: float | None
    per_token_s: float | None  # between the first token and the last
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    error: str | None
    request_id: str = ""  # as the server named it


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What every request of a load has in common."""

    model: str
    salt: str = ""  # prompts of different salts share no cache
    output_scale: float = 1.0  # tokens asked for per token of the arrivals

    def body(self, prompt: bytes, output_tokens: int) -> bytes:
        rest = {
            "model": self.model,
            "max_tokens": max(1, round(output_tokens * self.output_scale)),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # a server without a tokenizer has nothing else to stream
        }
        if self.salt:
            rest["cache_salt"] = self.salt
        return b'{"prompt":[' + prompt + b"]," + msgspec.json.encode(rest)[1:]


def prompt_parts(
    arrivals: Arrivals, number: int, block_tokens: int = TRACE_BLOCK_TOKENS, seed: int = 0
) -> list[PromptPart]:
    """The prompt of one arrival. Whole blocks of a trace: equal hashes are equal tokens. Without a
    trace the cached part is common to all. The rest is the request's own."""
    if arrivals.hashes is None:
        cached = int(arrivals.cached_tokens[number])
        known = [PromptPart(SHARED, cached)] if cached else []
    else:
        known = [PromptPart(block, block_tokens) for block in arrivals.hashes[number]]
    rest = int(arrivals.prompt_tokens[number]) - sum(run.tokens for run in known)
    return [*known, PromptPart(b"%d:%d" % (seed, number), rest)] if rest else known


async def offer_load(
    target: Target,
    arrivals: Arrivals,
    ask: RequestTemplate,
    prompts: PromptGenerator,
    clock: Clock,
    *,
    seed: int = 0,
    give_up_s: float | None = None,
    first_tokens_s: float = 0.0,
    done: Callable[[int], None] = lambda count: None,
) -> list[RequestResult]:
    """Sends every arrival at its time; returns when the last one has ended, or `give_up_s` after
    the beginning: what is under way then is given up. Where requests have no first token by then,
    all go on until each of them has one, for at most `first_tokens_s`. `done` is told how many have
    ended. Cancelling it cancels what is under way."""
    outcomes: list[RequestResult] = []
    silent = _Silent(len(arrivals))
    limits: set[asyncio.Timeout] = set()
    given_up = asyncio.Event()
    began_s = clock.now()

    async def one(number: int, body: bytes, at_s: float) -> None:
        limit = asyncio.timeout(0 if given_up.is_set() else None)
        limits.add(limit)
        try:
            answer = await target.complete(
                body, limit=limit, on_tokens=lambda: silent.discard(number)
            )
        finally:
            limits.discard(limit)
        silent.discard(number)  # it may have ended without a token
        outcomes.append(_outcome(answer, began_s, at_s))
        done(len(outcomes))

    async def give_up(after_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + after_s - clock.now()))
        try:
            async with asyncio.timeout(first_tokens_s):
                await silent.over.wait()
        except TimeoutError:
            pass
        given_up.set()
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.TaskGroup() as under_way:
        giving_up = None if give_up_s is None else under_way.create_task(give_up(give_up_s))
        sent: list[asyncio.Task[None]] = []
        for number, at_s in enumerate(arrivals.at_s.tolist()):
            prompt = prompts.text(prompt_parts(arrivals, number, seed=seed))
            body = ask.body(prompt, int(arrivals.output_tokens[number]))
            await asyncio.sleep(max(0.0, began_s + at_s - clock.now()))
            sent.append(under_way.create_task(one(number, body, at_s)))
        await asyncio.gather(*sent)
        if giving_up is not None:
            giving_up.cancel()
    return outcomes


class _Silent:
    """Requests that have no token yet."""

    def __init__(self, count: int) -> None:
        self._numbers = set(range(count))
        self.over = asyncio.Event()

    def discard(self, number: int) -> None:
        self._numbers.discard(number)
        if not self._numbers:
            self.over.set()


def _outcome(answer: TimedResponse, began_s: float, at_s: float) -> RequestResult:
    moments = answer.moments_s
    output = answer.output_tokens or len(answer.token_ids) or len(moments)
    whole = answer.error is None
    return RequestResult(
        at_s=at_s,
        late_s=answer.asked_s - began_s - at_s,
        took_s=answer.ended_s - answer.asked_s,
        ttft_s=answer.ttft_s if moments else None,
        per_token_s=(moments[-1] - moments[0]) / (output - 1) if whole and output > 1 else None,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=output if moments else 0,
        error=answer.error,
        request_id=answer.request_id,
    )
