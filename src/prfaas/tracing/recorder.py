"""The spans of one process: the latest ones are kept for whoever asks, and those of sampled traces
go to the exporter.

Everything is bounded: `MOST_TRACES` traces with `MOST_SPANS` spans each, and `MOST_BYTES` of all;
the oldest ones go first. Use it on one thread, or on one event loop.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from prfaas.clock import Clock
from prfaas.tracing.context import TraceContext, new_span_id
from prfaas.tracing.epoch import EpochOffset
from prfaas.tracing.spans import MOST_SPANS, Kind, Service, Span, Value, shown

MOST_TRACES = 256  # a gateway lists its latest 200 requests
MOST_BYTES = 1 << 20  # of the encoded spans
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Span)
_NO_ATTRIBUTES: Mapping[str, Value] = {}


class SpanExporter(Protocol):
    def export(self, span: Span) -> None:
        """Takes a span, or drops it when too many wait. Never blocks, never raises."""


class SpanRecorder:
    def __init__(
        self,
        service: Service,
        clock: Clock,
        node: str = "",
        exporter: SpanExporter | None = None,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self.exporter = exporter
        self._service: Service = service
        self._node = node
        self._clock = clock
        self._to_epoch = EpochOffset(clock, epoch)
        # Encoded: a span is one small block then, not twenty that outlive the request and leave
        # holes in the heap all over what the request has used.
        self._traces: OrderedDict[str, list[bytes]] = OrderedDict()
        self._nbytes = 0

    def now(self) -> float:
        """On the process's clock, for the start of a span."""
        return self._clock.now()

    def record(
        self,
        name: str,
        parent: TraceContext,
        start_s: float,
        end_s: float | None = None,
        *,
        kind: Kind = "internal",
        span_id: str | None = None,
        error: str = "",
        attributes: Mapping[str, Value] = _NO_ATTRIBUTES,
    ) -> Span:
        """Records a span that has ended, with times on the process's clock; without `end_s` it ends
        now. `span_id`: of a span that has made calls, whose context was sent with them."""
        now_s = self._clock.now()
        to_epoch_s = self._to_epoch.seconds()
        span = Span(
            name=name,
            trace_id=parent.trace_id,
            span_id=span_id or new_span_id(),
            start_s=start_s + to_epoch_s,
            end_s=(now_s if end_s is None else end_s) + to_epoch_s,
            service=self._service,
            node=self._node,
            parent_id=parent.span_id,
            kind=kind,
            error=shown(error),
            attributes={name: _bounded(value) for name, value in attributes.items()},
        )
        self._keep(span)
        if parent.sampled and self.exporter is not None:
            self.exporter.export(span)
        return span

    def spans_of(self, trace_id: str) -> list[Span]:
        return [_DECODER.decode(span) for span in self._traces.get(trace_id, ())]

    def _keep(self, span: Span) -> None:
        kept = self._traces.setdefault(span.trace_id, [])
        kept.append(_ENCODER.encode(span))
        self._nbytes += len(kept[-1])
        if len(kept) > MOST_SPANS:
            # A client may have one trace for hundreds of requests: operators ask for the latest.
            self._nbytes -= len(kept.pop(0))
        while len(self._traces) > MOST_TRACES or self._nbytes > MOST_BYTES:
            self._nbytes -= sum(map(len, self._traces.popitem(last=False)[1]))


def _bounded(value: Value) -> Value:
    return shown(value) if isinstance(value, str) else value
