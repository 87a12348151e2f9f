"""The API's rules: request ids, limits, keys, and the usage and errors that clients see."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from prfaas.engine.emulated.pace import Scales
from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway import tokenization
from prfaas.gateway.api.credentials import REGISTER, TenantKey
from prfaas.gateway.client.node_client import NodeResponse
from prfaas.gateway.request import GatewayRequest, RequestTrace, Upstream
from prfaas.security.shared_key import SharedKey
from prfaas.types import Form
from tests.gateway.api.api_server import ApiServer, OneNode, api_server
from tests.gateway.client.test_node_client import serving

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2}


async def events(server: ApiServer, **fields: Any) -> list[bytes]:
    body = {**GOOD, "stream": True, **fields}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        return (await answer.read()).removesuffix(b"\n\n").split(b"\n\n")


def requests_with(outcome: str, page: str) -> float:
    """Requests that have ended so, of all paths and routes."""
    found = re.findall(
        rf'^prfaas_gateway_requests_total{{outcome="{outcome}",.*}} (\S+)$', page, re.M
    )
    return sum(map(float, found))


async def test_clients_see_the_usage_that_they_requested() -> None:
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
        assert "prfaas_gateway_requests_in_flight 0.0" in page
        assert "prfaas_gateway_nodes 1.0" in page, "the metrics of the backend are included"


async def test_usage_counts_what_the_prefill_of_a_hand_off_had_cached() -> None:
    """The decode engine only knows what the hand-off has brought."""
    async with api_server() as server:

        async def hand_off() -> None:
            trace = server.backend.traces[-1]
            trace.form, trace.cached_tokens = "canonical", 2

        server.backend.before_answer = hand_off
        shown = await events(server, seed=1, stream_options={"include_usage": True})
        streamed = json.loads(shown[-2].removeprefix(b"data: "))
        async with server.http.post(f"{server.url}/v1/completions", json=GOOD) as answer:
            whole = await answer.json()
        for body in (streamed, whole):
            assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
            assert body["usage"]["prompt_tokens"] == 3 and body["model"]
        assert whole["choices"][0]["text"] is not None


async def test_a_valid_request_id_is_kept_and_others_are_replaced() -> None:
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
            async with server.http.post(
                f"{server.url}/v1/completions",
                json={**GOOD, "stream": True},
                headers={"X-Request-Id": "good"},
            ) as answer:
                assert answer.headers["X-Accel-Buffering"] == "no"  # nginx passes events on
                await answer.read()
            await server.post("/v1/completions", {"prompt": "x", "n": 0}, **{"X-Request-Id": "bad"})
    good, bad = (json.loads(record.getMessage()) for record in caplog.records)
    assert (good["id"], good["outcome"], good["output_tokens"]) == ("good", "completed", 2)
    assert good["prompt_tokens"] == 3 and good["total_s"] >= good["ttft_s"] > 0
    assert (bad["id"], bad["outcome"], bad["route"]) == ("bad", "rejected", "none")
    assert (good["form"], bad["form"]) == ("", ""), "neither was handed off"
    assert "n" in bad["error"]


async def test_the_form_of_a_hand_off_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only hand-offs that have committed count."""
    forms: list[tuple[Form, float | None]] = [("native", 1.0), ("canonical", 1.0), ("native", None)]
    found = iter(forms)
    plain = OneNode.answer

    @asynccontextmanager
    async def handed_off(
        self: OneNode, request: GatewayRequest, trace: RequestTrace
    ) -> AsyncIterator[Upstream]:
        trace.form, trace.committed_s = next(found)
        async with plain(self, request, trace) as answer:
            yield answer

    monkeypatch.setattr(OneNode, "answer", handed_off)
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            for _ in forms:
                assert (await server.post("/v1/completions", GOOD))[0] == 200
            page = (await server.get("/metrics"))[1].decode()
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["form"] for line in lines] == [form for form, _ in forms]
    for form in ("native", "canonical"):
        assert f'prfaas_gateway_handoffs_total{{form="{form}",route="local"}} 1.0' in page


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m" * 500_000},
        {"logit_bias": {str(n): 1.0 for n in range(200_000)}},
        {"x" * 500_000: 1, "y": "z" * 600_000},
    ],
    ids=["model", "entries", "name"],
)
async def test_log_lines_and_error_bodies_are_bounded(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with api_server() as server:
            status, answer = await server.post("/v1/completions", {**GOOD, **fields})
    assert status in (400, 404)
    assert len(msgspec.json.encode(answer)) < 2000
    assert max(len(record.getMessage()) for record in caplog.records) < 2000


@pytest.mark.parametrize("padding", [0, 200_000])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/chat/completions", {"messages": 5}),
    ],
)
async def test_a_request_for_another_model_gets_404_before_its_prompt_is_parsed(
    path: str, fields: dict[str, Any], padding: int
) -> None:
    async with api_server() as server:
        body = {**fields, "user": "x" * padding, "model": "another"}
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["param"] == "model"


