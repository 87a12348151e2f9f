"""HTTP requests to other processes of a deployment, each with a timeout.

A request fails with `ConnectionLost` when the peer does not respond, with `PeerHttpError` when the
response is an error, and with `MalformedResponse` when it is too large or not what was expected.
Redirections are errors: a peer cannot send this process to another server. This module does not
know which requests are made.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from prfaas.errors import ConnectionLost, MalformedResponse, PeerHttpError
from prfaas.http_client.connection import Connection
from prfaas.http_client.connection_pool import (
    CONNECT_S,
    IDLE_S,
    ClientTls,
    ConnectionPool,
    header,
)
from prfaas.http_client.paced_writer import RequestBody, body_bytes
from prfaas.security.shared_key import SharedKey

_SHOWN_CHARS = 500  # of a response that cannot be decoded
# The largest response unless a caller gives another bound: a snapshot of 1.4 million block hashes.
LARGEST_BYTES = 64 << 20
_ERROR_BYTES = 64 << 10  # of an error response; the rest is not read
_MESSAGE_CHARS, _WORD_CHARS = 2000, 100  # of an error's message, and of its code and parameter
_LONGEST_RETRY_AFTER_S = 3600.0
_POOLS = 4096  # with more peers than this, peers without a connection are forgotten
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
T = TypeVar("T")


class Exchange:
    """A request that was sent, and its response. Used as a context: leaving it returns the
    connection to its pool, or closes it when the response was not read to its end."""

    def __init__(self, connection: Connection, url: str) -> None:
        self._connection = connection
        self._url = url

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.release(IDLE_S)

    async def check_status(self) -> None:
        """Returns when the response's headers have arrived. Raises `PeerHttpError` when its status
        is an error."""
        await self._connection.wait_for_headers()
        if self._connection.status >= 300:
            body, _ = await self._connection.read_rest(_ERROR_BYTES)
            raise _peer_error(self._connection, body)

    async def read_some(self) -> bytes | None:
        """The bytes that arrived since the previous call; None at the end of the response."""
        return await self._connection.read_some()

    async def read_rest(self, max_bytes: int = LARGEST_BYTES) -> bytes:
        """Raises `MalformedResponse` when the rest of the response has more than `max_bytes`."""
        body, whole = await self._connection.read_rest(max_bytes)
        if not whole:
            raise MalformedResponse(f"{self._url} sent more than {max_bytes} bytes")
        return body

    def give_up(self) -> None:
        """Closes the connection: a caller that waits for bytes gets `ConnectionLost`."""
        self._connection.close("given up")


class HttpClient:
    def __init__(
        self,
        key: SharedKey | None = None,
        connect_s: float = CONNECT_S,
        tls: ClientTls | None = None,
        server_name: str | None = None,
    ) -> None:
        """Every request carries `key` as its bearer token. `server_name`: the name that a server's
        certificate must carry, instead of the host of the URL."""
        self._key = key
        self._connect_s = connect_s
        self._tls = tls
        self._server_name = server_name
        self._pools: dict[str, ConnectionPool] = {}

    async def request_json(
        self,
        method: str,
        url: str,
        kind: type[T],
        *,
        timeout_s: float,
        body: RequestBody = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        max_bytes: int = LARGEST_BYTES,
    ) -> T:
        """Sends a request and returns the response's JSON as `kind`."""
        data = await self.request(
            method, url, timeout_s=timeout_s, body=body, headers=headers, max_bytes=max_bytes
        )
        return _decoded(data, kind, url)

    async def request(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        body: RequestBody = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        max_bytes: int = LARGEST_BYTES,
    ) -> bytes:
        """Sends a request and returns the response's body, which has at most `max_bytes`."""
        exchange = await self.send(method, url, body, headers, total_s=timeout_s)
        async with exchange:
            await exchange.check_status()
            return await exchange.read_rest(max_bytes)

    async def send(
        self,
        method: str,
        url: str,
        body: RequestBody = b"",
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        total_s: float | None = None,
        silence_s: float | None = None,
    ) -> Exchange:
        """Returns when the request has been written to a connection. `total_s` bounds the whole
        response, `silence_s` the time in which no byte of it arrives."""
        root, target = _split(url)
        pool = self._pools.get(root)
        if pool is None:
            if len(self._pools) >= _POOLS:
                self._pools = {at: known for at, known in self._pools.items() if known.in_use}
            pool = self._pools[root] = ConnectionPool(
                root, self._tls, self._connect_s, self._server_name
            )
        head = f"{method} {target} HTTP/1.1\r\n{pool.headers}"
        if self._key is not None:
            head += self._key.header
        for name, value in headers.items():
            head += header(name, value)
        if method != "GET":
            head += f"Content-Type: application/json\r\nContent-Length: {body_bytes(body)}\r\n"
        connection = await pool.connection()
        connection.send(f"{head}\r\n".encode(), body, total_s=total_s, silence_s=silence_s)
        return Exchange(connection, url)

    def heard_s(self, url: str) -> float:
        """When bytes last arrived from this scheme, host and port, on any connection, as
        `MonotonicClock` counts; minus infinity where none have."""
        pool = self._pools.get(_split(url)[0])
        return -math.inf if pool is None else pool.heard_s

    def close_idle(self, url: str) -> None:
        """The next request to this scheme, host and port makes a new connection."""
        pool = self._pools.get(_split(url)[0])
        if pool is not None:
            pool.close_idle()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@asynccontextmanager
async def open_client(
    key: SharedKey | None = None,
    connect_s: float = CONNECT_S,
    tls: ClientTls | None = None,
    server_name: str | None = None,
) -> AsyncIterator[HttpClient]:
    """A client whose connections are closed at the end of the block."""
    client = HttpClient(key, connect_s, tls, server_name)
    try:
        yield client
    finally:
        client.close()


def _split(url: str) -> tuple[str, str]:
    """Scheme and host; path and query."""
    if " " in url or "#" in url or not url.isprintable():
        raise ConnectionLost(f"{url!r} is not a URL")
    slash = url.find("/", len("https://"))
    return (url, "/") if slash < 0 else (url[:slash], url[slash:])


def _decoded(data: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except _NOT_JSON as error:
        shown = data[:_SHOWN_CHARS].decode(errors="replace")
        raise MalformedResponse(f"{url} sent an unexpected response ({error}): {shown}") from None


def _peer_error(connection: Connection, data: bytes) -> PeerHttpError:
    """Nodes and gateways send OpenAI's error body, {"error": {...}}; kvds send a `Problem`."""
    try:
        body: Any = msgspec.json.decode(data)
    except _NOT_JSON:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": data[:_SHOWN_CHARS].decode(errors="replace")}
    retry_after = connection.headers.get(b"retry-after", b"")
    after_s = min(float(retry_after), _LONGEST_RETRY_AFTER_S) if retry_after.isdigit() else None
    param = error.get("param")
    return PeerHttpError(
        connection.status,
        _text(error.get("code"))[:_WORD_CHARS],
        _text(error.get("message"))[:_MESSAGE_CHARS] or f"HTTP {connection.status}",
        param=param[:_WORD_CHARS] if isinstance(param, str) else None,
        retry_after_s=after_s,
    )


def _text(value: object) -> str:
    """A field of an error body. Some servers send their codes as numbers."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, float) or _is_short(value) else ""


def _is_short(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 10**9
