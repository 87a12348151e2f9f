"""Builds the spans of a request for tests: gateway, prefill node, decode node and their kvds."""

from __future__ import annotations

from prfaas.tracing.spans import ATTEMPT, REQUEST, Kind, Service, Span, Value
from prfaas.tracing.summary import RequestSummary

TRACE = "ab" * 16
BEGIN_S = 1_000.0  # since the epoch


class SpanList:
    """Spans by name, with times in seconds since the request began."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        parent: Span | None = None,
        *,
        service: Service = "gateway",
        node: str = "",
        error: str = "",
        kind: Kind = "internal",
        **attributes: Value,
    ) -> Span:
        span = Span(
            name,
            TRACE,
            f"{len(self.spans) + 1:016x}",
            BEGIN_S + start_s,
            BEGIN_S + end_s,
            service,
            node,
            None if parent is None else parent.span_id,
            kind,
            error,
            {name.replace("__", "."): value for name, value in attributes.items()},
        )
        self.spans.append(span)
        return span

    def request(self, end_s: float) -> Span:
        return self.add(REQUEST, 0.0, end_s, kind="server")

    def attempt(self, start_s: float, end_s: float, error: str = "") -> Span:
        root = self.spans[0]
        return self.add(ATTEMPT, start_s, end_s, root, error=error)


def summary(
    *,
    ttft_s: float | None = None,
    total_s: float = 0.0,
    prompt_tokens: int = 1_000,
    cached_tokens: int = 0,
    outcome: str = "completed",
    error: str = "",
    decode: str = "pd-1",
    prefill: str = "far-0",
) -> RequestSummary:
    return RequestSummary(
        id="req-1",
        trace_id=TRACE,
        at_s=BEGIN_S,
        outcome=outcome,
        route="remote",
        home="pd",
        prefill=prefill,
        decode=decode,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        ttft_s=ttft_s,
        total_s=max(total_s, ttft_s or 0.0),
        error=error,
    )
