"""HTTP calls to nodes and kvds over long-lived connections, each with its bounds in time.

A call fails with `ConnectionLost` when the peer does not answer, with `PeerHttpError` when the
answer is an error. This module knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from prfaas.errors import ConnectionLost, PeerHttpError
from prfaas.http_client.connection import Connection
from prfaas.http_client.connection_pool import ConnectionPool, header

# Below what common servers keep an idle connection for (uvicorn: 5 s): a request on a connection
# that the server is just closing fails, and nobody can tell whether it was acted on.
IDLE_S = 4.0
_SHOWN_CHARS = 500  # of an answer that makes no sense
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
T = TypeVar("T")


class Exchange:
    """A request that was sent. Used as a context: leaving it gives the connection back, or ends it
    when the answer was not read to its end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.done(IDLE_S)

    async def accepted(self) -> None:
        """Returns when an answer begins that is no error."""
        await self._connection.answered()
        if self._connection.status >= 400:
            raise _said(self._connection, await self._connection.rest())

    async def more(self) -> bytes | None:
        """What has come since the last time; None behind the end."""
        return await self._connection.more()

    async def rest(self) -> bytes:
        return await self._connection.rest()

    def give_up(self) -> None:
        """Whoever waits for more fails with `ConnectionLost`."""
        self._connection.close("given up")


class HttpClient:
    def __init__(self, key: str | None = None) -> None:
        """`key` is sent to every peer as a bearer token."""
        self._key = key
        self._origins: dict[str, ConnectionPool] = {}

    async def ask(
        self,
        method: str,
        url: str,
        kind: type[T],
        *,
        timeout_s: float,
        body: bytes = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> T:
        """The answer's JSON as `kind`."""
        return _decoded(await self.read(method, url, timeout_s, body, headers), kind, url)

    async def read(
        self,
        method: str,
        url: str,
        timeout_s: float,
        body: bytes = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> bytes:
        asked = await self.send(method, url, body, headers, total_s=timeout_s)
        async with asked:
            await asked.accepted()
            return await asked.rest()

    async def send(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        total_s: float | None = None,
        silence_s: float | None = None,
    ) -> Exchange:
        """Returns when the request is on its way."""
        root, target = _split(url)
        origin = self._origins.get(root)
        if origin is None:
            origin = self._origins[root] = ConnectionPool(root, self._key)
        head = f"{method} {target} HTTP/1.1\r\n{origin.headers}"
        for name, value in headers.items():
            head += header(name, value)
        if method != "GET":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        connection = await origin.connection()
        connection.send(f"{head}\r\n".encode(), body, total_s=total_s, silence_s=silence_s)
        return Exchange(connection)

    def close(self) -> None:
        for origin in self._origins.values():
            origin.close()


@asynccontextmanager
async def calling(key: str | None = None) -> AsyncIterator[HttpClient]:
    calls = HttpClient(key)
    try:
        yield calls
    finally:
        calls.close()


def _split(url: str) -> tuple[str, str]:
    """Scheme and host; what a request asks for there."""
    if " " in url or not url.isprintable():
        raise ConnectionLost(f"{url!r} is no URL")
    slash = url.find("/", len("https://"))
    return (url, "/") if slash < 0 else (url[:slash], url[slash:])


def _decoded(data: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        shown = data[:_SHOWN_CHARS].decode(errors="replace")
        raise PeerHttpError(
            502, "", f"{url} does not answer as expected ({error}): {shown}"
        ) from None


def _said(connection: Connection, data: bytes) -> PeerHttpError:
    """Nodes answer in OpenAI's shape, {"error": {...}}; kvds with a `Problem`."""
    try:
        body: Any = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": data[:_SHOWN_CHARS].decode(errors="replace")}
    retry_after = connection.headers.get(b"retry-after", b"")
    return PeerHttpError(
        connection.status,
        str(error.get("code") or ""),
        str(error.get("message") or f"HTTP {connection.status}"),
        param=error.get("param"),
        retry_after_s=float(retry_after) if retry_after.isdigit() else None,
    )
