"""Sends one completion request to an OpenAI server and records the time of every token.

`Target.complete` does not raise for failures of the server or the network. It puts a short error
text into the `TimedResponse` instead, so that equal failures can be counted.

This client uses aiohttp, not `prfaas.http_client`: it sends load to any OpenAI server, over TLS as
well, and must not share code with the processes that it measures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from prfaas.clock import Clock
from prfaas.contracts.openai import Usage
from prfaas.errors import InputError

TIMEOUT_S = 600.0  # from the beginning of a request to its last token
CONNECT_S = 10.0
TIMED_OUT = "timeout"
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class TimedResponse:
    """A response to one completion request. Times are on the client's clock."""

    sent_s: float
    event_times_s: list[float] = field(default_factory=list)  # when each event with tokens arrived
    token_ids: list[int] = field(default_factory=list)  # empty when the server does not send them
    text: str = ""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    request_id: str = ""
    error: str | None = None
    on_tokens: Callable[[], None] | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_times_s[0] - self.sent_s


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _CompletionEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


class Target:
    """An OpenAI server. All requests to it share a pool of connections."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, clock: Clock, model: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self._http = http
        self._clock = clock
        self._decoder = msgspec.json.Decoder(_CompletionEvent)

    async def complete(
        self,
        body: bytes,
        within_s: float | None = None,
        request_id: str | None = None,
        *,
        limit: asyncio.Timeout | None = None,
        on_tokens: Callable[[], None] | None = None,
    ) -> TimedResponse:
        """Sends `body`, a whole JSON body. A response that is not a stream counts as one event. The
        request times out after `within_s`; the response then has what arrived until then. `limit`
        replaces `within_s` for a caller that sets the timeout later. `on_tokens` is called after
        every event with tokens."""
        timed = TimedResponse(self._clock.now(), on_tokens=on_tokens)
        id_header = {} if request_id is None else {"X-Request-Id": request_id}
        try:
            async with (
                limit or asyncio.timeout(within_s),
                self._http.post(
                    f"{self.url}/v1/completions",
                    data=body,
                    headers={"Content-Type": "application/json", **id_header},
                ) as response,
            ):
                timed.request_id = response.headers.get("X-Request-Id", "")
                if response.status != 200:
                    code = _error_code(await response.read())
                    timed.error = f"HTTP {response.status} {code}".strip()
                elif response.content_type == "application/json":
                    payload = await response.read()
                    timed.error = self._event(payload, timed, self._clock.now())
                else:
                    timed.error = await self._read(response, timed)
        except TimeoutError:
            timed.error = TIMED_OUT
        except aiohttp.ClientConnectorError:
            timed.error = "cannot connect"
        except (aiohttp.ClientError, OSError) as error:
            timed.error = f"connection lost ({type(error).__name__})"
        timed.ended_s = self._clock.now()
        return timed

    async def _read(self, response: aiohttp.ClientResponse, timed: TimedResponse) -> str | None:
        pending = b""
        async for data in response.content.iter_any():
            now_s = self._clock.now()
            *events, pending = (pending + data).split(b"\n\n")
            for event in events:
                payload = event.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    return None if timed.event_times_s else "no token"
                if not payload or not event.startswith(b"data:"):
                    continue  # a keep-alive comment
                failure = self._event(payload, timed, now_s)
                if failure is not None:
                    return failure
        return "stream cut short"

    def _event(self, payload: bytes, timed: TimedResponse, now_s: float) -> str | None:
        try:
            event = self._decoder.decode(payload)
        except msgspec.MsgspecError:
            return "not a completion event"
        if event.error is not None:
            return f"stream failed {_error_code(payload)}".strip()
        for choice in event.choices:
            if choice.token_ids or choice.text:
                timed.event_times_s.append(now_s)
                timed.token_ids += choice.token_ids or []
                timed.text += choice.text or ""
                if timed.on_tokens is not None:
                    timed.on_tokens()
        if event.usage is not None:
            timed.prompt_tokens = event.usage.prompt_tokens
            timed.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                timed.cached_tokens = event.usage.cached_tokens
        return None

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server lists. Raises InputError when it does not answer."""
        url = f"{self.url}/v1/models"
        try:
            async with self._http.get(url) as response:
                data = await response.read()
                if response.status != 200:
                    raise InputError(
                        f"HTTP {response.status} {_error_code(data)}".strip(),
                        where=url,
                        fix="check that this is an OpenAI server and that --api-key is right",
                    )
                listed: list[dict[str, Any]] = msgspec.json.decode(data)["data"]
                return listed
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InputError(
                f"no response: {error}", where=url, fix="check that the server is running"
            ) from None
        except (msgspec.MsgspecError, KeyError, TypeError):
            raise InputError(
                "the response is not a list of models",
                where=url,
                fix="check that this is an OpenAI server",
            ) from None

    async def round_trip_s(self) -> float:
        """The round trip of a request that computes nothing. Its status does not matter."""
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
    headers: Mapping[str, str] = _NO_HEADERS,
) -> AsyncIterator[Target]:
    """Connects to a server. The target's model is `model`, or the first that the server lists.
    Every request has `headers`."""
    authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
    # Open loop: the client does not limit the number of concurrent requests.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S),
        headers={**headers, **authorization},
    ) as http:
        target = Target(http, url, clock, model)
        listed = [str(one["id"]) for one in await target.models()]
        if model is not None and model not in listed:
            raise InputError(
                f"{url} does not serve {model!r}", where="--model", fix=f"it serves: {listed}"
            )
        target.model = model or listed[0]
        yield target


def _error_code(data: bytes) -> str:
    """The code or type of an error in OpenAI's format; "" for any other body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return ""
