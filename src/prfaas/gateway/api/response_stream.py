"""The response to the client: the decode engine's events as they arrive, or the answer as a whole.
Neither is sent faster than the client reads.

Only the usage event is parsed: the gateway always requests it, and forwards it to clients that
requested it. The decode engine counts all tokens that a hand-off brought as cached. What the
prefill has not computed is known here only, so the gateway replaces that number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from prfaas.contracts.openai import Usage, UsageField
from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway.api.error_responses import error_event
from prfaas.gateway.request import Upstream

PIECE_BYTES = 1 << 18  # of a whole answer, which a client has to read within `stall_s`
_DONE = b"data: [DONE]"
# The two spellings of JSON encoders. Inside a string the quotes are escaped, so text never matches.
_NO_CHOICES = (b'"choices":[]', b'"choices": []')


class CutShort(NamedTuple):
    outcome: Literal["broken", "stalled"]
    reason: str


_USED = msgspec.json.Decoder(UsageField)


class _Stream(web.StreamResponse):
    _send_headers_immediately = False  # sent with the first bytes, which are there already


class _Stalled(Exception):
    """The client stopped reading."""


def usage_of(body: bytes) -> Usage | None:
    try:
        return _USED.decode(body).usage
    except msgspec.MsgspecError:  # another engine's format, which only the client reads
        return None


def with_cached_tokens(body: bytes, tokens: int) -> bytes:
    """The body of a response or an event, with this number of cached prompt tokens."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    usage = msgspec.json.decode(fields["usage"], type=dict[str, Any])
    details = usage.get("prompt_tokens_details") or {}
    usage["prompt_tokens_details"] = {**details, "cached_tokens": tokens}
    return msgspec.json.encode({**fields, "usage": msgspec.Raw(msgspec.json.encode(usage))})


class ResponseStream:
    """One response in progress. `cached_tokens` is called when the usage has arrived, and gives the
    prompt tokens that a hand-off's prefill has not computed; None: there was no hand-off.
    `first_event`: called when the first event of a stream is about to be written, so that no client
    can have it earlier."""

    def __init__(
        self,
        request: web.Request,
        *,
        shows_usage: bool,
        stall_s: float,
        cached_tokens: Callable[[], int | None] = lambda: None,
        first_event: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._shows_usage = shows_usage
        self._stall_s = stall_s
        self._cached_tokens = cached_tokens
        self._first_event = first_event
        self.usage: Usage | None = None
        self.cut_short: CutShort | None = None
        # The client may have the whole response. Many clients close their connection at [DONE],
        # which cancels this request before its last steps.
        self.delivered = False

    async def stream(self, upstream: Upstream) -> web.StreamResponse:
        """Sends the stream to its end. A stream that breaks or stalls ends here as well, with the
        reason in `cut_short`."""
        # nginx, and proxies that are made of it, buffer a response without the second header.
        response = _Stream(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        await response.prepare(self._request)
        begun = False
        try:
            try:
                async for batch in upstream.events():
                    # One write per batch: writes are the main cost of a stream.
                    shown = b"".join([self._shown(event) for event in batch])
                    if shown and not begun:
                        begun = True
                        self._first_event()
                    if batch[-1].startswith(_DONE):
                        await self._write(response.write_eof(shown))
                        self.delivered = True
                    elif shown:
                        await self._write(response.write(shown))
            except StreamBroken as error:
                self.cut_short = CutShort("broken", str(error))
                lost = RequestError(502, "engine_lost", f"the response broke off: {error}")
                await self._write(response.write(error_event(lost)))
        except _Stalled:
            self.cut_short = CutShort("stalled", "the client stopped reading")
            if self._request.transport is not None:
                self._request.transport.abort()  # the client will not read the rest
            return response
        with suppress(ConnectionError):
            await response.write_eof()  # many clients disconnect at [DONE]: they have all of it
        return response

    async def collect(self, upstream: Upstream) -> bytes:
        """The body of an answer that is sent as a whole."""
        body = b"".join([part async for parts in upstream.events() for part in parts])
        self.usage = usage_of(body)
        return body if self.usage is None else self._corrected(body, self.usage)

    async def whole(self, body: bytes) -> web.StreamResponse:
        """Sends the body to its end, or until the client stalls."""
        response, self.delivered = await send_json(self._request, body, self._stall_s)
        if not self.delivered:
            self.cut_short = CutShort("stalled", "the client stopped reading")
        return response

    def _shown(self, event: bytes) -> bytes:
        """The event as the client gets it; empty when the client gets none."""
        if not any(mark in event for mark in _NO_CHOICES):
            return event
        data = event.removeprefix(b"data:")
        usage = usage_of(data)
        if usage is None:
            return event
        self.usage = usage
        if not self._shows_usage:
            return b""
        corrected = self._corrected(data, usage)
        return event if corrected is data else b"data: " + corrected + b"\n\n"

    def _corrected(self, body: bytes, usage: Usage) -> bytes:
        cached = self._cached_tokens()
        return body if cached in (None, usage.cached_tokens) else with_cached_tokens(body, cached)

    async def _write(self, writing: Coroutine[Any, Any, None]) -> None:
        """Until it returns, no events are read from the engine."""
        await _write(writing, self._stall_s)


async def send_json(
    request: web.Request, body: bytes, stall_s: float
) -> tuple[web.StreamResponse, bool]:
    """Sends a whole body; false, and the connection is closed, when the client stops reading.
    aiohttp would send it after the request's handler has returned, when the request counts for no
    limit any more."""
    response = _Stream()
    response.content_type = "application/json"
    response.content_length = len(body)
    await response.prepare(request)
    last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    try:
        for start in range(0, last, PIECE_BYTES):
            await _write(response.write(body[start : start + PIECE_BYTES]), stall_s)
        await _write(response.write_eof(body[last:]), stall_s)
    except _Stalled:
        if request.transport is not None:
            request.transport.abort()  # the client will not read the rest
        return response, False
    return response, True


async def _write(writing: Coroutine[Any, Any, None], stall_s: float) -> None:
    """Returns when the client's socket has room again."""
    try:
        async with asyncio.timeout(stall_s):
            await writing
    except TimeoutError:
        raise _Stalled from None
