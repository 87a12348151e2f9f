from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from prfaas.clock import MonotonicClock
from prfaas.errors import InputError
from prfaas.measure.client import TimedResponse, connect
from tests.measure.servers import DONE, Handler, event, serving, stream, token

USAGE = event(
    choices=[],
    usage={
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)


async def asked(handler: Handler, **options: Any) -> TimedResponse:
    async with serving(handler) as url:
        async with connect(url, MonotonicClock(), **options) as target:
            return await target.complete(b"{}")


async def test_tokens_their_moments_and_usage() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        split = token(8, 9, text="cd")
        pieces = (token(7, text="ab"), b": ping\n\n", split[:9], split[9:], USAGE, DONE)
        return await stream(request, *pieces)

    response = await asked(handler)
    assert response.error is None
    assert (response.token_ids, response.text, len(response.event_times_s)) == (
        [7, 8, 9],
        "abcd",
        2,
    )
    assert (response.prompt_tokens, response.output_tokens, response.cached_tokens) == (5, 3, 4)
    assert (
        response.sent_s
        <= response.event_times_s[0]
        <= response.event_times_s[1]
        <= response.ended_s
    )


async def test_the_key_is_sent() -> None:
    seen = []

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return await stream(request, token(1), DONE)

    assert (await asked(handler, key="secret")).error is None
    assert seen == ["Bearer secret"]


ERROR = {"error": {"message": "no", "code": "overloaded"}}


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((DONE,), "no token"),
        ((token(1),), "stream cut short"),
        ((token(1), event(**ERROR)), "stream failed overloaded"),
        ((b"data: nonsense\n\n",), "not a completion event"),
    ],
)
async def test_streams_that_fail(pieces: tuple[bytes, ...], error: str) -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, *pieces)

    assert (await asked(handler)).error == error


async def test_statuses_and_lost_connections() -> None:
    async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(ERROR, status=503)

    async def hangs_up(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def says_nothing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    assert (await asked(refuses)).error == "HTTP 503 overloaded"
    assert (await asked(hangs_up)).error == "connection lost (ServerDisconnectedError)"
    assert (await asked(says_nothing, timeout_s=0.2)).error == "timeout"


async def test_a_server_that_is_not_there_and_a_model_it_has_not() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response()

    with pytest.raises(InputError, match="does not serve 'other'"):
        await asked(handler, model="other")

    with pytest.raises(InputError, match="no response.*check that the server is running"):
        async with connect("http://127.0.0.1:9", MonotonicClock()):
            pass


async def test_a_response_without_a_stream_and_a_given_request_id() -> None:
    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        whole = {"choices": [{"text": "ab", "token_ids": [7, 8]}], "usage": {"prompt_tokens": 5}}
        named = {"X-Request-Id": request.headers["X-Request-Id"]}
        return web.json_response(whole, headers=named)

    async with serving(handler) as url, connect(url, MonotonicClock()) as target:
        response = await target.complete(b"{}", request_id="mine")
    assert (
        response.error is None and response.token_ids == [7, 8] and len(response.event_times_s) == 1
    )
    assert response.request_id == "mine" and response.prompt_tokens == 5
