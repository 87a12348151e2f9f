"""An OpenAI server over real HTTP whose every answer is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(*ids: int, text: str = "") -> bytes:
    return event(choices=[{"text": text, "token_ids": list(ids)}])


DONE = b"data: [DONE]\n\n"


async def stream(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    return response


@asynccontextmanager
async def serving(handler: Handler, models: tuple[str, ...] = ("m",)) -> AsyncIterator[str]:
    async def completions(request: web.Request) -> web.StreamResponse:
        return await handler(request, await request.json())

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", listed)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
