"""What Envoy retries when a gateway dies or refuses a request, and that no request is served twice:
no engine begins to decode it a second time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from tests.envoy.answers import NUMBERS, Answer, ask, request_id
from tests.envoy.clients import Client, Http1Client, http2_client
from tests.envoy.deployment import Behind, Gateway
from tests.envoy.proxy import Envoy, StartEnvoy, cluster_of, route_of
from tests.waiting import wait_until

MOST_REQUESTS = (
    200  # until Envoy has chosen the gateway that is down: one of two is chosen at random
)
# What a client would send to have its request repeated.
GREEDY = {"x-envoy-retry-on": "5xx,reset", "x-envoy-max-retries": "3"}


async def in_thread(call: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(call)


def without_health_checks(settings: dict[str, Any]) -> None:
    """Envoy learns only from a request that a gateway is down."""
    del cluster_of(settings)["health_checks"]


async def test_a_gateway_that_is_down_costs_no_request(
    start_envoy: StartEnvoy, deployment: Behind
) -> None:
    with start_envoy(without_health_checks) as envoy:
        down, up = deployment.gateways
        await in_thread(down.kill)
        client = Http1Client(envoy.port, deployment.trust)
        numbers = []
        for _ in range(MOST_REQUESTS):
            numbers.append(next(NUMBERS))
            answer = await ask(client, deployment, numbers[-1], tokens=2)
            assert (answer.status, answer.done) == (200, True), answer
            if envoy.counter("upstream_rq_retry_success"):
                break
        assert envoy.counter("upstream_rq_retry_success") == 1
        assert {deployment.jobs("decode", number) for number in numbers} == {1}
        served = {outcome.id for outcome in up.outcomes()}
        assert {request_id(number) for number in numbers} <= served


async def kill_when(
    deployment: Behind, client: Client, number: int, *, first_token: bool, **headers: str
) -> tuple[Answer, Gateway]:
    """Sends the request and kills its gateway, before or after the first token has arrived."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    asking = asyncio.create_task(
        ask(
            client,
            deployment,
            number,
            headers=headers,
            allowed=int(first_token),
            reached=reached,
            go_on=go_on,
        )
    )
    gateway: Gateway = await in_thread(lambda: deployment.gateway_of(number))
    if first_token:
        await reached.wait()
    await in_thread(gateway.kill)
    go_on.set()
    return await asking, gateway


@pytest.mark.parametrize("headers", [{}, GREEDY], ids=["plain", "greedy"])
async def test_a_request_that_was_sent_is_not_sent_again(
    envoy: Envoy, deployment: Behind, headers: dict[str, str]
) -> None:
    """The gateway dies after it has the request and before it has begun to answer."""
    number = next(NUMBERS)
    async with http2_client(envoy.port, str(deployment.ca)) as client:
        answer, gateway = await kill_when(deployment, client, number, first_token=False, **headers)
    assert (answer.status, answer.tokens) == (503, 0)
    error = json.loads(answer.body)["error"]
    assert "upstream_reset_before_response_started" in error["code"] and error["message"]
    await in_thread(deployment.wait_until_idle)  # the node noticed it and stopped
    assert deployment.jobs("decode", number) == 1
    assert not deployment.lines(request_id(number))
    # The proxy goes on with the other gateway.
    await in_thread(lambda: wait_until(lambda: not envoy.health()[gateway.port]))
    async with http2_client(envoy.port, str(deployment.ca)) as client:
        answer = await ask(client, deployment, next(NUMBERS))
    assert (answer.status, answer.done) == (200, True)


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
async def test_a_stream_that_has_begun_ends(
    envoy: Envoy, deployment: Behind, protocol: str
) -> None:
    """The client can tell the end of a lost stream from that of a complete one."""
    number = next(NUMBERS)
    opened: Any = (
        http2_client(envoy.port, str(deployment.ca))
        if protocol == "HTTP/2"
        else nullcontext(Http1Client(envoy.port, deployment.trust))
    )
    async with opened as client:
        answer, _ = await kill_when(deployment, client, number, first_token=True)
    assert (answer.status, answer.tokens, answer.done) == (200, 1, False)
    assert answer.cut_off
    await in_thread(deployment.wait_until_idle)
    assert deployment.jobs("decode", number) == 1


@pytest.mark.parametrize("condition", ["5xx", "gateway-error", "reset"])
async def test_conditions_that_serve_a_request_twice(
    start_envoy: StartEnvoy, deployment: Behind, condition: str
) -> None:
    """docs/proxies.md warns of them. This is also the proof that the tests above would see it."""

    def with_condition(settings: dict[str, Any]) -> None:
        route_of(settings)["retry_policy"]["retry_on"] = condition

    with start_envoy(with_condition) as envoy:
        number = next(NUMBERS)
        client = Http1Client(envoy.port, deployment.trust)
        asking = asyncio.create_task(kill_when(deployment, client, number, first_token=False))
        await in_thread(lambda: wait_until(lambda: deployment.jobs("decode", number) == 2))
        deployment.allow(number)
        answer, _ = await asking
        assert (answer.status, answer.tokens) == (200, 4)


async def test_what_the_gateway_refuses_is_not_retried(
    start_envoy: StartEnvoy, deployment: Behind
) -> None:
    """Envoy retries 503. The gateway has waited for a node already, and the other gateway has the
    same nodes."""
    for gateway in deployment.gateways:
        await in_thread(partial(gateway.use, "--set", "gateway.timeouts.queue_s=0.5"))
    with start_envoy(without_health_checks) as envoy, deployment.no_node():
        async with http2_client(envoy.port, str(deployment.ca)) as client:
            refused = await ask(client, deployment, next(NUMBERS))
    assert refused.status == 503 and "retry-after" in refused.headers
    assert json.loads(refused.body)["error"]["code"] == "overloaded"
    assert "x-envoy-ratelimited" not in refused.headers  # clients need not see it
    await in_thread(lambda: wait_until(lambda: bool(deployment.lines(request_id(refused.number)))))
    assert len(deployment.lines(request_id(refused.number))) == 1
