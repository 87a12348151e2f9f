"""TCP connections of the actors: bounded in number, and each with a limit of its time.

A deed sends bytes in pieces and waits until the server answers or closes the connection. A server
that does neither within the limit is *overdue*, which the soak counts as a defect.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from prfaas_lab.faults.actors.budget import CpuBudget
from prfaas_lab.faults.actors.situation import Census

# A peer on another host has another address than the deployment's processes.
SOURCE = "127.0.0.66"
MOST_CONNECTIONS = 320  # of all actors together
PIECE_BYTES = 256 << 10
CONNECT_S = 10.0
OVERDUE = "neither answered nor closed"
UNDER_WAY = "under way at the end"
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")


class Place(NamedTuple):
    host: str
    port: int


def place_of(url_or_address: str) -> Place:
    text = url_or_address if "//" in url_or_address else f"//{url_or_address}"
    parts = urlsplit(text)
    return Place(parts.hostname or "127.0.0.1", parts.port or 80)


class Network:
    """Opens the connections of all actors."""

    def __init__(self, budget: CpuBudget, census: Census) -> None:
        self.budget = budget
        self.census = census
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)

    @asynccontextmanager
    async def connection(
        self, place: Place, *, receive_bytes: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection, closed at the end of the block. Raises OSError and TimeoutError.
        `receive_bytes`: size of the socket's buffer, for a client that does not read."""
        async with self._room:
            await self.budget.turn()
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                if receive_bytes is not None:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
                sock.bind((SOURCE, 0))
                sock.setblocking(False)
                async with asyncio.timeout(CONNECT_S):
                    await asyncio.get_running_loop().sock_connect(sock, place)
                reader, writer = await asyncio.open_connection(sock=sock, limit=64 << 10)
            except BaseException:
                sock.close()
                raise
            try:
                yield reader, writer
            finally:
                writer.transport.abort()

    async def deed(
        self,
        kind: str,
        place: Place,
        pieces: Iterable[bytes],
        limit_s: float,
        *,
        every_s: float = 0,
    ) -> str:
        """Sends the pieces, `every_s` apart, and waits for the answer or the end of the connection.
        Records and returns what the server did."""
        began_s = time.monotonic()
        try:
            async with self.connection(place) as (reader, writer):
                began_s = time.monotonic()
                answer = await self._send_and_see(reader, writer, pieces, limit_s, every_s)
        except asyncio.CancelledError:
            self.census.record(kind, UNDER_WAY, time.monotonic() - began_s)
            raise
        except TimeoutError:
            answer = OVERDUE
        except OSError as error:
            answer = "refused" if isinstance(error, ConnectionRefusedError) else "closed"
        self.census.record(kind, answer, time.monotonic() - began_s, overdue=answer == OVERDUE)
        return answer

    async def _send_and_see(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pieces: Iterable[bytes],
        limit_s: float,
        every_s: float,
    ) -> str:
        """Raises TimeoutError after `limit_s`, without the time in which this process had to rest:
        that is not the server's."""
        seen = asyncio.create_task(self._see(reader))
        until_s = time.monotonic() + limit_s
        try:
            for piece in pieces:
                for at in range(0, len(piece), PIECE_BYTES):
                    until_s += await self.budget.turn()
                    if not seen.done() and time.monotonic() > until_s:
                        raise TimeoutError
                    if seen.done():
                        return seen.result()  # the server did not wait for the rest
                    try:
                        write(writer, memoryview(piece)[at : at + PIECE_BYTES])
                        async with asyncio.timeout(until_s - time.monotonic()):
                            await writer.drain()
                    except TimeoutError:  # an OSError as well
                        raise
                    except OSError:
                        return await seen
                if every_s:
                    await asyncio.wait({seen}, timeout=every_s)
            async with asyncio.timeout(until_s - time.monotonic()):
                return await seen
        finally:
            seen.cancel()

    async def _see(self, reader: asyncio.StreamReader) -> str:
        """Reads until the server answers or closes the connection. Takes no turn of the budget: the
        time in which this process rests must not count as the server's."""
        head = b""
        try:
            while data := await reader.read(64 << 10):
                head = (head + data)[:64]
                if found := _STATUS.match(head):
                    return f"HTTP {found[1].decode()}"
        except OSError:
            pass
        return "closed"


def write(writer: asyncio.StreamWriter, data: bytes | memoryview) -> None:
    """Raises OSError when the server has closed the connection, for which uvloop has another
    error."""
    try:
        writer.write(data)
    except RuntimeError as error:
        raise ConnectionResetError(str(error)) from None


def http_head(
    method: str, target: str, key: str | None, *lines: str, length: int | None = None
) -> bytes:
    """The head of a request after which the server closes the connection."""
    head = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close"]
    if key is not None:
        head.append(f"Authorization: Bearer {key}")
    if length is not None:
        head += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join((*head, *lines, "", "")).encode("utf-8", "surrogateescape")


def http_request(method: str, target: str, key: str | None, body: bytes = b"") -> list[bytes]:
    return [http_head(method, target, key, length=len(body)), body]


def byte_by_byte(head: bytes, slow: bytes) -> Iterator[bytes]:
    """The head at once, then single bytes."""
    yield head
    for byte in slow:
        yield bytes([byte])
