"""Limits of tenants: one tenant at its limit is refused, and the others are served."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from prfaas.contracts.openai import TENANT_HEADER
from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.api.credentials import TenantKey
from prfaas.security.shared_key import SharedKey
from tests.gateway.api.api_server import ApiServer, api_server
from tests.waiting import PATIENCE_S

GOOD = {"model": "made-up", "prompt": [1, 2, 3], "max_tokens": 1}
KEYS = [TenantKey("key-a", "a"), TenantKey("key-b", "b")]
A, B = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
OPERATOR = SharedKey(["operator"])
SLOW = Scales(time=0.1)  # a response of 3000 tokens takes longer than any test


@asynccontextmanager
async def streaming(server: ApiServer, key: dict[str, str], count: int) -> AsyncIterator[int]:
    """Begins so many long streams of a tenant. Yields how many of them the gateway accepted; these
    go on until the block ends."""
    body = msgspec.json.encode({**GOOD, "max_tokens": 3000, "stream": True})
    accepted = 0
    async with AsyncExitStack() as stack:
        for _ in range(count):
            answer = await stack.enter_async_context(
                server.http.post(f"{server.url}/v1/completions", data=body, headers=key)
            )
            accepted += answer.status == 200
        yield accepted


async def refusal(server: ApiServer, key: dict[str, str], body: Any = GOOD) -> dict[str, Any]:
    """The error of a request that a limit refuses."""
    data = msgspec.json.encode(body)
    async with server.http.post(f"{server.url}/v1/completions", data=data, headers=key) as answer:
        assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
        error: dict[str, Any] = (await answer.json())["error"]
        return error


async def test_a_tenant_that_takes_all_it_can_leaves_room_for_another() -> None:
    async with api_server(keys=KEYS, max_in_flight=4, scales=SLOW) as server:
        async with streaming(server, A, 4) as accepted:
            assert accepted == 2
            error = await refusal(server, A)
            assert (error["code"], error["type"]) == ("tenant_limit", "rate_limit_error")
            assert "limit of 2 (half of gateway.max_in_flight" in error["message"]
            assert (await server.post("/v1/completions", GOOD, **B))[0] == 200


async def test_each_choice_of_a_request_counts() -> None:
    async with api_server(keys=KEYS, max_in_flight=8, scales=SLOW) as server:
        body = {**GOOD, "n": 3, "max_tokens": 3000, "stream": True}
        async with server.http.post(f"{server.url}/v1/completions", json=body, headers=A) as answer:
            assert answer.status == 200
            error = await refusal(server, A, {**GOOD, "n": 2})
            assert error["code"] == "tenant_limit" and "5 sequences" in error["message"]
            assert "limit of 4 (half of gateway.max_in_flight" in error["message"]
            assert (await server.post("/v1/completions", {**GOOD, "n": 4}, **B))[0] == 200


async def test_a_request_is_answered_while_another_tenants_choices_fill_the_engine() -> None:
    """The flood's choices need minutes at this engine, which decodes 8 sequences together."""
    body = {**GOOD, "n": 64, "max_tokens": 3000}
    async with api_server(keys=KEYS, scales=SLOW) as server, asyncio.TaskGroup() as tasks:
        floods = []
        async with asyncio.timeout(PATIENCE_S):
            # Those of one request that are there at once, and the first one of the other.
            for sequences in (8, 8 + 1):
                floods.append(tasks.create_task(server.post("/v1/completions", body, **A)))
                while await sequences_at_node(server) < sequences:
                    pass
            status, answer = await server.post("/v1/completions", {**GOOD, "max_tokens": 20}, **B)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
        assert not [flood.result() for flood in floods if flood.done()]
        for flood in floods:
            flood.cancel()


async def test_a_tenant_that_is_alone_is_not_named_to_nodes() -> None:
    """So that nodes keep nothing free for others."""
    for keys, named in ((KEYS[:1], False), (KEYS, True)):
        async with api_server(keys=keys) as server:
            assert (await server.post("/v1/completions", GOOD, **A))[0] == 200
            (request,) = server.backend.requests
            assert (TENANT_HEADER in request.headers) == named


