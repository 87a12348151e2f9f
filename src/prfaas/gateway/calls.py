"""HTTP calls to nodes and kvds: one pool of long-lived connections, a named timeout for each call.

Library errors become ours here, once: `ConnectionLost` when nobody answers, `Said` for an answer
that is an error. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from prfaas.errors import ConnectionLost, PeerError

CONNECT_S = 3.0
# Below what common servers keep an idle connection for (uvicorn: 5 s): a request on a connection
# that the server is just closing fails, and nobody can tell whether it was acted on.
IDLE_S = 4.0
_SHOWN_CHARS = 500  # of an answer that makes no sense
T = TypeVar("T")


class Said(PeerError):
    """A peer answered with an error. `code` is its word for it, empty where it has none."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class Calls:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(
        self,
        method: str,
        url: str,
        kind: type[T],
        *,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """The answer's JSON as `kind`."""
        return _decoded(await self.read(method, url, timeout_s, body, headers), kind, url)

    async def read(
        self,
        method: str,
        url: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        async with self.answer(method, url, limits, body, headers) as response:
            with translated(url):
                return await response.read()

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        url: str,
        limits: aiohttp.ClientTimeout,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is no error. Whoever reads it does so `translated`."""
        sent = {**(headers or {}), **({"Content-Type": "application/json"} if body else {})}
        with translated(url):
            response = await self._session.request(
                method, url, data=body, headers=sent, timeout=limits
            )
        async with response:
            if response.status >= 400:
                with translated(url):
                    raise _said(response, await response.read())
            yield response


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Library errors within become `ConnectionLost`."""
    try:
        yield
    except TimeoutError:
        raise ConnectionLost(f"{url}: no answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionLost(f"{url}: {error or type(error).__name__}") from None


@asynccontextmanager
async def calling(key: str | None = None) -> AsyncIterator[Calls]:
    """`key` is sent to every peer as a bearer token."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    session = aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),  # peers set none, and looking takes its time
        skip_auto_headers=("Accept-Encoding", "User-Agent"),
    )
    async with session:
        yield Calls(session)


def _decoded(data: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        shown = data[:_SHOWN_CHARS].decode(errors="replace")
        raise Said(502, "", f"{url} does not answer as expected ({error}): {shown}") from None


def _said(response: aiohttp.ClientResponse, data: bytes) -> Said:
    """Nodes answer in OpenAI's shape, {"error": {...}}; kvds with a `Problem`."""
    try:
        body: Any = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": data[:_SHOWN_CHARS].decode(errors="replace")}
    retry_after = response.headers.get("Retry-After", "")
    return Said(
        response.status,
        str(error.get("code") or ""),
        str(error.get("message") or f"HTTP {response.status}"),
        param=error.get("param"),
        retry_after_s=float(retry_after) if retry_after.isdigit() else None,
    )
