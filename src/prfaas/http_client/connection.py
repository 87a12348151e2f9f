"""One connection to a peer: it sends requests one after the other and reads their responses.

`httptools` parses HTTP. This module waits for bytes, bounds the bytes in memory, and closes the
connection at a timeout. The gateway makes four such exchanges per request, which are the larger
part of a request's CPU cost (bench/gateway.py). This module does not know which requests are made.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import cast

import httptools

from prfaas.errors import ConnectionLost, ResponseLate
from prfaas.http_client.paced_writer import PacedWriter, RequestBody

# Of a response that the caller has not read; then the peer has to wait. A gateway may have
# thousands of slow clients at a time.
HELD_BYTES = 256 << 10
READ_BYTES = 256 << 10  # at a time, as event loops read: so many more may be held
_HEADER_BYTES = 1 << 16  # of a response: its status line, headers and trailers
_ONE_WRITE_BYTES = 1 << 16  # up to this size, joining head and body is faster than two buffers
# A timer that is later than this shows that this process was stopped, not that the peer is slow.
PAUSED_S = 1.0
# uvloop runs timers before it reads. A timer that is due after this time comes after a read.
_READ_FIRST_S = 0.01


class _TimeLimits:
    """When a response is late: `total_s` bounds all of it, `silence_s` the time without a byte."""

    def __init__(self, total_s: float | None, silence_s: float | None, now_s: float) -> None:
        self._total_s = math.inf if total_s is None else total_s
        self._silence_s = math.inf if silence_s is None else silence_s
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        self._begun_s = self.received_s = now_s

    @property
    def due_s(self) -> float:
        return min(self._begun_s + self._total_s, self.received_s + self._silence_s)


class Connection(PacedWriter):
    """Calls `idle` when the next request may be sent, `closed` when it has been closed, and `heard`
    whenever bytes arrive."""

    def __init__(
        self,
        name: str,
        idle: Callable[[Connection], None],
        closed: Callable[[Connection], None],
        heard: Callable[[], None],
    ) -> None:
        super().__init__()
        self._name = name
        self._idle = idle
        self._closed = closed
        self._heard = heard
        self.idle_since_s = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it is due
        self._idle_until_s = math.inf
        self._problem: ConnectionLost | None = None
        self._pending = False
        self._begin(None, None)

    def _begin(self, total_s: float | None, silence_s: float | None) -> None:
        self.status = 0  # until the headers of the response have arrived
        self.headers: dict[bytes, bytes] = {}  # names in lower case
        self._complete = False
        self._keep_alive = False
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._header_bytes = 0  # as the parser has reported them
        self._unparsed_bytes = 0  # received since the latest byte of the body
        self._paused = False
        self._overdue = False  # the response is late, unless the next read has some of it
        self._limits = _TimeLimits(total_s, silence_s, self._loop.time())

    # Requests -------------------------------------------------------------------------------------

    def send(
        self, head: bytes, body: RequestBody, *, total_s: float | None, silence_s: float | None
    ) -> None:
        """The parts of the body must not change until the response has ended. `total_s` bounds the
        whole response, `silence_s` the time in which no byte arrives."""
        self._begin(total_s, silence_s)
        self._pending = True
        self._set_timer(self._limits.due_s)
        if isinstance(body, bytes) and len(body) <= _ONE_WRITE_BYTES:
            self._transport.write(head + body)
            return
        self._write_paced((head, body) if isinstance(body, bytes) else (head, *body))

    async def wait_for_headers(self) -> None:
        """Returns when `status` and `headers` have arrived."""
        while not self.status:
            await self._wait()

    async def read_some(self) -> bytes | None:
        """The bytes that arrived since the previous call; None at the end of the response."""
        while not self._parts:
            if self._complete:
                return None
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held_bytes = 0
        if self._paused and self._problem is None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read_rest(self, max_bytes: int) -> tuple[bytes, bool]:
        """The rest of the response, and whether that is all of it: reading stops once there are
        more than `max_bytes`."""
        parts, read = [], 0
        while (part := await self.read_some()) is not None:
            parts.append(part)
            read += len(part)
            if read > max_bytes:
                return b"".join(parts)[:max_bytes], False
        return b"".join(parts), True

    def release(self, idle_s: float) -> None:
        """Ends the exchange. A connection whose response was read completely can be used again and
        is closed after `idle_s` without a request; any other connection is closed now."""
        self._pending = False
        # A peer may respond before it has the whole request.
        reusable = self._complete and self._keep_alive and not self._unsent
        if reusable and self._problem is None:
            self._idle_until_s = self._loop.time() + idle_s
            self._set_timer(self._idle_until_s)
            self.idle_since_s = time.monotonic()
            self._idle(self)
        else:
            self.close("given up")

    def close(self, reason: str, problem: type[ConnectionLost] = ConnectionLost) -> None:
        """A caller that waits for bytes gets this problem with this reason."""
        self._stop_timer()
        if self._problem is None:
            self._problem = problem(f"{self._name}: {reason}")
            self._unsent.clear()
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

    def _set_timer(self, due_s: float) -> None:
        """Calls `_watch` at this time, or before: a timer that is due earlier stays, because most
        exchanges end long before their timeouts. Setting and stopping timers for each of them
        would take longer than parsing its response."""
        if self._timer is not None and self._timer_s <= due_s:
            return
        self._stop_timer()
        if due_s != math.inf:
            self._timer = self._loop.call_at(due_s, self._watch)
            self._timer_s = due_s

    def _watch(self) -> None:
        """Checks the timeouts, and sets a timer for the next check. Arriving bytes set no timer."""
        self._timer = None
        now_s = self._loop.time()
        due_s = self._limits.due_s if self._pending else self._idle_until_s
        if now_s < due_s:
            self._overdue = False
            self._set_timer(due_s)
        elif not self._pending:
            self.close("idle")
        elif self._overdue:
            self.close("no response in time", ResponseLate)
        elif now_s < due_s + PAUSED_S:
            self._overdue = True
            self._set_timer(now_s + _READ_FIRST_S)
        else:
            # The response may have arrived in the pause, and the request may not have been sent.
            self._limits.restart(now_s)
            self._set_timer(self._limits.due_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Callbacks of the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._pending or self._complete:
            self.close("peer sent data with no request pending")
            return
        self._limits.received_s = self._loop.time()
        self._heard()
        self._unparsed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"peer sent data that is not HTTP: {error}")
        if max(self._header_bytes, self._unparsed_bytes) > _HEADER_BYTES and not self._complete:
            self.close(f"peer sent more than {_HEADER_BYTES} bytes of headers")
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.status and not framed:
            self._complete = True  # such a response ends with its connection
        self.close(str(error) if error else "closed by the peer")

    # Callbacks of the parser ----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._unparsed_bytes = 0
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES and not self._paused and self._problem is None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue, 103 Early Hints: the response follows
            self.status, self.headers = 0, {}
        else:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()
