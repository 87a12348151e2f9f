"""A stand-in for kube-proxy and load balancers: an address that leads to the pods of a Service."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

Endpoint: TypeAlias = tuple[str, int]
CHUNK_BYTES = 1 << 16
CONNECT_S = 10.0
_IP_FREEBIND = 15  # of linux/in.h; Python 3.11 has no name for it


class ServiceProxy:
    """New connections go to the present endpoints in turn; open ones stay where they are. Its
    methods are called in one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self._endpoints: list[Endpoint] = []
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A network has its own address when its first pod has started.
        listening.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        listening.bind(self.address)
        self._server = await asyncio.start_server(self._serve, sock=listening)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = (host, port)

    async def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = list(endpoints)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._relay(reader, writer)
        except asyncio.CancelledError:
            pass  # this proxy is closed
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._endpoints:
            return  # the connection is closed: there is no pod
        at = self._endpoints[next(self._turn) % len(self._endpoints)]
        try:
            async with asyncio.timeout(CONNECT_S):
                there, back = await asyncio.open_connection(*at)
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, back))
                both.create_task(_copy(there, writer))
        finally:
            back.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Until the source ends. A connection that is reset ends both directions."""
    try:
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
    except (OSError, RuntimeError):
        with suppress(OSError):
            target.transport.abort()
