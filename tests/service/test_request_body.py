from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from prfaas.errors import RequestError
from prfaas.service.request_body import BodyLimits


async def test_bodies_are_bounded_each_and_together() -> None:
    limits = BodyLimits(each_bytes=10, all_bytes=15, within_s=60.0)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        try:
            async with limits.read(request) as body:
                if request.path == "/hold":
                    entered.set()
                    await leave.wait()
                return web.Response(body=body)
        except RequestError as error:
            return web.Response(status=error.status)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x"

    app = web.Application()
    app.router.add_post("/{any}", handle)
    async with TestClient(TestServer(app)) as client:

        async def post(path: str, data: object) -> int:
            async with client.post(path, data=data) as answer:
                return answer.status

        assert await post("/a", b"x" * 10) == 200
        assert await post("/a", b"x" * 11) == 413
        assert await post("/a", pieces()) == 413  # its length is not announced
        holding = asyncio.create_task(post("/hold", b"x" * 10))
        await entered.wait()
        assert await post("/a", b"x" * 6) == 503
        leave.set()
        assert await holding == 200
        assert await post("/a", b"x" * 10) == 200
