"""The spans that a process keeps and exports."""

from __future__ import annotations

import tracemalloc

from prfaas.tracing.context import TraceContext, new_trace
from prfaas.tracing.recorder import MOST_BYTES, MOST_TRACES, SpanRecorder
from prfaas.tracing.spans import MOST_SPANS, MOST_TEXT, Span


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s


class KeptSpans:
    """An exporter that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, span: Span) -> None:
        self.spans.append(span)


def make(exporter: KeptSpans | None = None) -> tuple[SpanRecorder, ManualClock]:
    clock = ManualClock()
    recorder = SpanRecorder("kvd", clock, "east-1", exporter, epoch=lambda: clock.now_s + 5_000.0)
    return recorder, clock


def test_times_are_those_of_the_epoch() -> None:
    recorder, clock = make()
    clock.now_s = 104.0
    parent = new_trace(sampled=False)
    span = recorder.record("kvd grant", parent, 101.0, 103.0, kind="server")
    assert (span.start_s, span.end_s) == (5_101.0, 5_103.0)
    assert recorder.record("kvd grant", parent, 101.0).end_s == 5_104.0


def test_a_span_has_its_parent_and_its_process() -> None:
    recorder, _ = make()
    parent = new_trace(sampled=False)
    span = recorder.record("kvd grant", parent, 99.0, attributes={"prfaas.transfer.bytes": 3})
    assert (span.trace_id, span.parent_id) == (parent.trace_id, parent.span_id)
    assert (span.service, span.node) == ("kvd", "east-1")
    assert recorder.spans_of(parent.trace_id) == [span]
    assert recorder.spans_of("f" * 32) == []


def test_only_sampled_traces_are_exported() -> None:
    exporter = KeptSpans()
    recorder, _ = make(exporter)
    for sampled in (False, True):
        recorder.record("kvd grant", new_trace(sampled=sampled), 99.0)
    assert len(exporter.spans) == 1


def test_traces_and_their_spans_are_bounded() -> None:
    recorder, _ = make()
    first = new_trace(sampled=False)
    for _ in range(2 * MOST_SPANS):
        recorder.record("kvd grant", first, 99.0, error="x" * 10_000)
    spans = recorder.spans_of(first.trace_id)
    assert len(spans) == MOST_SPANS and len(spans[0].error) == MOST_TEXT
    others = [TraceContext(f"{number:032x}", "1" * 16, False) for number in range(MOST_TRACES)]
    for other in others:
        recorder.record("kvd grant", other, 99.0)
    assert recorder.spans_of(first.trace_id) == []
    assert all(recorder.spans_of(other.trace_id) for other in others)


def test_what_is_kept_has_a_most_in_bytes() -> None:
    """Objects of Python would take several times as much as their content."""
    recorder, _ = make()
    traces = [TraceContext(f"{number:032x}", "1" * 16, False) for number in range(MOST_TRACES)]
    tracemalloc.start()
    for trace in traces:
        for _ in range(MOST_SPANS):
            recorder.record("kvd grant", trace, 99.0, error="x" * MOST_TEXT)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 2 * MOST_BYTES
    kept = [trace for trace in traces if recorder.spans_of(trace.trace_id)]
    assert 1 < len(kept) < MOST_TRACES and kept == traces[-len(kept) :]
    for trace in kept:
        recorder.record("kvd grant", trace, 99.0)
    assert len(recorder.spans_of(traces[-1].trace_id)) == MOST_SPANS
