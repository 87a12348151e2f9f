"""Processes that are stopped keep their connections and send nothing: requests without a first
token continue elsewhere, and the node is used again once it continues."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.request import RequestTrace
from tests.gateway.backends import (
    THRESHOLD,
    answered,
    gateway_request,
    in_use,
    is_clean,
    prompt,
    serving,
    tokens_of,
    until,
    with_role,
)
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import with_timeouts
from tests.node.hosts import Process
from tests.waiting import PATIENCE_S

LONG = 2 * THRESHOLD
NEVER_S = 10 * PATIENCE_S  # streams are not given up within a test


@asynccontextmanager
async def gateway(hosts: Hosts) -> AsyncIterator[GatewayBackend]:
    made = msgspec.structs.replace(hosts.deployment(), gateway=with_timeouts(hung_s=NEVER_S))
    async with serving(made) as backend:
        yield backend


async def tokens(backend: GatewayBackend, ids: list[int], trace: RequestTrace) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(PATIENCE_S), backend.answer(gateway_request(ids), trace) as upstream:
        async for together in upstream.events():
            found += [token for event in together for token in tokens_of(event)]
    return found


def alone(hosts: Hosts, ids: list[int]) -> list[int]:
    answer = hosts.home[0].complete(ids, max_tokens=4, cache_salt="alone")
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("part", ["engine", "kvd"])
async def test_a_request_leaves_a_silent_prefill_node(emulated: Hosts, part: str) -> None:
    far = emulated.far[0]
    stopped: Process = far.node if part == "engine" else far.kvd
    first, second = (prompt(LONG, f"{part} {n}") for n in range(2))
    async with gateway(emulated) as backend:
        expected = await asyncio.to_thread(alone, emulated, first)
        (near,) = with_role(backend, "prefill")
        trace = RequestTrace(0.0)
        stopped.popen.send_signal(signal.SIGSTOP)
        try:
            assert await tokens(backend, first, trace) == expected
        finally:
            stopped.popen.send_signal(signal.SIGCONT)
        assert (trace.attempts, trace.prefill, len(trace.failures)) == (2, near, 1)
        # It is used again without help, and its late answers have harmed nothing.
        await until(lambda: any(node["node"] == "far0" for node in in_use(backend)))
        found = await answered(backend, gateway_request(second))
        assert (found.trace.attempts, found.trace.prefill) == (1, "far0")
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)


@pytest.mark.parametrize("part", ["engine", "kvd"])
async def test_a_request_leaves_a_silent_decode_node(emulated: Hosts, part: str) -> None:
    # The whole host: of engines that are lost alone, a request may cost one.
    far = emulated.far[0]
    ids = prompt(LONG, f"decode {part}")
    signalled = [far.node, far.kvd]
    async with gateway(emulated) as backend:
        expected = await asyncio.to_thread(alone, emulated, ids)
        trace = RequestTrace(0.0)
        for process in signalled:  # so that the decode node is known in time
            process.popen.send_signal(signal.SIGSTOP)
        try:
            answering = asyncio.create_task(tokens(backend, ids, trace))
            await until(lambda: trace.granted_s is not None)
            lost = trace.decode
            host = emulated.named(lost)
            stopped = host.node if part == "engine" else host.kvd
            stopped.popen.send_signal(signal.SIGSTOP)
            signalled.append(stopped)
            assert await answering == expected
        finally:
            for process in signalled:
                process.popen.send_signal(signal.SIGCONT)
        assert trace.decode != lost and trace.attempts > 1
        await until(lambda: len(in_use(backend)) == 4)
        await until(lambda: is_clean(backend))
    await asyncio.to_thread(emulated.wait_until_idle)
