"""Bodies that no client should send get status 400 and a JSON error, and cost the node nothing."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prfaas.engine.emulated.pace import Scales
from tests.engine.emulated.builders import emulated
from tests.node.local_api import BYTES, LocalApi, local_api
from tests.waiting import HANG_S

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")


@asynccontextmanager
async def node_server() -> AsyncIterator[LocalApi]:
    engine = emulated(scales=Scales(time=1e-3), vocab_size=264, max_tokens=4096)
    async with asyncio.timeout(HANG_S), local_api(engine, BYTES) as node:
        yield node


async def refusal(node: LocalApi, path: str, body: bytes, **headers: str) -> dict[str, Any]:
    async with node.http.post(path, data=body, headers=headers) as answer:
        text = await answer.text()
        assert (answer.status, answer.content_type) == (400, "application/json"), text
        error: dict[str, Any] = (await answer.json())["error"]
        assert error["code"] == "invalid_request" and error["message"], error
        return error


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_cannot_be_unpacked_is_a_bad_request(path: str) -> None:
    whole = gzip.compress(b'{"prompt": "a"}')
    async with node_server() as node:
        for body in (b"not packed", whole[:-12], whole[:10] + b"\xff" * 20):
            await refusal(node, path, body, **{"Content-Encoding": "gzip"})


async def test_a_refused_value_is_not_quoted_as_a_whole() -> None:
    async with node_server() as node:
        long = b'{"prompt": "a", "n": "' + b"x" * 1_000_000 + b'"}'
        assert len((await refusal(node, "/v1/completions", long))["message"]) < 1_000
        models = b'{"prompt": "a", "model": "' + b"x" * 1_000_000 + b'"}'
        async with node.http.post("/v1/completions", data=models) as answer:
            assert answer.status == 404
            assert len((await answer.json())["error"]["message"]) < 1_000
