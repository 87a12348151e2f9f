"""One completion of an OpenAI server, with the moment of every token.

Knows nothing of load or of what is served: a body goes out, a `TimedAnswer` comes back. Never
raises for what a server or the network does; the answer then says in few words what went wrong, so
that equal failures can be counted.

This client uses aiohttp, not `prfaas.http_client`: it sends load to any OpenAI server, over TLS as
well, and must not share code with the processes that it measures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from prfaas.clock import Clock
from prfaas.contracts.openai import Usage
from prfaas.errors import InputError

TIMEOUT_S = 600.0  # of one request, from its beginning to its last token
CONNECT_S = 10.0
GIVEN_UP = "timeout"


@dataclass(slots=True)
class TimedAnswer:
    """Moments are on the asker's clock."""

    asked_s: float
    moments_s: list[float] = field(default_factory=list)  # of each event that brought tokens
    token_ids: list[int] = field(default_factory=list)  # where the server gives them
    text: str = ""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    request_id: str = ""
    error: str | None = None
    on_tokens: Callable[[], None] | None = None

    @property
    def ttft_s(self) -> float:
        return self.moments_s[0] - self.asked_s


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


class Target:
    """A server and how to speak to it. Requests share its connections."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, clock: Clock, model: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._http = http
        self._clock = clock
        self._decoder = msgspec.json.Decoder(_Event)

    async def complete(
        self,
        body: bytes,
        within_s: float | None = None,
        request_id: str | None = None,
        *,
        limit: asyncio.Timeout | None = None,
        on_tokens: Callable[[], None] | None = None,
    ) -> TimedAnswer:
        """`body` is a whole JSON body; an answer that is no stream comes in one moment. After
        `within_s` it is given up; the answer has what came until then. A `limit` stands instead of
        `within_s` where the caller learns only later when to give up. `on_tokens` is called after
        every event that brought tokens."""
        answer = TimedAnswer(self._clock.now(), on_tokens=on_tokens)
        named = {} if request_id is None else {"X-Request-Id": request_id}
        try:
            async with (
                limit or asyncio.timeout(within_s),
                self._http.post(
                    f"{self.url}/v1/completions",
                    data=body,
                    headers={"Content-Type": "application/json", **named},
                ) as response,
            ):
                answer.request_id = response.headers.get("X-Request-Id", "")
                if response.status != 200:
                    code = _code(await response.read())
                    answer.error = f"HTTP {response.status} {code}".strip()
                elif response.content_type == "application/json":
                    payload = await response.read()
                    answer.error = self._event(payload, answer, self._clock.now())
                else:
                    answer.error = await self._read(response, answer)
        except TimeoutError:
            answer.error = GIVEN_UP
        except aiohttp.ClientConnectorError:
            answer.error = "cannot connect"
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"connection lost ({type(error).__name__})"
        answer.ended_s = self._clock.now()
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: TimedAnswer) -> str | None:
        pending = b""
        async for data in response.content.iter_any():
            now_s = self._clock.now()
            *events, pending = (pending + data).split(b"\n\n")
            for event in events:
                payload = event.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    return None if answer.moments_s else "no token"
                if not payload or not event.startswith(b"data:"):
                    continue  # a comment that keeps the connection alive
                failure = self._event(payload, answer, now_s)
                if failure is not None:
                    return failure
        return "stream cut short"

    def _event(self, payload: bytes, answer: TimedAnswer, now_s: float) -> str | None:
        try:
            event = self._decoder.decode(payload)
        except msgspec.MsgspecError:
            return "not an event of a completion"
        if event.error is not None:
            return f"stream failed {_code(payload)}".strip()
        for choice in event.choices:
            if choice.token_ids or choice.text:
                answer.moments_s.append(now_s)
                answer.token_ids += choice.token_ids or []
                answer.text += choice.text or ""
                if answer.on_tokens is not None:
                    answer.on_tokens()
        if event.usage is not None:
            answer.prompt_tokens = event.usage.prompt_tokens
            answer.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                answer.cached_tokens = event.usage.cached_tokens
        return None

    async def models(self) -> list[dict[str, Any]]:
        """Raises `InputError` where nothing answers: the first question to a server."""
        url = f"{self.url}/v1/models"
        try:
            async with self._http.get(url) as response:
                data = await response.read()
                if response.status != 200:
                    raise InputError(
                        f"HTTP {response.status} {_code(data)}".strip(),
                        where=url,
                        fix="is it an OpenAI server, and is --key right?",
                    )
                listed: list[dict[str, Any]] = msgspec.json.decode(data)["data"]
                return listed
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InputError(f"no answer: {error}", where=url, fix="is it running?") from None
        except (msgspec.MsgspecError, KeyError, TypeError):
            raise InputError(
                "no list of models", where=url, fix="is it an OpenAI server?"
            ) from None

    async def round_trip_s(self) -> float:
        """Of a request that computes nothing; whatever its status, it has been there and back."""
        began_s = self._clock.now()
        async with self._http.get(f"{self.url}/health") as response:
            await response.read()
        return self._clock.now() - began_s


@asynccontextmanager
async def connect(
    url: str,
    clock: Clock,
    *,
    key: str | None = None,
    model: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[Target]:
    """A target whose model is known: the one asked for, or the first that the server lists."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # Open loop: how many requests are under way is the server's doing, not a limit of ours.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S),
        headers=headers,
    ) as http:
        target = Target(http, url, clock, model)
        listed = [str(one["id"]) for one in await target.models()]
        if model is not None and model not in listed:
            raise InputError(
                f"{url} does not serve {model!r}", where="--model", fix=f"it has: {listed}"
            )
        target.model = model or listed[0]
        yield target


def _code(data: bytes) -> str:
    """The error's own code or type, where it has one in OpenAI's shape."""
    try:
        error = msgspec.json.decode(data)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return ""
