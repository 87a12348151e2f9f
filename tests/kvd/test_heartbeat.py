"""Heartbeats against a gateway that is down, refuses, and then accepts."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from prfaas.clock import MonotonicClock
from prfaas.config.host import KvdTimeouts
from prfaas.http_client.client import open_client
from prfaas.kvd import heartbeat
from prfaas.kvd.report import Reporter
from prfaas.security.shared_key import SharedKey
from prfaas.supervision import Failures
from tests.gateway.backends import until
from tests.waiting import HANG_S


class _Reporter:
    def __init__(self, failures: int = 0) -> None:
        self.failures = failures  # the first reports that fail

    def report(self) -> dict[str, Any]:
        if self.failures:
            self.failures -= 1
            raise KeyError("a defect")
        return {"report": 1}


async def test_a_gateway_that_does_not_answer_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timeouts = KvdTimeouts(heartbeat_s=0.01)
    received: list[tuple[str | None, Any]] = []
    accepted = asyncio.Event()

    async def register(request: web.Request) -> web.Response:
        received.append(
            (request.headers.get("Authorization"), msgspec.json.decode(await request.read()))
        )
        if len(received) < 3:
            return web.json_response({"error": {"message": "not yet"}}, status=503)
        if len(received) > 4:
            accepted.set()
        return web.json_response({})

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
    app = web.Application()
    app.router.add_post("/prfaas/v1/register", register)
    runner = web.AppRunner(app)
    await runner.setup()
    url = f"http://{host}:{port}"
    with caplog.at_level(logging.INFO, heartbeat.__name__):
        async with asyncio.timeout(HANG_S), open_client(SharedKey(["key"])) as http:
            beating = asyncio.create_task(
                heartbeat.send_heartbeats(
                    http,
                    url,
                    "http://kvd",
                    "home",
                    cast(Reporter, _Reporter()),
                    timeouts,
                    Failures(MonotonicClock()),
                )
            )
            await until(lambda: bool(lines()))  # no process listens yet
            await web.TCPSite(runner, host, port).start()
            await accepted.wait()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
    await runner.cleanup()
    body = {"kvd_url": "http://kvd", "cluster": "home", "report": {"report": 1}}
    assert set(map(str, received)) == {str(("Bearer key", body))}
    down, registered = lines()  # one line per change, not per heartbeat
    assert url in down and "registered" in registered


async def test_a_report_that_cannot_be_made_does_not_end_the_heartbeats() -> None:
    registered = asyncio.Event()

    async def register(request: web.Request) -> web.Response:
        registered.set()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/prfaas/v1/register", register)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    failures, timeouts = Failures(MonotonicClock()), KvdTimeouts(heartbeat_s=0.01)
    reporter = cast(Reporter, _Reporter(failures=3))
    async with asyncio.timeout(HANG_S), open_client() as http:
        beating = asyncio.create_task(
            heartbeat.send_heartbeats(http, url, "http://kvd", "home", reporter, timeouts, failures)
        )
        await registered.wait()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    await runner.cleanup()
    assert failures.counts == {"heartbeat": 3}


async def test_gateways_that_share_an_address_all_hear_of_the_kvd() -> None:
    """A balancer leads each connection to the next gateway, as while one replaces the other."""
    heard: set[tuple[str, int]] = set()
    enough = asyncio.Event()

    async def register(request: web.Request) -> web.Response:
        assert request.transport is not None
        heard.add(request.transport.get_extra_info("peername"))
        if len(heard) > 2:
            enough.set()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/prfaas/v1/register", register)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with asyncio.timeout(HANG_S), open_client(SharedKey(["key"])) as http:
        beating = asyncio.create_task(
            heartbeat.send_heartbeats(
                http,
                f"http://{host}:{port}",
                "http://kvd",
                "home",
                cast(Reporter, _Reporter()),
                KvdTimeouts(heartbeat_s=0.01),
                Failures(MonotonicClock()),
            )
        )
        await enough.wait()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
    await runner.cleanup()
