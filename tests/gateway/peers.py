"""A kvd or a node as a loopback HTTP server whose responses the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from tests.waiting import PATIENCE_S


class Peer:
    """Responds to `METHOD /path` with what was scripted for it, and records every request. A
    request whose path has no script gets no response until the peer closes."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: dict[str, list[Any]] = {}  # by `METHOD /path`, in the order of arrival
        self.queries: dict[str, list[dict[str, str]]] = {}
        self.traceparents: dict[str, list[str | None]] = {}
        self.tracestates: dict[str, list[str | None]] = {}
        self._scripts: dict[str, tuple[int, Any]] = {}
        self._lost: set[str] = set()
        self._changed = asyncio.Condition()
        self._closing = False

    async def script(self, what: str, response: Any, status: int = 200) -> None:
        """Requests that wait for this path are answered at once."""
        async with self._changed:
            self._scripts[what] = (status, response)
            self._changed.notify_all()

    def silence(self, what: str) -> None:
        """Requests of this path wait again, until it is scripted."""
        self._scripts.pop(what, None)

    def lose(self, what: str) -> None:
        """The peer closes the connection instead of sending a response."""
        self._lost.add(what)

    async def requested(self, what: str, times: int = 1) -> list[Any]:
        """Returns the bodies once so many requests have arrived."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.bodies.get(what, ())) >= times)
        return self.bodies[what]

    async def close(self) -> None:
        async with self._changed:
            self._closing = True
            self._changed.notify_all()

    async def respond(self, request: web.Request) -> web.StreamResponse:
        what = f"{request.method} {request.path}"
        body = await request.read()
        self.queries.setdefault(what, []).append(dict(request.query))
        self.traceparents.setdefault(what, []).append(request.headers.get("traceparent"))
        self.tracestates.setdefault(what, []).append(request.headers.get("tracestate"))
        async with self._changed:
            self.bodies.setdefault(what, []).append(msgspec.json.decode(body) if body else None)
            self._changed.notify_all()
            if what in self._lost and request.transport is not None:
                request.transport.close()
            await self._changed.wait_for(lambda: self._closing or what in self._scripts)
            status, response = self._scripts.get(what, (503, {}))
        if isinstance(response, str):
            return web.Response(status=status, text=response)
        if isinstance(response, bytes):
            return web.Response(status=status, body=response)
        return web.Response(
            status=status, body=msgspec.json.encode(response), content_type="application/json"
        )


@asynccontextmanager
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.respond)
    runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        made.url = f"http://{host}:{port}"
        yield made
    finally:
        await made.close()
        await runner.cleanup()
