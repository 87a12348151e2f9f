"""Bodies off the wire, within bounds: of one, of all together, and of the time that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from prfaas.errors import RequestError

RETRY_S = 1.0


class BodyReader:
    """What requests weigh is counted until they are over: a prompt in memory is as large as the
    body that brought it, give or take a factor."""

    def __init__(self, *, each_bytes: int, all_bytes: int, patience_s: float) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._patience_s = patience_s
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        if (request.content_length or 0) > self._each_bytes:
            raise self._too_large()  # before a byte of it is read
        mine = 0
        chunks: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    async for chunk in request.content.iter_any():
                        mine += len(chunk)
                        self._held_bytes += len(chunk)
                        self._check(mine)
                        chunks.append(chunk)
            except TimeoutError:
                raise RequestError(
                    408, "request_timeout", f"the body was not here within {self._patience_s:g} s"
                ) from None
            body = b"".join(chunks)
            chunks.clear()
            yield body
        finally:
            self._held_bytes -= mine

    def _check(self, mine: int) -> None:
        if mine > self._each_bytes:
            raise self._too_large()
        if self._held_bytes > self._all_bytes:
            raise RequestError(
                503, "overloaded", "too many long requests at once", retry_after_s=RETRY_S
            )

    def _too_large(self) -> RequestError:
        return RequestError(413, "body_too_large", f"a body of more than {self._each_bytes} bytes")
