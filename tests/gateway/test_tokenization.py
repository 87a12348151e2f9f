"""The gateway's /tokenize and /detokenize, within its limits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from prfaas.gateway.api.credentials import TenantKey
from prfaas.gateway.api.prompts import THREADS, Prompts
from prfaas.gateway.api.request_preparation import RequestPreparer
from prfaas.gateway.tokenization import MAX_BYTES
from tests.gateway.api.api_server import MAX_TOKENS, api_server
from tests.node.local_api import BYTES
from tests.waiting import HANG_S

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_the_gateway_and_the_node_answer_alike() -> None:
    async with api_server() as server:
        for path, body in (
            ("/tokenize", {"prompt": "some text", "return_token_strs": True}),
            ("/tokenize", CHAT),
            ("/detokenize", {"tokens": BYTES.encode("some text")}),
        ):
            status, found = await server.post(path, body)
            async with server.backend.node.http.post(path, json=body) as answer:
                assert status == answer.status == 200
                assert found == await answer.json()
        _, found = await server.post("/tokenize", CHAT)
        assert found["max_model_len"] == MAX_TOKENS and found["count"] == len(found["tokens"])


async def test_errors_of_both() -> None:
    async with api_server(tokenizer=None) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            status, found = await server.post(path, body)
            assert status == 400 and "no tokenizer" in found["error"]["message"]
            status, found = await server.post(path, {**body, "model": "another"})
            assert (status, found["error"]["code"]) == (404, "model_not_found")
            async with server.backend.node.http.post(
                path, json={**body, "model": "another"}
            ) as answer:
                assert answer.status == 404
            async with server.backend.node.http.post(path, json={**body, "x": 1}) as answer:
                assert (await answer.json())["error"]["param"] == "x"


async def test_bodies_are_limited_and_counted_for_their_tenant() -> None:
    keys = [TenantKey("a", "one")]
    async with api_server(keys=keys, max_in_flight=1) as server:
        key = {"Authorization": "Bearer a"}
        status, found = await server.post("/tokenize", {"prompt": "x" * MAX_BYTES}, **key)
        assert status == 413 and str(MAX_BYTES) in found["error"]["message"]
        assert (await server.post("/tokenize", {"prompt": "x" * 200_000}, **key))[0] == 200
        assert (await server.post("/tokenize", {"prompt": "x"}))[0] == 401


async def test_a_flood_of_one_tenant_does_not_delay_anothers_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixty calls of 250 KB wait for the threads when a prompt of another tenant arrives. It is
    tokenised next."""
    flood = 60
    asked = asyncio.Semaphore(0)  # calls that have a thread or wait for one
    goes_on = threading.Event()
    began: list[str] = []  # in the order in which threads took them
    run, tokenize, tokenise = Prompts.run, RequestPreparer.tokenize, RequestPreparer.tokenise

    async def asking(prompts: Prompts, *given: Any) -> Any:
        asked.release()
        return await run(prompts, *given)

    def of_flood(preparer: RequestPreparer, body: bytes) -> Any:
        began.append("flood")
        assert goes_on.wait(HANG_S) and len(body) > 250_000
        return tokenize(preparer, b'{"prompt": "x"}')  # the whole flood would take its time here

    def of_prompt(preparer: RequestPreparer, parsed: Any) -> Any:
        began.append("prompt")
        return tokenise(preparer, parsed)

    monkeypatch.setattr(Prompts, "run", asking)
    monkeypatch.setattr(RequestPreparer, "tokenize", of_flood)
    monkeypatch.setattr(RequestPreparer, "tokenise", of_prompt)
    keys = [TenantKey("a", "many"), TenantKey("b", "one")]
    async with api_server(keys=keys) as server, asyncio.TaskGroup() as tasks:
        many, one = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        long = {"prompt": "x" * 250_000}
        calls = [tasks.create_task(server.post("/tokenize", long, **many)) for _ in range(flood)]
        for _ in range(flood):
            await asked.acquire()
        prompt = {"prompt": "once upon a time " * 120, "max_tokens": 1}
        asks = tasks.create_task(server.post("/v1/completions", prompt, **one))
        await asked.acquire()
        goes_on.set()
        assert (await asks)[0] == 200
        assert [(await call)[0] for call in calls] == [200] * flood
    assert began.index("prompt") <= THREADS + 1
