"""Accepts the connections of a service's HTTP port within the bounds of `service.connections`.

aiohttp's own sites leave accepting to asyncio, which knows no bound, waits a minute for a TLS
handshake, and for the first request as long as for the next one. Here a connection is closed before
its handshake where it is one too many, and its first request has `first_request_s`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prfaas.service.connections import Connection, ConnectionTable, Reason
from prfaas.service.probes import PROBE_PATHS

_LOG = logging.getLogger(__name__)

# After which a peer that acknowledges nothing counts as gone. Longer than a gateway lets its nodes
# wait for a client that has stopped reading (`stall_s`, 150 s at most): to TCP the two look alike.
GONE_S: Final = 180.0
FIRST_REQUEST_S: Final = 20.0  # from the accept to the last header, with the handshake
_AT_ONCE: Final = 16  # connections that are accepted before other work of the loop
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S: Final = 0.1  # without descriptors
_QUIET_S: Final = 60.0  # between two warnings


class Connections:
    """The connections of one service: give it the application before it starts, then a
    `BoundedSite`."""

    def __init__(
        self,
        service: str,
        table: ConnectionTable,
        *,
        first_request_s: float = FIRST_REQUEST_S,
        gone_s: float = GONE_S,
    ) -> None:
        self.table = table
        self.first_request_s = first_request_s
        self.gone_s = gone_s
        self._service = service
        self._quiet_until_s = 0.0

    def watch(self, app: web.Application) -> None:
        """Follows the requests of the application, which must not have started."""
        app.middlewares.insert(0, self._follow)

    def warn(self, warning: str) -> None:
        now = asyncio.get_running_loop().time()
        if warning and now >= self._quiet_until_s:
            self._quiet_until_s = now + _QUIET_S
            closed = sum(self.table.closed.values())
            _LOG.warning("%s; %d were closed since the start", warning, closed)

    def metrics(self) -> Iterator[Metric]:
        name, table = f"prfaas_{self._service}", self.table
        yield GaugeMetricFamily(
            f"{name}_connections", "Open connections of the HTTP port.", value=len(table)
        )
        yield GaugeMetricFamily(
            f"{name}_connections_limit",
            "The most connections that the HTTP port may have.",
            value=table.bounds.total,
        )
        closed = CounterMetricFamily(
            f"{name}_closed_connections",
            "Connections that were closed because their address or the service had too many, their "
            "first request was late, or the process had no descriptor left.",
            labels=["reason"],
        )
        for reason in Reason:
            closed.add_metric([reason.value], table.closed[reason])
        yield closed

    @web.middleware
    async def _follow(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol = None if request.transport is None else request.transport.get_protocol()
        if not isinstance(protocol, _Followed):
            return await handler(request)
        known = False
        self.table.begin(protocol.connection)
        try:
            response = await handler(request)
            has_key = "Authorization" in request.headers and request.path not in PROBE_PATHS
            known = has_key and response.status < 400
            await self._send(request, response)
            return response
        finally:
            self.table.end(protocol.connection, known=known)

    async def _send(self, request: web.Request, response: web.StreamResponse) -> None:
        """Sends what the handler has not sent itself: until then the request goes on, so that its
        connection is not closed as an idle one. One whose client does not read it is closed."""
        try:
            with suppress(ConnectionError):
                async with asyncio.timeout(self.gone_s):
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()


class _Followed(asyncio.Protocol):
    """One accepted connection: aiohttp's protocol, and the table's entry. aiohttp's is made after
    the handshake, so that a connection without one costs little."""

    def __init__(
        self,
        connection: Connection,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        ended: Callable[[Connection], None],
    ) -> None:
        self.connection = connection
        self.timer: asyncio.TimerHandle | None = None
        self.shaking: asyncio.Task[None] | None = None  # the handshake
        self._sock = sock
        self._make = make
        self._ended = ended
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner = self._make()
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(self.connection)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    async def shake_hands(self, context: ssl.SSLContext | None, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        limit_s = None if context is None else within_s
        try:
            await loop.connect_accepted_socket(
                lambda: self, self._sock, ssl=context, ssl_handshake_timeout=limit_s
            )
        except OSError:  # the peer is no client, has gone, or was closed
            pass
        if self._transport is None:
            self._ended(self.connection)

    def close(self) -> None:
        """At once: what was to be sent is not."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()
        else:
            # asyncio has the socket and gives no access to it. It will read the end.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


def notice_death(sock: socket.socket, within_s: float) -> None:
    """A host that loses its power or its network says nothing. The kernel gives up after a quarter
    of an hour for data that is not acknowledged, and two hours for a silent connection; until then
    its request would go on."""
    quiet_s = max(1, round(within_s / 3))
    with suppress(OSError):  # the peer has gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quiet_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, quiet_s // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within_s * 1000))


class BoundedSite(web.BaseSite):
    """As `aiohttp.web.SockSite`, within the bounds of `connections`."""

    def __init__(
        self,
        runner: web.AppRunner,
        listening: socket.socket,
        connections: Connections,
        *,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context)
        self._listening = listening
        self._connections = connections
        self._table = connections.table
        self._context = ssl_context
        self._followed: dict[Connection, _Followed] = {}
        self._pause: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"{'http' if self._context is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._listening.setblocking(False)
        self._resume()

    async def stop(self) -> None:
        """Accepts nothing more, and ends handshakes. The other connections are the runner's."""
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        shaking = []
        for followed in self._followed.values():
            if followed.shaking is not None and not followed.shaking.done():
                followed.close()
                shaking.append(followed.shaking)
        if shaking:
            await asyncio.wait(shaking, timeout=self._connections.first_request_s)
        await super().stop()

    def _resume(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._without_descriptors(error)
                return
            self._admit(sock, address[0])

    def _without_descriptors(self, error: OSError) -> None:
        """Something else in this process has taken the reserve."""
        if error.errno not in _NO_DESCRIPTORS:
            raise error
        victim = self._table.make_room()
        if victim is not None:
            self._close(victim)
        self._connections.warn(f"cannot accept connections: {error.strerror}")
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)  # or the loop would try without a pause
        self._pause = loop.call_later(_PAUSE_S, self._resume)

    def _admit(self, sock: socket.socket, host: str) -> None:
        admission = self._table.admit(host)
        for closed in admission.closed:
            self._close(closed)
        if admission.connection is None:
            sock.close()
            self._connections.warn(f"connections from {host} are closed: there are too many")
            return
        self._connections.warn(admission.warning)
        self._serve(sock, admission.connection)

    def _serve(self, sock: socket.socket, connection: Connection) -> None:
        server = self._runner.server
        assert server is not None
        loop, within_s = asyncio.get_running_loop(), self._connections.first_request_s
        sock.setblocking(False)
        notice_death(sock, self._connections.gone_s)
        followed = _Followed(connection, sock, server, self._ended)
        self._followed[connection] = followed
        followed.shaking = loop.create_task(followed.shake_hands(self._context, within_s))
        followed.timer = loop.call_later(within_s, self._close_slow, connection)

    def _close_slow(self, connection: Connection) -> None:
        if self._table.close_slow(connection):
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        """The table has it no more."""
        followed = self._followed.get(connection)
        if followed is not None:
            followed.close()

    def _ended(self, connection: Connection) -> None:
        self._table.remove(connection)
        followed = self._followed.pop(connection, None)
        if followed is not None and followed.timer is not None:
            followed.timer.cancel()