async def test_answers_that_do_not_stream_have_no_time_to_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            await server.post("/v1/completions", GOOD)
            await events(server)
            page = (await server.get("/metrics"))[1].decode()
    assert 'prfaas_gateway_time_to_first_token_seconds_count{route="local"} 1.0' in page
    assert 'prfaas_gateway_request_duration_seconds_count{route="local"} 2.0' in page
    whole, streamed = (json.loads(record.getMessage()) for record in caplog.records)
    assert whole["ttft_s"] is None and streamed["ttft_s"] > 0


async def test_a_client_that_leaves_after_the_last_event_has_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            server.backend.stays_open = True
            body = msgspec.json.encode({**GOOD, "stream": True})
            # A client that does not keep its connection for the next request.
            leaving = aiohttp.TCPConnector(force_close=True)
            async with (
                aiohttp.ClientSession(connector=leaving) as http,
                http.post(f"{server.url}/v1/completions", data=body) as answer,
            ):
                received = b""
                while b"[DONE]" not in received:
                    received += await answer.content.readany()
            await server.backend.ended.wait()
            page = ""
            counted = 'prfaas_gateway_request_duration_seconds_count{route="local"} 1.0'
            while counted not in page:
                page = (await server.get("/metrics"))[1].decode()
    (line,) = (json.loads(record.getMessage()) for record in caplog.records)
    assert line["outcome"] == "completed"


async def test_requests_over_the_limit_get_429_with_retry_after() -> None:
    async with api_server(max_in_flight=1, scales=Scales(time=0.1)) as server:
        slow = asyncio.create_task(server.post("/v1/completions", {**GOOD, "max_tokens": 3000}))
        await server.backend.arrived.wait()
        body = msgspec.json.encode(GOOD)
        async with server.http.post(f"{server.url}/v1/completions", data=body) as answer:
            assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["type"] == "rate_limit_error"
        assert (await server.get("/health"))[0] == 200
        slow.cancel()
        await server.backend.ended.wait()
        status = 429
        while status == 429:  # the slow request ends when its socket closes
            status, _ = await server.post("/v1/completions", GOOD)
        assert status == 200


async def test_the_bytes_of_all_bodies_are_bounded() -> None:
    async with api_server(max_body_mb=1.0, max_bodies_mb=1.0, scales=Scales(time=0.1)) as server:
        body = {**GOOD, "user": "x" * 600_000, "max_tokens": 3000}
        slow = asyncio.create_task(server.post("/v1/completions", body))
        await server.backend.arrived.wait()
        status, answer = await server.post("/v1/completions", body)
        assert status == 503 and "exceed" in answer["error"]["message"]
        assert (await server.post("/v1/completions", GOOD))[0] == 200
        slow.cancel()


async def test_each_tenant_has_its_own_salts() -> None:
    keys = [TenantKey("a", "one"), TenantKey("b", "two"), TenantKey("c", "one"), TenantKey("d", "")]

    async with api_server(keys=keys, operator=SharedKey(["operator"])) as server:

        async def salt(key: str, **fields: Any) -> str:
            body = {**GOOD, **fields, "max_tokens": 1}
            status, _ = await server.post("/v1/completions", body, Authorization=f"Bearer {key}")
            assert status == 200
            found = server.backend.requests[-1].salt
            # The operator may ask where a tenant's request would go: its own cache counts.
            tenant = {key.secret: key.tenant for key in keys}[key]
            status, answer = await server.post(
                f"/prfaas/v1/explain?tenant={tenant}", body, Authorization="Bearer operator"
            )
            assert (status, answer["salt"]) == (200, found)
            return found

        one, two = await salt("a"), await salt("b")
        assert one == await salt("c") != two and await salt("d") == ""
        mine = await salt("a", cache_salt="mine")
        assert len({one, two, mine, await salt("b", cache_salt="mine"), ""}) == 5
        # A client cannot reach another tenant's cache by sending its salt.
        assert await salt("d", cache_salt=one) not in (one, two, mine)


