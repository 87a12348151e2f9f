"""Open-loop load: each request is sent at its time, however slow the responses are.

The arrivals are the simulator's, so that one stream of requests can be simulated and served. The
generator builds each body while it waits for the request's time. It keeps one body ahead, and of a
finished request only its `RequestResult`. The result includes the generator's own lateness.
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

SHARED = b"shared"  # key of the prompt part that all arrivals share


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The measurements of one request. A time is None when the request did not get that far."""

    at_s: float  # when the request was due, from the beginning of the load
    late_s: float  # how late the generator sent it
    took_s: float
    ttft_s: float | None
    per_token_s: float | None  # between the first token and the last
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    error: str | None
    request_id: str = ""  # from the server's response


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The fields that all requests of a load share."""

    model: str
    salt: str = ""  # prompts with different salts do not share a cache
    output_scale: float = 1.0  # requested output tokens per output token of the arrivals

    def body(self, prompt: bytes, output_tokens: int) -> bytes:
        rest = {
            "model": self.model,
            "max_tokens": max(1, round(output_tokens * self.output_scale)),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # a server without a tokenizer streams only ids
        }
        if self.salt:
            rest["cache_salt"] = self.salt
        return b'{"prompt":[' + prompt + b"]," + msgspec.json.encode(rest)[1:]


def prompt_parts(
    arrivals: Arrivals, number: int, block_tokens: int = TRACE_BLOCK_TOKENS, seed: int = 0
) -> list[PromptPart]:
    """The prompt of one arrival. With a trace, blocks with equal hashes have equal tokens. Without
    a trace, the cached part is common to all arrivals. The remaining tokens are unique."""
    if arrivals.hashes is None:
        cached = int(arrivals.cached_tokens[number])
        shared = [PromptPart(SHARED, cached)] if cached else []
    else:
        shared = [PromptPart(block, block_tokens) for block in arrivals.hashes[number]]
    rest = int(arrivals.prompt_tokens[number]) - sum(part.tokens for part in shared)
    return [*shared, PromptPart(b"%d:%d" % (seed, number), rest)] if rest else shared


async def offer_load(
    target: Target,
    arrivals: Arrivals,
    template: RequestTemplate,
    prompts: PromptGenerator,
    clock: Clock,
    *,
    seed: int = 0,
    give_up_s: float | None = None,
    first_tokens_s: float = 0.0,
    done: Callable[[int], None] = lambda count: None,
) -> list[RequestResult]:
    """Sends every arrival at its time. Returns when the last request has ended, or `give_up_s`
    after the beginning, when unfinished requests time out. If some requests have no first token by
    then, all continue until each of them has one, for at most `first_tokens_s`. `done` is called
    with the number of ended requests. Cancelling this coroutine cancels the unfinished requests.
    """
    results: list[RequestResult] = []
    waiting = _WithoutTokens(len(arrivals))
    limits: set[asyncio.Timeout] = set()
    given_up = asyncio.Event()
    began_s = clock.now()

    async def send(number: int, body: bytes, at_s: float) -> None:
        limit = asyncio.timeout(0 if given_up.is_set() else None)
        limits.add(limit)
        try:
            response = await target.complete(
                body, limit=limit, on_tokens=lambda: waiting.discard(number)
            )
        finally:
            limits.discard(limit)
        waiting.discard(number)  # the request may have ended without a token
        results.append(_result(response, began_s, at_s))
        done(len(results))

    async def give_up(after_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + after_s - clock.now()))
        try:
            async with asyncio.timeout(first_tokens_s):
                await waiting.over.wait()
        except TimeoutError:
            pass
        given_up.set()
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.TaskGroup() as tasks:
        giving_up = None if give_up_s is None else tasks.create_task(give_up(give_up_s))
        sent: list[asyncio.Task[None]] = []
        for number, at_s in enumerate(arrivals.at_s.tolist()):
            prompt = prompts.text(prompt_parts(arrivals, number, seed=seed))
            body = template.body(prompt, int(arrivals.output_tokens[number]))
            await asyncio.sleep(max(0.0, began_s + at_s - clock.now()))
            sent.append(tasks.create_task(send(number, body, at_s)))
        await asyncio.gather(*sent)
        if giving_up is not None:
            giving_up.cancel()
    return results


class _WithoutTokens:
    """The requests that have no token yet; `over` is set when there are none."""

    def __init__(self, count: int) -> None:
        self._numbers = set(range(count))
        self.over = asyncio.Event()

    def discard(self, number: int) -> None:
        self._numbers.discard(number)
        if not self._numbers:
            self.over.set()


def _result(response: TimedResponse, began_s: float, at_s: float) -> RequestResult:
    times_s = response.event_times_s
    output = response.output_tokens or len(response.token_ids) or len(times_s)
    whole = response.error is None
    return RequestResult(
        at_s=at_s,
        late_s=response.sent_s - began_s - at_s,
        took_s=response.ended_s - response.sent_s,
        ttft_s=response.ttft_s if times_s else None,
        per_token_s=(times_s[-1] - times_s[0]) / (output - 1) if whole and output > 1 else None,
        prompt_tokens=response.prompt_tokens,
        cached_tokens=response.cached_tokens,
        output_tokens=output if times_s else 0,
        error=response.error,
        request_id=response.request_id,
    )
