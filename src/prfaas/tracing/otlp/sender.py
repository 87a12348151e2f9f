"""Posts spans to a collector with OpenTelemetry's own exporter: the process of `sender_process.py`.
Importing this module needs the extra `otel`."""

from __future__ import annotations

import logging
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from prfaas import __version__
from prfaas.tracing.otlp.sender_process import About, Reply, read_message, write_message
from prfaas.tracing.spans import Kind, Span, shown

_KINDS: Mapping[Kind, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SCOPE = InstrumentationScope("prfaas", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FINE = Status(StatusCode.UNSET)


class OtlpSender:
    def __init__(self, about: About) -> None:
        """ValueError when a variable of OpenTelemetry cannot be used."""
        attributes = {"service.name": about.service, "service.version": __version__}
        if about.node:
            attributes["service.instance.id"] = about.node
        self.resource = Resource.create(attributes)
        self._exporter = OTLPSpanExporter(endpoint=about.url)

    def send(self, spans: Sequence[Span]) -> bool:
        """Whether the collector has taken them. Tries for as long as the variables allow (10 s by
        default)."""
        readable = [readable_span(span, self.resource) for span in spans]
        return self._exporter.export(readable) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class LastMessage(logging.Handler):
    """The library logs why a collector does not take spans. The parent process logs it, once, in
    its own format."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: deque[str] = deque(maxlen=1)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> str:
        return self._messages.pop() if self._messages else ""


def serve(source: IO[bytes], sink: IO[bytes], messages: LastMessage) -> None:
    """Until the source ends."""
    about = read_message(source, About)
    if about is None:
        return
    try:
        sender = OtlpSender(about)
    except ValueError as error:
        write_message(sink, Reply(str(error) or type(error).__name__))
        return
    write_message(sink, Reply())
    try:
        while (spans := read_message(source, list[Span])) is not None:
            write_message(sink, Reply(_try(sender, spans, messages)))
    finally:
        sender.close()


def _try(sender: OtlpSender, spans: Sequence[Span], messages: LastMessage) -> str:
    try:
        if sender.send(spans):
            return ""
    except Exception as error:  # a defect costs these spans, and not those after them
        return shown(f"{type(error).__name__}: {error}")
    return shown(messages.take() or "the collector has refused them")


def main() -> None:
    # These signals also reach the parent, which has spans to send before it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    messages = LastMessage()
    logging.getLogger().addHandler(messages)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer, messages)
    except BrokenPipeError:
        pass  # the parent has ended


def readable_span(span: Span, resource: Resource) -> ReadableSpan:
    """The span as OpenTelemetry's exporters take it."""
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id, is_remote=False),
        parent=(
            _context(span.trace_id, span.parent_id, is_remote=span.kind == "server")
            if span.parent_id is not None
            else None
        ),
        resource=resource,
        attributes=span.attributes,
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else _FINE,
        start_time=_nanoseconds(span.start_s),
        end_time=_nanoseconds(span.end_s),
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, _SAMPLED)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


if __name__ == "__main__":
    main()
