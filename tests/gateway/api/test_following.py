"""Requests that operators look up, through the real API."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from prfaas.contracts.trace_api import REQUESTS_PATH, FollowedRequest, KeptRequests
from prfaas.errors import RequestError
from prfaas.gateway.api.credentials import TenantKey
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.waiting import Hold
from prfaas.security.shared_key import SharedKey
from prfaas.tracing import spans as names
from tests.gateway.api.api_server import ApiServer, api_server
from tests.gateway.following.builders import route

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2}
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


async def listed(server: ApiServer, **headers: str) -> KeptRequests:
    status, body = await server.get(REQUESTS_PATH, **headers)
    assert status == 200
    return msgspec.json.decode(body, type=KeptRequests)


async def followed(server: ApiServer, name: str) -> FollowedRequest:
    status, body = await server.get(f"{REQUESTS_PATH}/{name}")
    assert status == 200, body
    return msgspec.json.decode(body, type=FollowedRequest)


async def post(server: ApiServer, body: Any = GOOD, **headers: str) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await server.post("/v1/completions", body, **sent))[0]


async def test_a_request_is_found_by_its_id_and_by_its_trace_id() -> None:
    async with api_server() as server:
        assert await post(server, X_Request_Id="mine-1", traceparent=PARENT) == 200
        assert await post(server, X_Request_Id="mine-2") == 200
        first, second = (await listed(server)).latest[::-1]
        assert (first.id, first.trace_id, first.outcome) == ("mine-1", TRACE_ID, "completed")
        assert second.id == "mine-2" and second.trace_id != TRACE_ID
        found = await followed(server, "mine-1")
        again = await followed(server, TRACE_ID)
        assert [span.span_id for span in again.spans] == [span.span_id for span in found.spans]
        assert (found.request.id, found.missing, found.explanation) == ("mine-1", (), None)
        request = found.spans[0]
        assert (request.name, request.parent_id) == (names.REQUEST, SPAN_ID)
        assert request.attributes[names.REQUEST_ID] == "mine-1"
        assert request.attributes[names.MODEL] == "made-up"
        assert {span.name for span in found.spans} == {
            *(names.REQUEST, names.READ, names.TOKENIZE),
        }
        assert len(found.causes) >= 1
        status, body = await server.get(f"{REQUESTS_PATH}/other")
        assert status == 404 and b"has forgotten it" in body


async def test_a_trace_keeps_the_state_of_its_client() -> None:
    async with api_server() as server:
        assert await post(server, traceparent=PARENT, tracestate="vendor=1,other=2") == 200
        assert server.backend.traces[-1].context.state == "vendor=1,other=2"
        # Without a trace of its own it would tell something about another one.
        assert await post(server, tracestate="vendor=1") == 200
        assert await post(server, traceparent="nonsense", tracestate="vendor=1") == 200
        assert [trace.context.state for trace in server.backend.traces[-2:]] == ["", ""]


async def test_the_backend_is_asked_for_the_spans_of_the_nodes() -> None:
    async with api_server() as server:

        async def attempt() -> None:
            made = server.backend.traces[-1]
            made.begin_attempt(route("far0", "home1"), made.arrived_s)
            made.explanation = Explanation(Hold("test", None, 0.0, 0.0), 7.0, ())

        server.backend.before_answer = attempt
        assert await post(server, {**GOOD, "prompt": [[1, 2], [3]]}, X_Request_Id="list") == 200
        found = await followed(server, "list")
        assert found.missing == ("far0 was not asked", "home1 was not asked")
        assert found.explanation == {"threshold_tokens": 7.0}
        assert [span.name for span in found.spans].count(names.ATTEMPT) == 2
        (summary,) = (await listed(server)).latest
        assert (summary.prefill, summary.decode, summary.prompt_tokens) == ("far0", "home1", 3)


async def test_a_request_in_progress_is_shown_as_such() -> None:
    async with api_server() as server:
        go_on = asyncio.Event()
        server.backend.before_answer = go_on.wait
        asking = asyncio.create_task(post(server, X_Request_Id="slow"))
        await server.backend.arrived.wait()
        (summary,) = (await listed(server)).latest
        assert (summary.id, summary.outcome, summary.total_s > 0) == ("slow", "in progress", True)
        assert (await followed(server, "slow")).request.outcome == "in progress"
        go_on.set()
        assert await asking == 200
        assert (await followed(server, "slow")).request.outcome == "completed"


async def test_failed_requests_have_a_list_of_their_own() -> None:
    async with api_server() as server:

        async def fail() -> None:
            raise RequestError(503, "overloaded", "no node could take the request")

        assert await post(server, X_Request_Id="good") == 200
        assert await post(server, {"prompt": []}, X_Request_Id="bad") == 400
        server.backend.before_answer = fail
        assert await post(server, X_Request_Id="failed") == 503
        found = await listed(server)
        assert [each.id for each in found.latest] == ["failed", "bad", "good"]
        assert [(each.id, each.error) for each in found.failed] == [
            ("failed", "no node could take the request")
        ]
        assert {each.id for each in found.slowest} == {"failed", "good"}


async def test_lists_and_requests_are_for_operators() -> None:
    keys, operator = [TenantKey("secret", "team")], SharedKey(["the operator's key"])
    async with api_server(keys=keys, operator=operator) as server:
        tenant, own = "Bearer secret", "Bearer the operator's key"
        assert await post(server, X_Request_Id="r", Authorization=tenant) == 200
        for path in (REQUESTS_PATH, f"{REQUESTS_PATH}/r"):
            assert (await server.get(path))[0] == 401
            assert (await server.get(path, Authorization=tenant))[0] == 401
            assert (await server.get(path, Authorization=own))[0] == 200
        assert (await listed(server, Authorization=own)).latest[0].tenant == "team"


async def test_the_log_line_has_the_trace_id(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with api_server() as server:
            await post(server, traceparent=PARENT)
            await post(server, traceparent="00-nonsense")
    first, second = [msgspec.json.decode(line.getMessage()) for line in caplog.records]
    assert first["trace_id"] == TRACE_ID
    assert len(second["trace_id"]) == 32 and second["trace_id"] != TRACE_ID
