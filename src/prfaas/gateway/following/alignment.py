"""Joins the spans of the processes that have served a request, on the gateway's clock. Pure.

Clocks of hosts differ. A server answers within the call that it answers, so the spans of a host are
shifted, as a whole, until its server spans lie within the gateway's calls:

    gateway   |------ grant ------|          start of the call  <=  start + shift
    kvd            |-- kvd grant --|    =>   end + shift        <=  end of the call
                   └── shift ──┘

Where several calls are known, the shortest bounds the shift best. A host without a server span,
such as that of a kvd that only sends, is shifted only where its spans would begin before the spans
that caused them, or end after the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from prfaas.tracing.spans import Span

# A server may end its span a moment after the client has the last byte. So much is no evidence that
# the clocks differ, and is corrected by no more than that.
JITTER_S = 0.005


def join_spans(own: Sequence[Span], collected: Sequence[Span]) -> list[Span]:
    """The spans of one request in order of their starts, parents before their children. `own` are
    the gateway's. Collected spans that descend from none of these are of other requests with the
    same trace id, and are left out."""
    by_id = {span.span_id: span for span in own}
    related = _descendants(by_id, collected)
    hosts: dict[str, list[Span]] = {}
    for span in related:
        hosts.setdefault(span.node, []).append(span)
    aligned = [
        msgspec.structs.replace(span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s)
        for spans in hosts.values()
        for shift_s in (find_shift_s(by_id, spans),)
        for span in spans
    ]
    return _in_order([*own, *aligned])


def find_shift_s(own: Mapping[str, Span], spans: Sequence[Span]) -> float:
    """By how much the spans of one host are to be shifted. `own`: the gateway's spans, by id."""
    least_s, most_s = float("-inf"), float("inf")
    for span in spans:
        call = own.get(span.parent_id or "")
        if call is not None and span.kind == "server":
            least_s = max(least_s, call.start_s - span.start_s)
            most_s = min(most_s, call.end_s - span.end_s)
    if least_s == float("-inf"):
        return _loose_shift_s(own, spans)
    if least_s <= 0.0 <= most_s:
        return 0.0
    nearest_s = least_s if least_s > 0.0 else most_s
    if least_s <= most_s and abs(nearest_s) <= JITTER_S:
        return nearest_s
    # Also where a server span is longer than its call: then it begins before and ends after it.
    return (least_s + most_s) / 2


def _loose_shift_s(own: Mapping[str, Span], spans: Sequence[Span]) -> float:
    causes = [(span, own[span.parent_id or ""]) for span in spans if span.parent_id in own]
    if not causes:
        return 0.0
    least_s = max(cause.start_s - span.start_s for span, cause in causes)
    most_s = max(span.end_s for span in own.values()) - max(span.end_s for span in spans)
    if least_s <= 0.0 <= most_s:
        return 0.0
    return least_s if least_s > 0.0 else max(least_s, most_s)


def _descendants(known: Mapping[str, Span], collected: Sequence[Span]) -> list[Span]:
    children: dict[str, list[Span]] = {}
    seen = set(known)
    for span in collected:
        if span.span_id not in seen:  # a process must not replace a span of another one
            seen.add(span.span_id)
            children.setdefault(span.parent_id or "", []).append(span)
    found: list[Span] = []
    parents = list(known)
    while parents:
        for span in children.pop(parents.pop(), ()):
            found.append(span)
            parents.append(span.span_id)
    return found


def _in_order(spans: Sequence[Span]) -> list[Span]:
    by_id = {span.span_id: span for span in spans}

    def place(span: Span) -> tuple[float, int]:
        """A span is placed after its ancestors, also where its clock says otherwise."""
        start_s, depth = span.start_s, 0
        above = by_id.get(span.parent_id or "")
        while above is not None and depth <= len(by_id):
            start_s, depth = max(start_s, above.start_s), depth + 1
            above = by_id.get(above.parent_id or "")
        return start_s, depth

    return sorted(spans, key=place)
