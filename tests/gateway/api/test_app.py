"""The server's own rules: names, limits, keys, what clients see of usage and of failures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.api.api_keys import TenantKey
from prfaas.gateway.request import GatewayRequest, RequestError, StreamBroken, Upstream
from tests.gateway.api.fronts import ApiServer, OneNode, api_server

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2}


async def events(server: ApiServer, **fields: Any) -> list[bytes]:
    body = {**GOOD, "stream": True, **fields}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        return (await answer.read()).removesuffix(b"\n\n").split(b"\n\n")


async def test_usage_is_shown_to_those_who_asked() -> None:
    async with api_server() as server:
        hidden = await events(server, seed=1)
        shown = await events(server, seed=1, stream_options={"include_usage": True})
        assert hidden[-1] == shown[-1] == b"data: [DONE]"
        assert len(shown) == len(hidden) + 1
        usage = json.loads(shown[-2].removeprefix(b"data: "))["usage"]
        assert usage["completion_tokens"] == 2
        page = (await server.get("/metrics"))[1].decode()
        assert 'prfaas_gateway_output_tokens_total{route="local"} 4.0' in page
        assert 'prfaas_gateway_prompt_tokens_total{route="local"} 6.0' in page
        assert "prfaas_gateway_in_flight 0.0" in page
        assert "prfaas_gateway_nodes 1.0" in page, "what the back counts is shown, too"


async def test_requests_keep_a_sane_name_and_get_one_otherwise() -> None:
    async with api_server() as server:
        for sent, kept in (("mine-1", True), ("no spaces", False), ("x" * 200, False)):
            for body in (GOOD, {"prompt": []}):
                async with server.http.post(
                    f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": sent}
                ) as answer:
                    name = answer.headers["X-Request-Id"]
            assert (name == sent) is kept and name


async def test_one_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            await server.post("/v1/completions", GOOD, **{"X-Request-Id": "good"})
            await server.post("/v1/completions", {"prompt": "x", "n": 2}, **{"X-Request-Id": "bad"})
    good, bad = (json.loads(record.getMessage()) for record in caplog.records)
    assert (good["id"], good["outcome"], good["output_tokens"]) == ("good", "completed", 2)
    assert good["prompt_tokens"] == 3 and good["total_s"] >= good["ttft_s"] > 0
    assert (bad["id"], bad["outcome"], bad["route"]) == ("bad", "rejected", "none")
    assert "n" in bad["error"]


async def test_a_client_that_leaves_after_the_last_event_has_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            server.backend.stays_open = True
            body = msgspec.json.encode({**GOOD, "stream": True})
            async with server.http.post(f"{server.url}/v1/completions", data=body) as answer:
                received = b""
                while b"[DONE]" not in received:
                    received += await answer.content.readany()
                answer.close()
            await server.backend.left.wait()
            page = ""
            while "prfaas_gateway_requests_total{" not in page:
                page = (await server.get("/metrics"))[1].decode()
    (line,) = (json.loads(record.getMessage()) for record in caplog.records)
    assert line["outcome"] == "completed"


async def test_more_than_the_limit_are_told_to_come_back() -> None:
    async with api_server(max_in_flight=1, scales=Scales(time=0.1)) as server:
        slow = asyncio.create_task(server.post("/v1/completions", {**GOOD, "max_tokens": 3000}))
        await server.backend.came.wait()
        body = msgspec.json.encode(GOOD)
        async with server.http.post(f"{server.url}/v1/completions", data=body) as answer:
            assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["type"] == "rate_limit_error"
        assert (await server.get("/health"))[0] == 200
        slow.cancel()
        await server.backend.left.wait()
        status = 429
        while status == 429:  # the server hears of it when the socket closes
            status, _ = await server.post("/v1/completions", GOOD)
        assert status == 200


async def test_long_requests_are_bounded_together() -> None:
    async with api_server(max_body_mb=1.0, max_bodies_mb=1.0, scales=Scales(time=0.1)) as server:
        body = {**GOOD, "user": "x" * 600_000, "max_tokens": 3000}
        slow = asyncio.create_task(server.post("/v1/completions", body))
        await server.backend.came.wait()
        status, answer = await server.post("/v1/completions", body)
        assert status == 503 and "at once" in answer["error"]["message"]
        assert (await server.post("/v1/completions", GOOD))[0] == 200
        slow.cancel()


async def test_salts_are_the_tenants_own() -> None:
    keys = [TenantKey("a", "one"), TenantKey("b", "two"), TenantKey("c", "one"), TenantKey("d", "")]

    async with api_server(keys=keys) as server:

        async def salt(key: str, **fields: Any) -> str:
            status, told = await server.post(
                "/prfaas/v1/explain", {**GOOD, **fields}, Authorization=f"Bearer {key}"
            )
            assert status == 200
            found: str = told["salt"]
            return found

        one, two = await salt("a"), await salt("b")
        assert one == await salt("c") != two and await salt("d") == ""
        mine = await salt("a", cache_salt="mine")
        assert len({one, two, mine, await salt("b", cache_salt="mine"), ""}) == 5
        # Nobody gets at another's cache by naming its salt.
        assert await salt("d", cache_salt=one) not in (one, two, mine)


async def test_keys_are_asked_for_where_prompts_are() -> None:
    async with api_server(keys=[TenantKey("right", "")]) as server:
        for path in ("/v1/models", "/prfaas/v1/state", "/prfaas/v1/plan", "/nowhere"):
            assert (await server.get(path))[0] == 401
        for path in ("/health", "/metrics", "/openapi.json"):
            assert (await server.get(path))[0] == 200
        for header in ("Bearer wrong", "Basic right", "Bearer", "right", "Bearer r\udcffght"):
            status, body = await server.get("/v1/models", Authorization=header)
            assert status == 401 and b"invalid_api_key" in body
        status, _ = await server.get("/v1/models", Authorization="bearer right")
        assert status == 200
        page = (await server.get("/metrics"))[1].decode()
        assert "prfaas_gateway_unauthorized_total 9.0" in page


async def test_paths_that_are_not_there_have_openais_shape_too() -> None:
    async with api_server() as server:
        status, body = await server.get("/nowhere")
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
        status, body = await server.get("/v1/completions")
        assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")


async def test_registering_and_asking_about_routes() -> None:
    async with api_server() as server:
        assert json.loads((await server.get("/prfaas/v1/state"))[1]) == {"nodes": 1}
        assert json.loads((await server.get("/prfaas/v1/plan"))[1]) == {"threshold_tokens": 1}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        status, told = await server.post("/prfaas/v1/explain", chat)
        assert status == 200 and told["prompt_tokens"] > 2 and not server.backend.asked
        status, told = await server.post("/prfaas/v1/register", {"kvd_url": "http://x"})
        assert status == 400 and not server.backend.beats


class _Endless:
    """As fast as it is read."""

    def __init__(self) -> None:
        self.nbytes = 0

    async def events(self) -> AsyncIterator[list[bytes]]:
        event = b"data: " + b"x" * 10_000 + b"\n\n"
        while True:
            self.nbytes += len(event)
            yield [event]


async def test_an_engine_is_not_read_ahead_of_a_slow_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = _Endless()
    monkeypatch.setattr(OneNode, "answer", answering(endless))

    async with api_server(stall_s=0.5) as server:
        _, writer = await asyncio.open_connection(*server.address, limit=1024)
        body = msgspec.json.encode({**GOOD, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while 'outcome="stalled"' not in (await server.get("/metrics"))[1].decode():
            pass
        writer.close()
        # What the kernel's buffers of both ends hold, and little more.
        assert 0 < endless.nbytes < 32_000_000


async def test_a_client_that_leaves_in_mid_stream_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OneNode, "answer", answering(_Endless()))

    async with api_server() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        body = msgspec.json.encode({**GOOD, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"data:")
        writer.transport.abort()
        while 'outcome="cancelled"' not in (await server.get("/metrics"))[1].decode():
            pass
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class _Lost:
    async def events(self) -> AsyncIterator[list[bytes]]:
        yield [b'data: {"choices":[{"text":"a"}]}\n\n']
        raise StreamBroken("node went away")


class _Context:
    """An answer that is not the node's."""

    def __init__(self, upstream: Upstream | None) -> None:
        self._upstream = upstream

    async def __aenter__(self) -> Upstream:
        if self._upstream is None:
            raise RequestError(503, "no_capacity", "everything is busy", retry_after_s=2.5)
        return self._upstream

    async def __aexit__(self, *_: object) -> None:
        return None


def answering(upstream: Upstream | None) -> Any:
    def answer(self: OneNode, ask: GatewayRequest, story: Any) -> _Context:
        return _Context(upstream)

    return answer


async def test_an_engine_lost_behind_the_first_token_is_an_event_and_no_end_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneNode, "answer", answering(_Lost()))

    async with api_server() as server:
        first, last = await events(server)
        assert b'"a"' in first
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "engine_lost" and "went away" in error["message"]
        status, whole = await server.post("/v1/completions", GOOD)
        assert status == 502 and whole["error"]["code"] == "engine_lost"
        page = (await server.get("/metrics"))[1].decode()
        assert page.count('outcome="broken"') == 2  # the counter, and when it was made


async def test_what_the_back_refuses_says_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneNode, "answer", answering(None))

    async with api_server() as server:
        for stream in (True, False):
            body = {**GOOD, "stream": stream}
            async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
                assert (await answer.json())["error"]["code"] == "no_capacity"