async def test_every_path_but_those_of_probes_requires_a_key() -> None:
    operator, member = SharedKey(["operator"]), SharedKey(["member"])
    keys = [TenantKey("right", "")]
    async with api_server(keys=keys, operator=operator, member=member) as server:
        closed = ("/v1/models", "/prfaas/v1/state", "/prfaas/v1/plan", "/metrics", "/nowhere")
        for path in closed:
            assert (await server.get(path))[0] == 401
        for path in ("/health", "/live", "/ready", "/openapi.json"):
            assert (await server.get(path))[0] == 200
        # Each key opens its own paths only.
        opened = {
            "right": {"/v1/models"},
            "operator": {"/prfaas/v1/state", "/prfaas/v1/plan", "/metrics"},
            "member": set(),
        }
        for key, paths in opened.items():
            for path in closed[:-1]:
                status, _ = await server.get(path, Authorization=f"Bearer {key}")
                assert status == (200 if path in paths else 401), (key, path)
        for key in ("right", "operator", "member"):
            status, _ = await server.post(REGISTER, {}, Authorization=f"Bearer {key}")
            assert status == (400 if key == "member" else 401)
        for header in ("Bearer wrong", "Basic right", "Bearer", "right", "Bearer r\udcffght"):
            status, body = await server.get("/v1/models", Authorization=header)
            assert status == 401 and b"invalid_api_key" in body
        status, _ = await server.get("/v1/models", Authorization="bearer right")
        assert status == 200
        page = (await server.get("/metrics", Authorization="Bearer operator"))[1].decode()
        refused = len(closed) + (3 + 1 + 4) + 2 + 5
        assert f"prfaas_gateway_unauthorized_requests_total {refused}.0" in page


async def test_state_plan_explain_and_register() -> None:
    async with api_server(member=SharedKey(["member"])) as server:
        assert json.loads((await server.get("/prfaas/v1/state"))[1]) == {"nodes": 1}
        assert json.loads((await server.get("/prfaas/v1/plan"))[1]) == {"threshold_tokens": 1}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        status, answer = await server.post("/prfaas/v1/explain", chat)
        assert status == 200 and answer["prompt_tokens"] > 2 and not server.backend.requests
        status, answer = await server.post(
            REGISTER, {"kvd_url": "http://x"}, Authorization="Bearer member"
        )
        assert status == 400 and not server.backend.heartbeats


class _Endless:
    """A stream without an end, as fast as the gateway reads it."""

    def __init__(self) -> None:
        self.nbytes = 0

    async def events(self) -> AsyncIterator[list[bytes]]:
        event = b"data: " + b"x" * 10_000 + b"\n\n"
        while True:
            self.nbytes += len(event)
            yield [event]


