"""Request bodies within limits: bytes of one body, bytes of all bodies, and time to arrive. Answers
that wait in memory count like bodies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from prfaas.errors import RequestError
from prfaas.gateway.api.content_encoding import (
    Encoding,
    TooManyBytes,
    decompress,
    encoding_of,
    too_large,
)
from prfaas.gateway.api.start_limiter import StartLimiter
from prfaas.gateway.client.answer_memory import counting

RETRY_S = 1.0
# Parsing a body of this size (some ten thousand token ids) takes about a millisecond. A longer body
# would stop every stream for its whole parse.
INLINE_BODY_BYTES = 1 << 16


def _uncounted(nbytes: int) -> None:
    """The body is of no tenant."""


class RequestBody:
    """A body as it arrives. A short one is kept in memory. A long one is written to an anonymous
    file, chunk by chunk: the gateway never joins it, and another process can read it."""

    def __init__(self, encoding: Encoding = "", inline_bytes: int = INLINE_BODY_BYTES) -> None:
        self.encoding = encoding  # of the file; `data` is not compressed
        self.data: bytes | None = None  # of a short body that has arrived
        self.nbytes = 0
        self._inline_bytes = inline_bytes
        self._chunks: list[bytes] = []
        self._file: int | None = None

    @property
    def is_long(self) -> bool:
        return self._file is not None

    def add(self, chunk: bytes) -> None:
        self.nbytes += len(chunk)
        if self._file is None:
            self._chunks.append(chunk)
            if self.nbytes > self._inline_bytes:
                self._move_to_file()
        else:
            _write(self._file, chunk)

    def end(self, count_read: Callable[[int], None] = _uncounted) -> None:
        """Call it when the whole body has arrived. Raises InputError when a short body is not in
        its encoding. `count_read` is called with the number of bytes that were decompressed here,
        if any."""
        if self._file is not None:
            return
        data = b"".join(self._chunks)
        if self.encoding:
            parts: list[int] = []
            try:
                data = decompress(data, self.encoding, self._inline_bytes, parts.append)
            except TooManyBytes:
                self._move_to_file()
                return
            finally:
                count_read(sum(parts))
        self._chunks = []
        self.encoding = ""
        self.data = data

    def take_file(self) -> int:
        """The descriptor of the file, which the caller has to close."""
        assert self._file is not None, "a short body has no file"
        file, self._file = self._file, None
        return file

    def close(self) -> None:
        self._chunks = []
        self.data = None
        if self._file is not None:
            os.close(self.take_file())

    def _move_to_file(self) -> None:
        try:
            self._file = os.memfd_create("prfaas-body", os.MFD_CLOEXEC)
        except OSError as error:
            raise _no_memory(error) from None
        for chunk in self._chunks:
            _write(self._file, chunk)
        self._chunks = []


class BodyReader:
    """Counts the bytes of a body until its request ends: a prompt in memory has about the size of
    the body that carried it."""

    def __init__(self, *, each_bytes: int, all_bytes: int, patience_s: float) -> None:
        self._each_bytes = each_bytes
        self._all_bytes = all_bytes
        self._patience_s = patience_s
        self._held_bytes = 0
        # Chunks of long bodies that are stored in one iteration of the event loop.
        self._chunk_limiter = StartLimiter()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @asynccontextmanager
    async def read(
        self,
        request: web.Request,
        count: Callable[[int], None] = _uncounted,
        count_read: Callable[[int], None] = _uncounted,
        *,
        inline_bytes: int = INLINE_BODY_BYTES,
    ) -> AsyncIterator[RequestBody]:
        """The whole body. A body of at most `inline_bytes` is in memory. `count` is called with the
        size of each chunk that arrives. It may refuse the request. For `count_read` see
        `RequestBody.end`."""
        if (request.content_length or 0) > self._each_bytes:
            raise too_large(self._each_bytes)  # before reading a byte of the body
        encoding = encoding_of(request.headers.get("Content-Encoding", ""))
        body = RequestBody(encoding, inline_bytes)
        try:
            try:
                async with asyncio.timeout(self._patience_s):
                    async for chunk in request.content.iter_any():
                        count(len(chunk))
                        self._held_bytes += len(chunk)
                        body.add(chunk)
                        self._check(body.nbytes)
                        if body.is_long:
                            await self._chunk_limiter.wait()
            except TimeoutError:
                raise RequestError(
                    408,
                    "request_timeout",
                    f"the request body did not arrive within {self._patience_s:g} s",
                ) from None
            body.end(count_read)
            yield body
        finally:
            self._held_bytes -= body.nbytes
            body.close()

    @contextmanager
    def hold(self, data: bytes) -> Iterator[RequestBody]:
        """A body that was made in this process. It counts like one that has arrived."""
        body = RequestBody(inline_bytes=len(data))
        self._held_bytes += len(data)
        body.add(data)
        try:
            self._check(body.nbytes)
            body.end()
            yield body
        finally:
            self._held_bytes -= body.nbytes
            body.close()

    @contextmanager
    def counting_answer(self) -> Iterator[None]:
        """Until the block ends, the request's answer counts like a body, as far as it is held in
        memory (`gateway/client/answer_memory.py`)."""
        held = 0

        def count(nbytes: int) -> None:
            nonlocal held
            held += nbytes
            self._held_bytes += nbytes
            if nbytes > 0:
                self._check(0)

        token = counting.set(count)
        try:
            yield
        finally:
            counting.reset(token)
            self._held_bytes -= held

    def replace(self, body: RequestBody, nbytes: int) -> None:
        """From now on the request holds `nbytes` in place of its body. Raises `RequestError` when
        that is too much."""
        body.close()
        self._held_bytes += nbytes - body.nbytes
        body.nbytes = nbytes
        self._check(0)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._each_bytes:
            raise too_large(self._each_bytes)
        if self._held_bytes > self._all_bytes:
            raise RequestError(
                503,
                "overloaded",
                f"the bodies and answers of the requests in flight exceed {self._all_bytes} bytes",
                retry_after_s=RETRY_S,
            )


def _write(file: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        while len(view):
            view = view[os.write(file, view) :]
    except OSError as error:
        raise _no_memory(error) from None


def _no_memory(error: OSError) -> RequestError:
    return RequestError(
        503,
        "overloaded",
        f"the gateway cannot hold the body: {error.strerror}",
        retry_after_s=RETRY_S,
    )
