"""Lists of prompts through the API, over a node in this process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway.request import GatewayRequest, RequestTrace, Upstream
from tests.gateway.api.api_server import ApiServer, OneNode, api_server
from tests.gateway.backends import until

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
FIELDS = {"prompt": PROMPTS, "max_tokens": 3, "temperature": 0.0, "return_token_ids": True}


async def pieces(server: ApiServer, **fields: Any) -> list[Any]:
    body = {**FIELDS, "stream": True, **fields}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        *events, nothing = (await answer.read()).split(b"\n\n")
    assert nothing == b""
    data = [event.removeprefix(b"data: ") for event in events]
    return [one if one == b"[DONE]" else json.loads(one) for one in data]


async def alone(server: ApiServer) -> list[Any]:
    """The answers to the prompts, asked for one by one."""
    bodies = []
    for prompt in PROMPTS:
        status, body = await server.post("/v1/completions", {**FIELDS, "prompt": prompt})
        assert status == 200
        bodies.append(body)
    return bodies


async def test_the_answers_are_those_of_the_single_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            single = await alone(server)
            status, whole = await server.post("/v1/completions", FIELDS)
            streamed = await pieces(server, stream_options={"include_usage": True})
            page = (await server.get("/metrics"))[1].decode()
    assert status == 200
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    expected = [body["choices"][0]["token_ids"] for body in single]
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    assert whole["usage"].items() >= usage.items()
    *tokens, total, done = streamed
    assert done == b"[DONE]" and total["choices"] == []
    assert total["usage"].items() >= usage.items()
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for piece in tokens:
        for choice in piece["choices"]:
            found[choice["index"]] += choice["token_ids"]
    assert list(found.values()) == expected
    assert len({(one["id"], one["created"], one["model"]) for one in [*tokens, total]}) == 1
    # One request of the client is one line and one count; the tokens are those of all prompts.
    assert len(caplog.records) == 5
    for record in caplog.records[3:]:
        line = json.loads(record.getMessage())
        assert (line["prompt_tokens"], line["output_tokens"], line["attempts"]) == (9, 9, 3)
        assert (line["outcome"], line["route"]) == ("completed", "local")
        assert [one["prompt_tokens"] for one in line["prompts"]] == [3, 2, 4]
        assert [one["output_tokens"] for one in line["prompts"]] == [3, 3, 3]
    assert 'prfaas_gateway_prompt_tokens_total{route="local"} 27.0' in page
    assert 'outcome="completed",path="/v1/completions",route="local"} 5.0' in page


async def test_usage_is_hidden_from_clients_that_did_not_request_it() -> None:
    async with api_server() as server:
        shown = await pieces(server)
    assert shown[-1] == b"[DONE]" and all(one["choices"] for one in shown[:-1])


async def test_texts_and_long_bodies() -> None:
    """A long body is prepared by a worker process."""
    async with api_server() as server:
        texts = {"prompt": ["a", "bc"], "max_tokens": 1}
        status, body = await server.post("/v1/completions", texts)
        assert status == 200 and body["usage"]["prompt_tokens"] == 3
        texts["user"] = "x" * 70_000
        status, body = await server.post("/v1/completions", texts)
        assert status == 200 and body["usage"]["prompt_tokens"] == 3


async def test_engines_get_one_request_for_each_prompt() -> None:
    async with api_server() as server:
        async with server.http.post(
            f"{server.url}/v1/completions", json=FIELDS, headers={"X-Request-Id": "mine"}
        ) as answer:
            assert answer.headers["X-Request-Id"] == "mine"
        sent = server.backend.requests
    assert [one.token_ids.array.tolist() for one in sent] == PROMPTS
    assert [one.id for one in sent] == ["mine-0", "mine-1", "mine-2"]


Choose = Callable[[GatewayRequest], Exception | None]


def failing(
    monkeypatch: pytest.MonkeyPatch, before: Choose, after: Choose = lambda request: None
) -> tuple[list[int], list[int]]:
    """Requests fail before or after their first token. The others never end. Returns the prompts
    that have begun, and those that have ended."""
    begun: list[int] = []
    ended: list[int] = []

    class Answer:
        def __init__(self, request: GatewayRequest) -> None:
            self._request = request

        async def events(self) -> AsyncIterator[list[bytes]]:
            body = b'{"id": "a", "choices": [{"index": 0, "text": "x"}]}'
            yield [b"data: " + body + b"\n\n" if self._request.stream else body]
            error = after(self._request)
            if error is not None:
                raise error
            await asyncio.Event().wait()

    @asynccontextmanager
    async def answer(
        _: OneNode, request: GatewayRequest, trace: RequestTrace
    ) -> AsyncIterator[Upstream]:
        number = int(request.id.rpartition("-")[2])
        begun.append(number)
        try:
            error = before(request)
            if error is not None:
                raise error
            yield Answer(request)
        finally:
            ended.append(number)

    monkeypatch.setattr(OneNode, "answer", answer)
    return begun, ended


def only(number: int, error: Exception) -> Choose:
    return lambda request: error if request.id.endswith(f"-{number}") else None


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_byte_is_the_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    full = RequestError(503, "no_capacity", "no node has room", retry_after_s=3.0)
    _, ended = failing(monkeypatch, lambda request: full)
    async with api_server() as server:
        body = {**FIELDS, "stream": stream}
        async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
            assert (await answer.json())["error"]["code"] == "no_capacity"
    assert ended


@pytest.mark.parametrize(
    "error", [StreamBroken("the node went away"), RequestError(503, "x", "the node went away")]
)
async def test_an_error_after_the_first_byte_ends_the_stream_and_all_calls(
    monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = failing(monkeypatch, lambda request: None, after=only(1, error))
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            *shown, last = await pieces(server)
    assert all(piece["choices"] for piece in shown) and last["error"]["code"] == "engine_lost"
    assert "the node went away" in last["error"]["message"]
    assert sorted(ended) == sorted(begun)
    (line,) = [json.loads(record.getMessage()) for record in caplog.records]
    assert line["outcome"] == "broken" and len(line["prompts"]) == 3


async def test_the_calls_of_a_client_that_leaves_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = failing(monkeypatch, lambda request: None)
    async with api_server() as server:
        body = {**FIELDS, "stream": True}
        async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
            assert await answer.content.readuntil(b"\n\n")
            await until(lambda: len(begun) == 3)
            answer.close()
        await until(lambda: len(ended) == 3)
    assert sorted(begun) == sorted(ended) == [0, 1, 2]


async def test_a_list_counts_as_the_requests_that_are_under_way_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, _ = failing(monkeypatch, lambda request: None)
    async with api_server(max_in_flight=2) as server:
        body = {**FIELDS, "stream": True}
        async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
            assert await answer.content.readuntil(b"\n\n")
            await until(lambda: len(begun) == 2)
            status, refused = await server.post("/v1/completions", {**FIELDS, "prompt": [1]})
            assert status == 429 and "max_in_flight = 2" in refused["error"]["message"]
            assert sorted(begun) == [0, 1], "the third prompt waits for one of the others"
    async with api_server(max_in_flight=1) as server:
        monkeypatch.undo()
        status, whole = await server.post("/v1/completions", FIELDS)
        assert status == 200 and len(whole["choices"]) == 3


async def test_a_list_is_not_explained_as_one_request() -> None:
    async with api_server() as server:
        status, body = await server.post("/prfaas/v1/explain", FIELDS)
        assert status == 400 and body["error"]["param"] == "prompt"


async def test_a_gateway_that_stops_ends_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend cancels the task of each prompt that is under way, not that of the request."""

    def stop(request: GatewayRequest) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    begun, ended = failing(monkeypatch, lambda request: None, after=stop)
    async with api_server() as server:
        *_, last = await pieces(server)
        assert "shutting down" in last["error"]["message"]
        status, body = await server.post("/v1/completions", FIELDS)
        assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert ended and sorted(begun) == sorted(ended)
