"""One connection to a peer: requests one after the other, and their answers as they come.

`httptools` reads HTTP; what is here waits, bounds what is held, and ends what does not come. A
request to a gateway makes four such exchanges: they are the larger part of what it costs
(bench/gateway.py). Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from prfaas.errors import ConnectionLost

_HELD_BYTES = 1 << 20  # of an answer that nobody takes; then its peer has to wait
_ONE_WRITE_BYTES = 1 << 16  # up to here copying is quicker than a second part of a write


class Connection(asyncio.Protocol):
    """`idle` is told when the next request may be sent, `closed` when none may any more."""

    def __init__(
        self,
        name: str,
        idle: Callable[[Connection], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self._name = name
        self._idle = idle
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._problem: ConnectionLost | None = None
        self._asked = False
        self._begin(None, None)

    def _begin(self, total_s: float | None, silence_s: float | None) -> None:
        self.status = 0  # until the head of the answer is there
        self.headers: dict[bytes, bytes] = {}  # names in small letters
        self._whole = False
        self._keeps = False
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._heard_s = self._loop.time()
        self._until_s = None if total_s is None else self._heard_s + total_s
        self._silence_s = silence_s

    # Asking ---------------------------------------------------------------------------------------

    def send(
        self, head: bytes, body: bytes, *, total_s: float | None, silence_s: float | None
    ) -> None:
        """Bounds are for the whole answer, and for the time without a byte of it."""
        self._stop_timer()
        self._begin(total_s, silence_s)
        self._asked = True
        self._watch()
        if len(body) <= _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def answered(self) -> None:
        """Returns when `status` and `headers` are there."""
        while not self.status:
            await self._wait()

    async def more(self) -> bytes | None:
        """What has come since the last time; None behind the end."""
        while not self._parts:
            if self._whole:
                return None
            await self._wait()
        taken = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        if self._paused and self._problem is None:
            self._paused = False
            self._transport.resume_reading()
        return taken

    async def rest(self) -> bytes:
        parts = []
        while (part := await self.more()) is not None:
            parts.append(part)
        return b"".join(parts)

    def done(self, idle_s: float) -> None:
        """Nobody wants more of this answer; what is left of it is not waited for. Idle for so long
        it is closed."""
        self._stop_timer()
        self._asked = False
        if self._whole and self._keeps and self._problem is None:
            self._timer = self._loop.call_later(idle_s, self.close, "idle")
            self._idle(self)
        else:
            self.close("given up")

    def close(self, reason: str) -> None:
        """Whoever waits is told."""
        self._stop_timer()
        if self._problem is None:
            self._problem = ConnectionLost(f"{self._name}: {reason}")
            self._transport.abort()
            self._closed(self)
        self._wake()

    # Waiting --------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        if self._problem is not None:
            raise self._problem
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _watch(self) -> None:
        """Looks again when a bound may have been reached: bytes that come set no timers."""
        bounds = [] if self._until_s is None else [self._until_s]
        if self._silence_s is not None:
            bounds.append(self._heard_s + self._silence_s)
        if not bounds:
            return
        if min(bounds) <= self._loop.time():
            self.close("no answer in time")
        else:
            self._timer = self._loop.call_at(min(bounds), self._watch)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # The transport's ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._asked or self._whole:
            self.close("speaks unasked")
            return
        self._heard_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"does not speak HTTP: {error}")
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.status and not framed:
            self._whole = True  # such an answer ends with its connection
        self.close(str(error) if error else "closed by the peer")

    # The parser's ---------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > _HELD_BYTES and not self._paused and self._problem is None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status < 200:  # "go on", "early hints": the answer is still to come
            self.status, self.headers = 0, {}
        else:
            self._whole = True
            self._keeps = self._parser.should_keep_alive()
