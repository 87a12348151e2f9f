"""Requests to the proxy whose tokens are allowed one by one: the next one when the client has the
one before it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from tests.envoy.clients import Client, CutOff, Response
from tests.envoy.deployment import TENANT_KEY, Behind
from tests.envoy.numbered_prompts import numbered_prompt
from tests.gateway.backends import MODEL, tokens_of
from tests.waiting import HANG_S

NUMBERS = itertools.count(1)
_DONE = b"data: [DONE]"
SHORT, LONG = 96, 1200  # prompt tokens: the second one is prefilled in the other cluster


@dataclass(slots=True)
class Answer:
    number: int
    status: int = 0
    tokens: int = 0
    done: bool = False  # the stream has said that it is complete
    cut_off: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""  # of an error


def request_id(number: int) -> str:
    return f"behind-envoy-{number}"


def request_body(number: int, tokens: int, prompt_tokens: int = SHORT, *, stream: bool) -> bytes:
    fields = {
        "model": MODEL,
        "prompt": numbered_prompt(number, prompt_tokens),
        "max_tokens": tokens,
        "temperature": 0.0,
        "return_token_ids": True,
        "stream": stream,
    }
    return json.dumps(fields).encode()


def request_headers(number: int) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {TENANT_KEY}",
        "Content-Type": "application/json",
        "X-Request-Id": request_id(number),
    }


async def ask(
    client: Client,
    behind: Behind,
    number: int,
    *,
    tokens: int = 4,
    prompt_tokens: int = SHORT,
    leave_after: int | None = None,
    headers: Mapping[str, str] | None = None,
    allowed: int = 1,
    reached: asyncio.Event | None = None,
    go_on: asyncio.Event | None = None,
) -> Answer:
    """A stream. Each token that arrives allows the next one, so that a proxy which keeps one back
    stops the stream for ever. The client leaves after `leave_after` tokens. With `go_on` the client
    waits for it after the first token, which it reports by `reached`."""
    answer = Answer(number)
    body = request_body(number, tokens, prompt_tokens, stream=True)
    if allowed:
        behind.allow(number, allowed)
    try:
        async with (
            asyncio.timeout(HANG_S),
            client.post(body, {**request_headers(number), **(headers or {})}) as response,
        ):
            answer.status, answer.headers = response.status, response.headers
            if response.status != 200:
                answer.body = b"".join([chunk async for chunk in response.chunks()])
                return answer
            async for event in _events(response):
                if event.startswith(_DONE):
                    answer.done = True
                    continue
                for _ in tokens_of(event):
                    answer.tokens += 1
                    assert answer.tokens <= behind.allowed[number], "the engine was not held"
                    if answer.tokens == leave_after:
                        return answer
                    if answer.tokens == 1 and reached is not None:
                        reached.set()
                    if answer.tokens == 1 and go_on is not None:
                        await go_on.wait()
                    if answer.tokens < tokens:
                        behind.allow(number)
    except CutOff:
        answer.cut_off = True
    return answer


async def _events(response: Response) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in response.chunks():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            yield event + b"\n\n"
    assert not rest, rest
