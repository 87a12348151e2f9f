"""A request as Chrome trace events, which https://ui.perfetto.dev opens. Pure.

Every process of the deployment is a process there: the gateway first, then nodes and kvds in the
order of their first spans. Spans of one process that overlap without one containing the other have
a thread each, because a thread's events must nest. Arrows lead from a call to the span that serves
it in another process, and from the kvd that sends a state to the kvd that receives it.

Format: "Trace Event Format", with events X (complete), M (metadata), s and f (flow).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prfaas.tracing.spans import KVD_RECEIVE, KVD_SEND, TRANSFER_ID, Span
from prfaas.tracing.summary import Cause, RequestSummary
from prfaas.tracing.waterfall import process_of


def trace_events(
    request: RequestSummary, spans: Sequence[Span], causes: Sequence[Cause]
) -> dict[str, Any]:
    """The content of the file. Times are microseconds since the first span."""
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    begin_s = ordered[0].start_s if ordered else request.at_s
    processes = _processes(ordered)
    threads: dict[str, list[list[Span]]] = {}
    places: dict[str, tuple[int, int]] = {}
    for span in ordered:
        process = process_of(span)
        thread = _thread_for(span, threads.setdefault(process, []))
        places[span.span_id] = (processes[process], thread)
    events = [_process_name(name, number) for name, number in processes.items()]
    events += [_complete(span, begin_s, *places[span.span_id]) for span in ordered]
    known = {span.span_id: span for span in ordered}
    for span in ordered:
        parent = known.get(span.parent_id or "")
        if parent is not None and process_of(parent) != process_of(span):
            at_s = min(max(span.start_s, parent.start_s), parent.end_s) - begin_s
            arrow = _arrow("call", span.span_id, at_s, span.start_s - begin_s)
            events += _placed(arrow, places[parent.span_id], places[span.span_id])
    for sender, receiver in _transfers(ordered):
        # A receiver's span begins with the grant, before the sender's, and ends with the last byte.
        from_s, to_s = sender.start_s - begin_s, receiver.end_s - begin_s
        arrow = _arrow("transfer", sender.span_id, from_s, max(from_s, to_s))
        events += _placed(arrow, places[sender.span_id], places[receiver.span_id])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "request": request.id,
            "trace_id": request.trace_id,
            "causes": [cause.text for cause in causes],
        },
    }


def _processes(spans: Sequence[Span]) -> dict[str, int]:
    names = dict.fromkeys(process_of(span) for span in spans)
    first = sorted(names, key=lambda name: name != "gateway")  # stable
    return {name: number for number, name in enumerate(first, start=1)}


def _thread_for(span: Span, threads: list[list[Span]]) -> int:
    """The number of the first thread on which the span nests. Each thread is the stack of its open
    spans."""
    for number, open_spans in enumerate(threads, start=1):
        while open_spans and open_spans[-1].end_s <= span.start_s:
            open_spans.pop()
        if not open_spans or span.end_s <= open_spans[-1].end_s:
            open_spans.append(span)
            return number
    threads.append([span])
    return len(threads)


def _process_name(name: str, number: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}


def _complete(span: Span, begin_s: float, process: int, thread: int) -> dict[str, Any]:
    details: dict[str, Any] = {"span_id": span.span_id, **span.attributes}
    if span.parent_id is not None:
        details["parent_id"] = span.parent_id
    if span.error:
        details["error"] = span.error
    return {
        "ph": "X",
        "name": span.name,
        "cat": f"{span.service},error" if span.error else span.service,
        "pid": process,
        "tid": thread,
        "ts": _microseconds(span.start_s - begin_s),
        "dur": _microseconds(max(0.0, span.seconds)),
        "args": details,
    }


def _transfers(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """The spans of sender and receiver of every transfer that both have recorded."""
    receivers = {
        span.attributes[TRANSFER_ID]: span
        for span in spans
        if span.name == KVD_RECEIVE and TRANSFER_ID in span.attributes
    }
    senders = [span for span in spans if span.name == KVD_SEND]
    pairs = [(span, receivers.get(span.attributes.get(TRANSFER_ID, ""))) for span in senders]
    return [(sender, receiver) for sender, receiver in pairs if receiver is not None]


def _arrow(name: str, span_id: str, from_s: float, to_s: float) -> list[dict[str, Any]]:
    """A flow: its ends belong to the spans of their threads that are open at these times."""
    common = {"name": name, "cat": name, "id": f"{name} {span_id}", "bp": "e"}
    return [
        {**common, "ph": "s", "ts": _microseconds(from_s)},
        {**common, "ph": "f", "ts": _microseconds(to_s)},
    ]


def _placed(
    arrow: list[dict[str, Any]], source: tuple[int, int], target: tuple[int, int]
) -> list[dict[str, Any]]:
    places = [{"pid": process, "tid": thread} for process, thread in (source, target)]
    return [{**event, **place} for event, place in zip(arrow, places, strict=True)]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
