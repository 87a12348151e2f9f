"""A gateway that is stopped behind Envoy fails no request, also those that stream."""

from __future__ import annotations

import asyncio
import signal

from tests.envoy.answers import NUMBERS, ask, request_id
from tests.envoy.clients import Http1Client, http2_client
from tests.envoy.deployment import Behind
from tests.envoy.proxy import StartEnvoy
from tests.waiting import wait_until

# Longer than the test takes: it ends both waits itself.
PATIENT = (
    *("--set", "gateway.timeouts.leave_s=600"),
    *("--set", "gateway.timeouts.drain_s=600"),
)
AFTERWARDS = 10


async def test_a_gateway_leaves_without_a_failed_request(
    start_envoy: StartEnvoy, deployment: Behind
) -> None:
    for gateway in deployment.gateways:
        await asyncio.to_thread(gateway.use, *PATIENT)
    with start_envoy() as envoy:
        first = Http1Client(envoy.port, deployment.trust)
        async with http2_client(envoy.port, str(deployment.ca)) as second:
            held = next(NUMBERS)
            reached, go_on = asyncio.Event(), asyncio.Event()
            streaming = asyncio.create_task(
                ask(first, deployment, held, reached=reached, go_on=go_on)
            )
            await reached.wait()
            leaving = await asyncio.to_thread(deployment.gateway_of, held)
            leaving.process.popen.terminate()
            # Between SIGTERM and the health check that notices it, the gateway serves.
            early = await ask(second, deployment, next(NUMBERS))
            await asyncio.to_thread(wait_until, lambda: not envoy.health()[leaving.port])
            leaving.process.popen.send_signal(signal.SIGINT)  # it closes its port now
            staying = deployment.other(leaving)
            later = [
                await ask(client, deployment, next(NUMBERS))
                for client in (first, second)
                for _ in range(AFTERWARDS)
            ]
            go_on.set()
            answer = await streaming
        assert (answer.tokens, answer.done, answer.cut_off) == (4, True, False)
        for one in (early, *later):
            assert (one.status, one.done) == (200, True), one
        served = {outcome.id for outcome in staying.outcomes()}
        assert {request_id(one.number) for one in later} <= served
        assert await asyncio.to_thread(leaving.wait_until_ended) == 0
        for number in (held, early.number, *(one.number for one in later)):
            assert deployment.jobs("decode", number) == 1
