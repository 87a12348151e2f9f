"""The decode engine's events to the client, as they come and no faster than it reads.

Only the usage is looked into: it is always asked for, and shown to clients that asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from prfaas.contracts.openai import Usage, UsageField
from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway.api.error_responses import error_event
from prfaas.gateway.request import Upstream

_DONE = b"data: [DONE]"
# How JSON writers put it. Within a string its quotes would be escaped, so text is never mistaken.
_NO_CHOICES = (b'"choices":[]', b'"choices": []')


class CutShort(NamedTuple):
    outcome: Literal["broken", "stalled"]
    reason: str


_USED = msgspec.json.Decoder(UsageField)


class _Stream(web.StreamResponse):
    _send_headers_immediately = False  # they go with the first event, which is there already


class _Stalled(Exception):
    """The client stopped reading."""


def usage_of(body: bytes) -> Usage | None:
    try:
        return _USED.decode(body).usage
    except msgspec.MsgspecError:  # another engine's idea of it; the client reads it, we do not
        return None


class ResponseStream:
    """One answer under way."""

    def __init__(self, request: web.Request, *, shows_usage: bool, stall_s: float) -> None:
        self._request = request
        self._shows_usage = shows_usage
        self._stall_s = stall_s
        self.usage: Usage | None = None
        self.cut_short: CutShort | None = None
        # The client may have the whole answer. Many clients close their connection at [DONE], which
        # cancels this request before its last steps.
        self.delivered = False

    async def stream(self, upstream: Upstream) -> web.StreamResponse:
        """A stream that has begun ends here, whatever happens to it: `cut_short` says so."""
        response = _Stream(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        await response.prepare(self._request)
        try:
            try:
                async for together in upstream.events():
                    # One write for what has come together: writes are what a relay costs.
                    shown = b"".join([e for e in together if not self._is_hidden(e)])
                    if together[-1].startswith(_DONE):
                        await self._write(response.write_eof(shown))
                        self.delivered = True
                    elif shown:
                        await self._write(response.write(shown))
            except StreamBroken as error:
                self.cut_short = CutShort("broken", str(error))
                lost = RequestError(502, "engine_lost", f"the answer broke off: {error}")
                await self._write(response.write(error_event(lost)))
        except _Stalled:
            self.cut_short = CutShort("stalled", "the client stopped reading")
            if self._request.transport is not None:
                self._request.transport.abort()  # what it has not read will never be read
            return response
        with suppress(ConnectionError):
            await response.write_eof()  # many clients leave at [DONE]: they have it all
        return response

    async def whole(self, upstream: Upstream) -> web.Response:
        body = b"".join([part async for parts in upstream.events() for part in parts])
        self.usage = usage_of(body)
        return web.Response(body=body, content_type="application/json")

    def _is_hidden(self, event: bytes) -> bool:
        if not any(mark in event for mark in _NO_CHOICES):
            return False
        usage = usage_of(event.removeprefix(b"data:"))
        if usage is None:
            return False
        self.usage = usage
        return not self._shows_usage

    async def _write(self, writing: Coroutine[Any, Any, None]) -> None:
        """Returns when the client's socket has room again; nothing more is read upstream before."""
        try:
            async with asyncio.timeout(self._stall_s):
                await writing
        except TimeoutError:
            raise _Stalled from None