async def test_a_slow_client_slows_down_reading_from_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = _Endless()
    monkeypatch.setattr(OneNode, "answer", answering(endless))

    async with api_server(timeouts={"stall_s": 0.5}) as server:
        _, writer = await asyncio.open_connection(*server.address, limit=1024)
        body = msgspec.json.encode({**GOOD, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while not requests_with("stalled", (await server.get("/metrics"))[1].decode()):
            pass
        writer.close()
        # The gateway reads little more than the kernel's buffers of both ends hold.
        assert 0 < endless.nbytes < 32_000_000


async def test_a_client_that_reads_a_byte_at_a_time_gives_its_slot_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffers between it and the engine are bounded, and another client does not wait."""
    endless, released, whole = _Endless(), asyncio.Event(), OneNode.answer

    @asynccontextmanager
    async def answer(
        node: OneNode, request: GatewayRequest, trace: RequestTrace
    ) -> AsyncIterator[Upstream]:
        if not request.stream:
            async with whole(node, request, trace) as upstream:
                yield upstream
            return
        try:
            yield endless
        finally:
            released.set()

    monkeypatch.setattr(OneNode, "answer", answer)
    async with api_server(timeouts={"stall_s": 1.0}) as server:
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.setblocking(False)
            await loop.sock_connect(slow, server.address)
            body = msgspec.json.encode({**GOOD, "stream": True})
            head = f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}"
            await loop.sock_sendall(slow, head.encode() + b"\r\n\r\n" + body)
            while not released.is_set():
                assert await loop.sock_recv(slow, 1)
                assert (await server.post("/v1/completions", GOOD))[0] == 200
        assert 0 < endless.nbytes < 32_000_000
        while not requests_with("stalled", (await server.get("/metrics"))[1].decode()):
            pass


class _Whole:
    """An answer that is far larger than what the kernel keeps for a client that does not read."""

    async def events(self) -> AsyncIterator[list[bytes]]:
        yield [b'{"choices":[{"text":"' + b"x" * (32 << 20) + b'"}]}']


class Unread:
    """A client that asks for a whole answer, and reads no more than its beginning."""

    def __init__(self, server: ApiServer, path: str) -> None:
        body = msgspec.json.encode({**GOOD, "prompt": "hi"})
        head = f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}\r\n\r\n"
        self._server, self._request = server, head.encode() + body
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        self._socket.setblocking(False)

    async def ask(self) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, self._server.address)
        await loop.sock_sendall(self._socket, self._request)
        return await loop.sock_recv(self._socket, len(b"HTTP/1.1 200"))

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_whole_answer_that_nobody_reads_counts_as_a_request(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Otherwise unread answers take memory without a limit, with a few connections."""
    monkeypatch.setattr(OneNode, "answer", answering(_Whole()))
    monkeypatch.setattr(tokenization, "_encoded", lambda work, data: b"%33554432d" % 0)
    async with api_server(max_in_flight=2) as server:
        first, second, third = (Unread(server, path) for _ in range(3))
        assert [await first.ask(), await second.ask()] == [b"HTTP/1.1 200"] * 2
        assert await third.ask() == b"HTTP/1.1 429"
        first.close()
        while (await server.post(path, {**GOOD, "prompt": "hi"}))[0] != 200:
            pass
        second.close()
        third.close()


async def test_whole_answers_in_memory_count_like_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of one answer says nothing about many of them."""

    async def big(request: web.Request) -> web.Response:
        return web.Response(body=b'{"choices": [], "text": "%s"}' % (b"x" * (20 << 20)))

    @asynccontextmanager
    async def answer(*_: object) -> AsyncIterator[NodeResponse]:
        async with client.answer("/v1/completions", b"{}", {}, stream=False) as response:
            yield response

    monkeypatch.setattr(OneNode, "answer", answer)
    async with serving(big) as client, api_server(max_bodies_mb=30.0) as server:
        unread = Unread(server, "/v1/completions")
        assert await unread.ask() == b"HTTP/1.1 200"
        status, body = await server.post("/v1/completions", GOOD)
        assert status == 503 and body["error"]["code"] == "overloaded"
        unread.close()
        while (await server.post("/v1/completions", GOOD))[0] != 200:
            pass
        page = (await server.get("/metrics"))[1].decode()
        assert "prfaas_gateway_body_bytes 0.0" in page


async def test_a_client_that_does_not_read_a_whole_answer_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneNode, "answer", answering(_Whole()))
    async with api_server(timeouts={"stall_s": 0.5}) as server:
        unread = Unread(server, "/v1/completions")
        assert await unread.ask() == b"HTTP/1.1 200"
        while not requests_with("stalled", (await server.get("/metrics"))[1].decode()):
            pass
        unread.close()


async def test_a_whole_answer_is_sent_as_fast_as_its_client_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What counts is that it reads, not how long it takes for all."""
    monkeypatch.setattr(OneNode, "answer", answering(_Whole()))
    async with api_server() as server:
        status, answer = await server.post("/v1/completions", GOOD)
        assert status == 200 and len(answer["choices"][0]["text"]) == 32 << 20
        assert requests_with("completed", (await server.get("/metrics"))[1].decode()) == 1


async def test_a_client_that_disconnects_during_a_stream_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(OneNode, "answer", answering(_Endless()))

    async with api_server() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        body = msgspec.json.encode({**GOOD, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"data:")
        writer.transport.abort()
        while not requests_with("cancelled", (await server.get("/metrics"))[1].decode()):
            pass
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class _Lost:
    async def events(self) -> AsyncIterator[list[bytes]]:
        yield [b'data: {"choices":[{"text":"a"}]}\n\n']
        raise StreamBroken("node went away")


class _Context:
    """The context of `Backend.answer`: yields `upstream`, or refuses the request."""

    def __init__(self, upstream: Upstream | None) -> None:
        self._upstream = upstream

    async def __aenter__(self) -> Upstream:
        if self._upstream is None:
            raise RequestError(503, "no_capacity", "all nodes are busy", retry_after_s=2.5)
        return self._upstream

    async def __aexit__(self, *_: object) -> None:
        return None


def answering(upstream: Upstream | None) -> Any:
    def answer(self: OneNode, request: GatewayRequest, trace: Any) -> _Context:
        return _Context(upstream)

    return answer


async def test_an_engine_lost_after_the_first_token_ends_the_stream_with_an_error_event(
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
        assert requests_with("broken", page) == 2


async def test_a_refusal_of_the_backend_carries_retry_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneNode, "answer", answering(None))

    async with api_server() as server:
        for stream in (True, False):
            body = {**GOOD, "stream": stream}
            async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
                assert (await answer.json())["error"]["code"] == "no_capacity"
