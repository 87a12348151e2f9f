"""The gateway's /tokenize and /detokenize, within its limits."""

from __future__ import annotations

from prfaas.gateway.api.credentials import TenantKey
from prfaas.gateway.tokenization import MAX_BYTES
from tests.gateway.api.api_server import MAX_TOKENS, api_server
from tests.node.local_api import BYTES

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
