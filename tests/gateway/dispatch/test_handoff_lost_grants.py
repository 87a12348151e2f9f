"""Hand-offs whose grant does not reach the gateway. The kvd is a real one; a proxy stands before
its HTTP API and delays, drops, damages or holds back what belongs to `/v1/open`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import aiohttp
import msgspec
import pytest
from aiohttp import web

from prfaas.cache.hashing import PromptHashes
from prfaas.config.host import KvdTimeouts
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.dispatch.handoff import AttemptFailed, HandOffs
from prfaas.gateway.planning.prefix_copies import PrefixCopies
from prfaas.gateway.request import RequestTrace
from prfaas.http_client.client import open_client
from prfaas.kvd.store import StoreOptions
from prfaas.types import Grant
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import gateway_request, prompt, until
from tests.gateway.fleets import (
    HOMES,
    LONG,
    B,
    F,
    fleet_and_router,
    member_of,
    placement,
    with_timeouts,
)
from tests.gateway.reports import SPEC, compat
from tests.kvd.hosts import Host, kvd
from tests.waiting import PATIENCE_S

# What happens to an open: its answer comes after `release`, is lost, or is not a grant; or the
# request itself reaches the kvd after `release` only.
Fault: TypeAlias = Literal["answer late", "answer lost", "answer damaged", "request late"]
NEVER_S = 10 * PATIENCE_S  # the kvd must not release a grant because it has expired


@dataclass
class Proxy:
    target: str
    fault: Fault
    http: aiohttp.ClientSession
    url: str = ""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # by the kvd
    release: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[tuple[int, bytes]] = field(default_factory=list)  # of the kvd to opens
    aborts: list[str] = field(default_factory=list)  # paths

    async def respond(self, request: web.Request) -> web.Response:
        body = await request.read()
        opening = request.path == "/v1/open"
        if opening:
            self.arrived.set()
            if self.fault == "request late":
                await self.release.wait()
        async with self.http.request(request.method, self.target + request.path, data=body) as got:
            status, answer = got.status, await got.read()
        if request.path.endswith("/abort"):
            self.aborts.append(request.path)
        if opening:
            self.answers.append((status, answer))
            self.answered.set()
            match self.fault:
                case "answer late":
                    await self.release.wait()
                case "answer lost":
                    assert request.transport is not None
                    request.transport.close()
                case "answer damaged":
                    answer = b"[]"
        return web.Response(status=status, body=answer, content_type="application/json")


@asynccontextmanager
async def proxy(target: str, fault: Fault) -> AsyncIterator[Proxy]:
    async with aiohttp.ClientSession() as http:
        made = Proxy(target, fault, http)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", made.respond)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            made.url = "http://{}:{}".format(*runner.addresses[0][:2])
            yield made
        finally:
            made.release.set()
            await runner.cleanup()


@dataclass
class Case:
    host: Host
    proxy: Proxy
    hand_off: asyncio.Task[None]


@asynccontextmanager
async def case(folder: Path, fault: Fault, *, call_s: float = PATIENCE_S) -> AsyncIterator[Case]:
    """A hand-off from `f` to `b` has begun; `call_s` is the gateway's patience with a kvd."""
    clock = FakeClock()
    with (
        kvd(
            folder,
            timeouts=KvdTimeouts(grant_s=NEVER_S),
            store=StoreOptions(memory_bytes=16 << 20),
        ) as host,
        host.engine(spec=SPEC, block_tokens=64, compat=compat()),
    ):
        async with (
            proxy(host.url, fault) as between,
            open_client() as http,
            BackgroundCalls(PATIENCE_S) as background_calls,
        ):
            homes = [HOMES[0], {**HOMES[1], "kvd_url": between.url}, HOMES[2]]
            limits = with_timeouts(kvd_call_s=call_s)
            fleet, router = fleet_and_router(clock, homes=homes, limits=limits)
            booking = await router.place(placement(LONG, clock), 1.0)
            copies = PrefixCopies(fleet, http, background_calls, clock)
            hand_offs = HandOffs(fleet, http, background_calls, copies, clock)
            request = gateway_request(prompt(LONG))

            async def carry_out() -> None:
                async with hand_offs.start(
                    booking, member_of(fleet, F), member_of(fleet, B)
                ) as hand_off:
                    hashes = PromptHashes(request.token_ids.array)
                    trace = RequestTrace(clock.now())
                    trace.begin_attempt(booking.route, clock.now())
                    await hand_off.carry_out(request, hashes, trace)

            task = asyncio.create_task(carry_out())
            try:
                yield Case(host, between, task)
            finally:
                task.cancel()
                await asyncio.wait([task])


def is_grant(answer: tuple[int, bytes]) -> bool:
    status, body = answer
    return status == 200 and bool(msgspec.json.decode(body, type=Grant).max_bytes)


async def nothing_stays_reserved(one: Case) -> None:
    await until(lambda: one.host.in_use() == (0, 0))
    assert one.host.stats()["incoming"]["granted"] == 0


@pytest.mark.parametrize("fault", ["answer lost", "answer damaged"])
async def test_a_grant_whose_answer_is_lost_is_released(tmp_path: Path, fault: Fault) -> None:
    async with case(tmp_path, fault) as one:
        with pytest.raises(AttemptFailed):
            await one.hand_off
        assert is_grant(one.proxy.answers[0]), "the kvd has reserved memory"
        await nothing_stays_reserved(one)


async def test_a_grant_that_comes_after_the_timeout_is_released(tmp_path: Path) -> None:
    async with case(tmp_path, "answer late", call_s=0.5) as one:
        with pytest.raises(AttemptFailed):
            await one.hand_off
        await asyncio.wait_for(one.proxy.answered.wait(), PATIENCE_S)
        await nothing_stays_reserved(one)
        one.proxy.release.set()


async def test_a_cancelled_request_releases_its_grant_without_the_answer(tmp_path: Path) -> None:
    async with case(tmp_path, "answer late") as one:
        await asyncio.wait_for(one.proxy.answered.wait(), PATIENCE_S)
        assert is_grant(one.proxy.answers[0])
        one.hand_off.cancel()
        await nothing_stays_reserved(one)
        one.proxy.release.set()


async def test_an_open_that_arrives_after_its_abort_reserves_nothing(tmp_path: Path) -> None:
    async with case(tmp_path, "request late") as one:
        await asyncio.wait_for(one.proxy.arrived.wait(), PATIENCE_S)
        one.hand_off.cancel()
        await until(lambda: len(one.proxy.aborts) == 1)
        one.proxy.release.set()
        await asyncio.wait_for(one.proxy.answered.wait(), PATIENCE_S)
        status, body = one.proxy.answers[0]
        assert status == 409 and b"transfer_id" in body
        await nothing_stays_reserved(one)