async def test_bodies_that_a_tenant_does_not_complete_leave_room_for_anothers() -> None:
    limits: dict[str, Any] = {
        "max_body_mb": 0.5,
        "max_bodies_mb": 1.0,
        "timeouts": {"body_s": PATIENCE_S},
    }
    async with api_server(keys=KEYS, operator=OPERATOR, **limits) as server:
        writers = [await begin_body(server, "key-a", 450_000) for _ in range(2)]
        await until_held(server, 450_000)
        body = {**GOOD, "user": "x" * 300_000}
        assert (await server.post("/v1/completions", body, **B))[0] == 200
        for writer in writers:
            writer.close()


async def test_prompt_tokens_count_until_the_first_token() -> None:
    limits: dict[str, Any] = {"tenants": {"a": {"max_queued_tokens": 100}}}
    async with api_server(keys=KEYS, scales=SLOW, **limits) as server:
        async with streaming(server, A, 2) as accepted:
            assert accepted == 2, "streams that have begun do not count"
        held = asyncio.Event()
        server.backend.before_answer = held.wait
        server.backend.arrived.clear()
        waiting = asyncio.create_task(
            server.post("/v1/completions", {**GOOD, "prompt": [1] * 80}, **A)
        )
        await server.backend.arrived.wait()
        error = await refusal(server, A, {**GOOD, "prompt": [1] * 21})
        assert error["code"] == "tenant_limit"
        assert "101 prompt tokens" in error["message"]
        assert "limit of 100 (gateway.tenants.a.max_queued_tokens)" in error["message"]
        held.set()
        assert (await waiting)[0] == 200
        assert (await server.post("/v1/completions", {**GOOD, "prompt": [1] * 21}, **A))[0] == 200


async def test_a_body_over_the_limit_is_refused_while_it_arrives() -> None:
    limits: dict[str, Any] = {
        "tenants": {"a": {"max_bodies_mb": 0.5}},
        "timeouts": {"body_s": PATIENCE_S},
    }
    async with api_server(keys=KEYS, operator=OPERATOR, **limits) as server:
        writer = await begin_body(server, "key-a", 300_000)
        await until_held(server, 300_000)
        error = await refusal(server, A, {**GOOD, "user": "x" * 300_000})
        assert error["code"] == "tenant_limit"
        assert "limit of 500000 (gateway.tenants.a.max_bodies_mb)" in error["message"]
        status, answer = await server.post("/v1/completions", {**GOOD, "user": "x" * 600_000}, **A)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        writer.close()


async def sequences_at_node(server: ApiServer) -> float:
    """That it decodes, or that wait for a slot there."""
    async with server.backend.node.http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


async def begin_body(server: ApiServer, key: str, nbytes: int) -> asyncio.StreamWriter:
    """Sends so many bytes of a body whose end does not come."""
    _, writer = await asyncio.open_connection(*server.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (key.encode(), nbytes + 1)
    )
    writer.write(b" " * nbytes)
    return writer


async def until_held(server: ApiServer, nbytes: int) -> None:
    """Until the bodies that have arrived take at least so many bytes."""
    async with asyncio.timeout(PATIENCE_S):
        while await gauge(server, "prfaas_gateway_body_bytes") < nbytes:
            pass


async def gauge(server: ApiServer, name: str) -> float:
    _, page = await server.get("/metrics", Authorization="Bearer operator")
    lines: Sequence[str] = page.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


async def test_decompressed_bytes_count_also_of_requests_that_are_refused() -> None:
    """A body of few bytes may be very many. One of 250,000 token lengths is refused, and its tenant
    pays for reading it; so does the tenant of one that is too large for its path."""
    bomb = gzip.compress(msgspec.json.encode({"prompt": "x" * 2_000_000}))
    assert len(bomb) < 8_000  # the account is not in debt for what arrives
    packed = {"Content-Encoding": "gzip"}
    section: dict[str, Any] = {"tenant_default": {"max_tokens_per_minute": 10_000}}
    for path, refusal_status in ("/v1/completions", 400), ("/tokenize", 413):
        async with api_server(keys=KEYS, **section) as server:
            assert (await server.post("/v1/completions", GOOD, **A))[0] == 200
            status, _ = await server.post(path, bomb, **A, **packed)
            assert status == refusal_status
            error = await refusal(server, A)
            assert "10000 prompt tokens per minute" in error["message"]
            assert (await server.post("/v1/completions", GOOD, **B))[0] == 200
