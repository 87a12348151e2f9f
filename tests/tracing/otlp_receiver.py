"""A collector for tests: takes OTLP over HTTP as protobuf, and keeps every span."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.waiting import PATIENCE_S

_KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    kind: str
    start_s: float
    end_s: float
    service: str
    node: str  # service.instance.id
    error: str
    attributes: Mapping[str, Any]


@dataclass(slots=True)
class OtlpReceiver:
    """Made by `open_receiver`. `hold` keeps calls waiting until it is set again."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)  # of every call
    status: int = 200  # of the next answers
    held: asyncio.Event | None = None  # while it is not set, calls get no answer
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    async def wait_until(self, condition: Callable[[list[ReceivedSpan]], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: condition(self.spans))

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has decompressed it
        if self.held is not None:
            await self.held.wait()
        async with self._arrived:
            self.headers.append(dict(request.headers))
            if self.status == 200:
                self.spans += read_spans(ExportTraceServiceRequest.FromString(body))
            self._arrived.notify_all()
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, status=self.status, content_type="application/x-protobuf")


@asynccontextmanager
async def open_receiver() -> AsyncIterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", receiver.receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        receiver.url = f"http://127.0.0.1:{port}"
        yield receiver
    finally:
        await runner.cleanup()


@contextmanager
def receiver_thread() -> Iterator[OtlpReceiver]:
    """A receiver with an event loop of its own, for tests that block. Its spans may be read at any
    time."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    here: Future[OtlpReceiver] = Future()

    async def serve() -> None:
        async with open_receiver() as receiver:
            here.set_result(receiver)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield here.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        loop.close()


def read_spans(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for resource in request.resource_spans:
        about = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            found += [_received(span, about) for span in scope.spans]
    return found


def _received(span: trace_pb2.Span, about: Mapping[str, Any]) -> ReceivedSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        kind=_KINDS.get(span.kind, str(span.kind)),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        service=str(about.get("service.name", "")),
        node=str(about.get("service.instance.id", "")),
        error=(span.status.message or "failed") if failed else "",
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind is not None else None
