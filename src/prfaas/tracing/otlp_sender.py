"""Posts spans to a collector with OpenTelemetry's own exporter. Importing this module needs the extra
`otel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from prfaas import __version__
from prfaas.errors import InputError
from prfaas.tracing.spans import Kind, Span

_KINDS: Mapping[Kind, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SCOPE = InstrumentationScope("prfaas", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FINE = Status(StatusCode.UNSET)


class OtlpSender:
    """`url`: None: the variables of OpenTelemetry name it. Used by one thread; another one may
    close it."""

    def __init__(self, url: str | None, service: str, node: str) -> None:
        about = {"service.name": service, "service.version": __version__}
        if node:
            about["service.instance.id"] = node
        self.resource = Resource.create(about)
        try:
            self._exporter = OTLPSpanExporter(endpoint=url)
        except ValueError as error:
            raise InputError(
                f"a variable cannot be used: {error}",
                where="OTEL_EXPORTER_OTLP_*",
                fix="correct it, or unset it",
            ) from None

    def send(self, spans: Sequence[Span]) -> bool:
        """Whether the collector has taken them. Tries for as long as the variables allow (10 s by
        default)."""
        readable = [readable_span(span, self.resource) for span in spans]
        return self._exporter.export(readable) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Ends a wait for the collector."""
        self._exporter.shutdown()


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
