"""A node's HTTP surface in this process: the emulated engine, a real loop, no kvd."""

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
from prfaas.node.request_runner import RequestRunner, serving
from prfaas.node.server import Model, Surface
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
    ) -> WriteLease | NotNow:
        raise ConnectionLost("no kvd here")

    def attach(self, transfer_id: TransferId) -> ReadLease:
        raise ConnectionLost("no kvd here")

    def pin(self, hashes: Sequence[bytes]) -> ReadLease | NotNow:
        raise ConnectionLost("no kvd here")


@dataclass(frozen=True, slots=True)
class Surfaced:
    http: TestClient[Any, Any]
    serving: RequestRunner

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
async def surfaced(
    engine: Engine, words: ModelTokenizer | None = None, *, hears_of_leaving: bool = True
) -> AsyncIterator[Surfaced]:
    """`hears_of_leaving`: of clients, before anything is written to them."""
    metrics = NodeMetrics("made-up", 64, engine.limits)
    pooling = JobBuilder(AbsentKvd(), 64)
    try:
        async with serving(engine, pooling, metrics, MonotonicClock(), lambda *_: None) as served:
            model = Model("made-up", words)
            server = TestServer(
                Surface(model, engine, served, metrics).application(),
                handler_cancellation=hears_of_leaving,
            )
            async with TestClient(server) as client:
                yield Surfaced(client, served)
    finally:
        engine.close()


Scenario = Callable[[Surfaced], Awaitable[None]]
BYTES = ModelTokenizer(build_tokenizer(), {"default": ChatTemplate(CHAT_TEMPLATE, {})})
