"""Request bodies within limits: bytes of one body, bytes of all bodies, and time to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from prfaas.errors import RequestError

RETRY_S = 1.0


class BodyReader:
    """Counts the bytes of a body until its request ends: a prompt in memory has about the size of
    the body that carried it."""

    def __init__(self, *, each_bytes: int, all_bytes: int, patience_s: float) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._patience_s = patience_s
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @asynccontextmanager
    async def read(
        self, request: web.Request, count: Callable[[int], None] = lambda nbytes: None
    ) -> AsyncIterator[bytes]:
        """`count` is called with the size of each chunk that arrives. It may refuse the request."""
        if (request.content_length or 0) > self._each_bytes:
            raise self._too_large()  # before reading a byte of the body
        nbytes = 0
        chunks: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    async for chunk in request.content.iter_any():
                        count(len(chunk))
                        nbytes += len(chunk)
                        self._held_bytes += len(chunk)
                        self._check(nbytes)
                        chunks.append(chunk)
            except TimeoutError:
                raise RequestError(
                    408,
                    "request_timeout",
                    f"the request body did not arrive within {self._patience_s:g} s",
                ) from None
            body = b"".join(chunks)
            chunks.clear()
            yield body
        finally:
            self._held_bytes -= nbytes

    def _check(self, nbytes: int) -> None:
        if nbytes > self._each_bytes:
            raise self._too_large()
        if self._held_bytes > self._all_bytes:
            raise RequestError(
                503,
                "overloaded",
                f"the bodies of the requests in flight exceed {self._all_bytes} bytes",
                retry_after_s=RETRY_S,
            )

    def _too_large(self) -> RequestError:
        return RequestError(
            413, "body_too_large", f"the request body is larger than {self._each_bytes} bytes"
        )
