"""A node's HTTP API in this process: the emulated engine, a real loop, no kvd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp.test_utils import TestClient, TestServer

from prfaas.clock import MonotonicClock
from prfaas.engine.api import Engine
from prfaas.engine.checkpoint.tokenizer import CHAT_TEMPLATE, build_tokenizer
from prfaas.errors import ConnectionLost
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.node.job_builder import JobBuilder
from prfaas.node.metrics import NodeMetrics
from prfaas.node.request_reader import NodeModel
from prfaas.node.request_runner import RequestRunner, open_request_runner
from prfaas.node.server import NodeApi
from prfaas.text import ModelTokenizer
from prfaas.text.template import ChatTemplate
from prfaas.types import Grant, NotNow, TransferId


class AbsentKvd:
    """What a client answers when its kvd has gone."""

    def begin(
        self,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        grant: Grant | None = None,
        tail: bytes = b"",
        tenant: str = "",
    ) -> WriteLease | NotNow:
        raise ConnectionLost("no kvd here")

    def attach(self, transfer_id: TransferId, attachments: int = 1) -> ReadLease:
        raise ConnectionLost("no kvd here")

    def pin(self, hashes: Sequence[bytes]) -> ReadLease | NotNow:
        raise ConnectionLost("no kvd here")

    def begin_answer(
        self, hashes: Sequence[bytes], tokens: int, *, first_token: int, tenant: str = ""
    ) -> WriteLease | NotNow:
        raise ConnectionLost("no kvd here")


@dataclass(frozen=True, slots=True)
class LocalApi:
    http: TestClient[Any, Any]
    runner: RequestRunner

    async def complete(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post("/v1/completions", json=fields) as answer:
            return answer.status, await answer.json()

    async def stream(self, **fields: Any) -> list[dict[str, Any]]:
        async with self.http.post("/v1/completions", json={**fields, "stream": True}) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            return await pieces(answer)


async def pieces(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """Everything streamed, up to its end mark."""
    *events, done, nothing = (await answer.read()).split(b"\n\n")
    assert done == b"data: [DONE]" and nothing == b""
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


@asynccontextmanager
async def local_api(
    engine: Engine, tokenizer: ModelTokenizer | None = None, *, handler_cancellation: bool = True
) -> AsyncIterator[LocalApi]:
    """`handler_cancellation`: a client that hangs up cancels its handler at once."""
    metrics = NodeMetrics("made-up", 64, engine.limits)
    builder = JobBuilder(AbsentKvd(), 64)
    try:
        async with open_request_runner(engine, builder, metrics, MonotonicClock()) as runner:
            model = NodeModel("made-up", tokenizer)
            server = TestServer(
                NodeApi(model, engine, runner, metrics).application(),
                handler_cancellation=handler_cancellation,
            )
            async with TestClient(server) as client:
                yield LocalApi(client, runner)
    finally:
        engine.close()


Scenario = Callable[[LocalApi], Awaitable[None]]
BYTES = ModelTokenizer(build_tokenizer(), {"default": ChatTemplate(CHAT_TEMPLATE, {})})
