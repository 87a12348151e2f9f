"""The server span of one call: from its arrival until the handler has answered it. Where the caller
has sent no `traceparent`, nothing is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.tracing.context import TraceContext, parse_traceparent
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.spans import Value

DISCONNECTED = "the caller has disconnected"


class ServerSpan:
    """Made by `server_span`. A handler adds what it learns; `error` is for a handler that answers
    with an error, because one that raises needs none."""

    def __init__(self, parent: TraceContext | None) -> None:
        self.parent = parent  # the caller's span; None: the caller has sent none
        self.context = None if parent is None else parent.child()  # of this span, for its children
        self.attributes: dict[str, Value] = {}
        self.error = ""


@contextmanager
def server_span(recorder: SpanRecorder, name: str, traceparent: str | None) -> Iterator[ServerSpan]:
    """`traceparent`: the header of the call."""
    began_s = recorder.now()
    span = ServerSpan(parse_traceparent(traceparent))
    try:
        yield span
    except asyncio.CancelledError:
        span.error = span.error or DISCONNECTED
        raise
    except Exception as error:
        span.error = span.error or str(error) or type(error).__name__
        raise
    finally:
        if span.parent is not None and span.context is not None:
            recorder.record(
                name,
                span.parent,
                began_s,
                kind="server",
                span_id=span.context.span_id,
                error=span.error,
                attributes=span.attributes,
            )
