"""Bodies of requests within limits: bytes of one body, bytes of all bodies, time to arrive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from prfaas.errors import InputError, RequestError

TOO_LARGE, TIMED_OUT, OVERLOADED = "body_too_large", "request_timeout", "overloaded"
_RETRY_S = 1.0
# aiohttp raises these when a client leaves, or sends a body that cannot be decompressed.
# RuntimeError: the connection had been closed before the handler began.
_CLIENT_ERRORS = (web.RequestPayloadError, HttpProcessingError, ClientError, ConnectionError)
_UNREADABLE = (*_CLIENT_ERRORS, OSError, RuntimeError)
_SHOWN_CHARS = 100


class DamagedBody(InputError):
    """The body did not arrive as a whole, or cannot be decompressed. The response has to close the
    connection, because the next request cannot be found in it."""


class BodyLimits:
    """Reads the bodies of one service. Decompressed bytes count."""

    def __init__(self, *, each_bytes: int, all_bytes: int, within_s: float) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._within_s = within_s
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, which counts until the context ends. RequestError with status 408, 413 or 503
        when a limit is exceeded; DamagedBody when it cannot be read."""
        if (request.content_length or 0) > self._each_bytes:
            raise self._too_large()  # before a byte of it is read
        nbytes = 0
        chunks: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._within_s):
                    async for chunk in request.content.iter_any():
                        nbytes += len(chunk)
                        self._held_bytes += len(chunk)
                        self._check(nbytes)
                        chunks.append(chunk)
            except TimeoutError:
                raise RequestError(
                    408, TIMED_OUT, f"the body did not arrive within {self._within_s:g} s"
                ) from None
            except _UNREADABLE as error:
                raise DamagedBody(f"the body did not arrive: {_shown(error)}") from None
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
                OVERLOADED,
                f"the bodies that are being read exceed {self._all_bytes} bytes",
                retry_after_s=_RETRY_S,
            )

    def _too_large(self) -> RequestError:
        return RequestError(413, TOO_LARGE, f"the body has more than {self._each_bytes} bytes")


def log_malformed_requests_briefly() -> None:
    """From now on this process logs one line for a request that is malformed, or whose client has
    left. aiohttp logs these as errors of the server, with a traceback."""
    logging.getLogger("aiohttp.server").addFilter(_MALFORMED)


class _MalformedRequests(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _CLIENT_ERRORS):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "%s: %s", (record.getMessage(), _shown(error))
            record.exc_info = record.exc_text = None
        return True


_MALFORMED = _MalformedRequests()


def _shown(error: BaseException) -> str:
    """Text that a client may have written, for a message."""
    text = " ".join(str(error).split())
    return ascii(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
