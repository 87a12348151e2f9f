"""The connections to one host and port. Idle connections are used again."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import urlsplit

from prfaas.config.gateway import DEFAULTS
from prfaas.errors import ConnectionLost, Refused, Unreachable
from prfaas.http_client.connection import PAUSED_S, Connection

CONNECT_S = DEFAULTS.timeouts.connect_s
# Shorter than common servers keep an idle connection (uvicorn: 5 s). A request on a connection that
# the server is just closing fails, and the client cannot tell whether the server acted on it.
IDLE_S = 4.0
# Called for each connection, because a process may replace its certificates.
ClientTls: TypeAlias = Callable[[], ssl.SSLContext]


class ConnectionPool:
    def __init__(
        self,
        url: str,
        tls: ClientTls | None = None,
        connect_s: float = CONNECT_S,
        server_name: str | None = None,
    ) -> None:
        """`tls` makes the context for https; without it, the system's CAs are trusted.
        `server_name`: the name that the certificate must carry, instead of the URL's host."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConnectionLost(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConnectionLost(f"{url!r} is not the URL of a peer, such as http://HOST:PORT")
        self._url = url
        self._connect_s = connect_s
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls: ClientTls | None = None
        if parts.scheme == "https":
            self._tls = tls or ssl.create_default_context
        self._server_name = server_name if tls is not None and self._tls is not None else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.heard_s = -math.inf  # when bytes last arrived, on any connection
        self.headers = header("Host", parts.netloc.rpartition("@")[2])

    async def connection(self) -> Connection:
        """An idle connection, or a new one."""
        while self._idle:
            connection = self._idle[-1]  # the latest: the others reach their idle timeout and close
            # After a pause of this process its timers are late, and the server may have closed it.
            if time.monotonic() - connection.idle_since_s <= IDLE_S:
                return self._idle.pop()
            connection.close("idle")
        began_s = time.monotonic()
        try:
            try:
                connection = await self._connect()
            except TimeoutError:
                if time.monotonic() - began_s < self._connect_s + PAUSED_S:
                    raise
                connection = await self._connect()
        except TimeoutError:
            raise Unreachable(f"{self._url}: not connected in time") from None
        except (OSError, ValueError) as error:  # ValueError: a host name that IDNA or TLS refuses
            kind = Refused if isinstance(error, ConnectionRefusedError) else Unreachable
            raise kind(f"{self._url}: {error}") from None
        self._open.add(connection)
        return connection

    async def _connect(self) -> Connection:
        async with asyncio.timeout(self._connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._url, self._idle.append, self._forget, self._hear),
                self._host,
                self._port,
                ssl=None if self._tls is None else self._tls(),
                server_hostname=self._server_name,
            )
        return connection

    @property
    def in_use(self) -> bool:
        return bool(self._open)

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _hear(self) -> None:
        self.heard_s = time.monotonic()

    def close_idle(self) -> None:
        for connection in list(self._idle):
            connection.close("not used again")

    def close(self) -> None:
        for connection in list(self._open):
            connection.close("this client is closed")


def header(name: str, value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{name} must be one line of printable characters")
    return f"{name}: {value}\r\n"
