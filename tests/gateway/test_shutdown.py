"""A gateway that shuts down under requests releases what it has reserved for them.

The kvds of these hosts keep a grant for ten minutes, so that only an abort can have ended it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.config.deployment import Deployment
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.http_client.client import Exchange, HttpClient
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.gateway.backends import (
    MODEL,
    THRESHOLD,
    answered,
    deployment,
    gateway_request,
    node,
    prompt,
    serving,
    until,
)
from tests.gateway.conftest import Hosts, through
from tests.gateway.fleets import with_timeouts
from tests.gateway.processes import gateway_process
from tests.node.hosts import Process, call
from tests.waiting import wait_until

LONG = 16 * THRESHOLD
AT_ONCE = 3
SLOW_BPS = 1_000_000.0  # a hand-off of such a prompt then takes many seconds
PATIENT = {"silent_s": 100.0, "unresponsive_s": 100.0, "hung_s": 100.0}
MOMENTS = ("prefill", "transfer", "decode")


def reserved(hosts: Hosts) -> int:
    """Transfers that some kvd keeps pages for."""
    incoming = [host.stats(check=False)["incoming"] for host in hosts.all]
    return sum(found["granted"] + found["committed"] for found in incoming)


@contextmanager
def stopped(*processes: Process) -> Iterator[None]:
    for process in processes:
        process.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.popen.send_signal(signal.SIGCONT)


@contextmanager
def held_up(moment: str, hosts: Hosts, relays: list[Relay]) -> Iterator[Callable[[], bool]]:
    """Long requests get as far as `moment` and no further. Yields whether all have got there."""
    before = sum(host.received_bytes() for host in hosts.home)

    def count(stage: str) -> int:
        return sum(int(host.stats(check=False)["incoming"][stage]) for host in hosts.home)

    def data_arrives() -> bool:
        received = sum(host.received_bytes() for host in hosts.home)
        return count("granted") == AT_ONCE and received > before

    if moment == "prefill":
        with stopped(*(host.node for host in hosts.far)):
            yield lambda: count("granted") == AT_ONCE
    elif moment == "transfer":
        for relay in relays:
            relay.change(Conditions(rate_bps=SLOW_BPS))
        try:
            yield data_arrives
        finally:  # what is on its way arrives soon
            for relay in relays:
                relay.change(Conditions())
    else:
        with stopped(*(host.node for host in hosts.home)):
            yield lambda: count("committed") == AT_ONCE


def made_of(hosts: Hosts, relays: list[Relay]) -> Deployment:
    """Its gateway has more patience with nodes that are stopped than these tests take."""
    made = deployment(through(relays, hosts), [node(host) for host in hosts.far])
    return msgspec.structs.replace(made, gateway=with_timeouts(**PATIENT))


def questions(name: str) -> list[GatewayRequest]:
    """Nothing of them is cached, and no engine is asked about their fields."""
    asked = [gateway_request(prompt(LONG, seed), salt=name) for seed in range(AT_ONCE)]
    plain = ("model", "max_tokens", "stream")
    return [replace(one, fields={name: one.fields[name] for name in plain}) for one in asked]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_requests_still_under_way_are_cut_off(
    emulated: Hosts, relays: list[Relay], moment: str
) -> None:
    """Their callers have not cancelled them when the backend ends."""
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(serving(made_of(emulated, relays)))
        with held_up(moment, emulated, relays) as there:
            asked = questions(f"cut off, {moment}")
            answering = [asyncio.create_task(answered(backend, one)) for one in asked]
            await until(there)
            await stack.aclose()
            await asyncio.wait(answering)
            assert all(task.cancelled() for task in answering)
            await until(lambda: reserved(emulated) == 0)
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of the requests for grants that have been written to a connection."""
    written_to: list[str] = []
    send = HttpClient.send

    async def send_and_record(
        self: HttpClient, method: str, url: str, *body: Any, **more: Any
    ) -> Exchange:
        exchange = await send(self, method, url, *body, **more)
        if method == "POST" and url.endswith("/v1/open"):
            written_to.append(url)
        return exchange

    monkeypatch.setattr(HttpClient, "send", send_and_record)
    return written_to


async def test_a_grant_that_comes_after_its_request_was_cut_off_is_given_back(
    emulated: Hosts, opens: list[str]
) -> None:
    def failed() -> int:
        return sum(int(host.stats(check=False)["incoming"]["failed"]) for host in emulated.home)

    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(serving(emulated.deployment()))
        before = failed()
        traces = [RequestTrace(0.0) for _ in range(AT_ONCE)]
        with stopped(*(host.kvd for host in emulated.home)):
            answering = [
                asyncio.create_task(enter(backend, one, trace))
                for one, trace in zip(questions("being opened"), traces, strict=True)
            ]
            await until(lambda: len(opens) == AT_ONCE)
            leaving = asyncio.create_task(stack.aclose())
            await asyncio.wait(answering)
        await leaving
        assert all(trace.granted_s is None for trace in traces)
        # The kvds have made the grants once they could, and every grant has been aborted. An open
        # that a kvd has read after its abort was refused, and has no grant.
        await until(lambda: reserved(emulated) == 0)
        assert before < failed() <= before + AT_ONCE
    await asyncio.to_thread(emulated.wait_until_idle)


async def enter(backend: GatewayBackend, asked: GatewayRequest, trace: RequestTrace) -> None:
    async with backend.answer(asked, trace):
        pass


@pytest.mark.parametrize(
    "moment",
    [pytest.param(one, marks=() if one == "decode" else pytest.mark.slow) for one in MOMENTS],
)
def test_a_gateway_process_leaves_no_grant_behind(
    emulated: Hosts, relays: list[Relay], tmp_path: Path, moment: str
) -> None:
    options = ("--advise", "--set", "gateway.timeouts.drain_s=0.1")
    made = made_of(emulated, relays)
    with (
        ThreadPoolExecutor(AT_ONCE) as clients,
        gateway_process(tmp_path, made, *options, timeouts=PATIENT) as gateway,
    ):

        def complete(seed: int) -> None:
            body = {"model": MODEL, "prompt": prompt(LONG, seed), "max_tokens": 4}
            body["cache_salt"] = f"process, {moment}"
            with suppress(OSError, HTTPException):  # the gateway hangs up
                call("POST", f"{gateway.url}/v1/completions", body)

        gateway.wait_until_all_in_use()
        with held_up(moment, emulated, relays) as there:
            for seed in range(AT_ONCE):
                clients.submit(complete, seed)
            wait_until(there)
            assert gateway.stop() == 0, gateway.output
            wait_until(lambda: reserved(emulated) == 0)
    assert "Traceback" not in gateway.output and "did not" not in gateway.output
    emulated.wait_until_idle()
