"""The rows of a waterfall: one for each span, below its parent, with a bar on the time axis. Pure.

    request                 ████████████████████████████   2.41 s
      read body             ▏                               3 ms
      attempt               ▕███████████████████████████   2.40 s
        prefill              ████████████████              1.31 s  prfaas-0

Spans of other processes that the gateway could not place, because their parent is unknown, come
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.tracing.spans import Span

_DEEPEST = 8  # levels of indentation
FULL, SHORT, EMPTY = "█", "▏", " "


class Row(NamedTuple):
    depth: int
    name: str
    process: str  # "gateway", "kvd of pd-0", "pd-0"
    start_s: float  # since the request began
    seconds: float
    error: str
    span: Span

    @property
    def label(self) -> str:
        return f"{'  ' * min(self.depth, _DEEPEST)}{self.name}"


def rows_of(spans: Sequence[Span]) -> list[Row]:
    """Each span once: children follow their parent, in the order of their starts."""
    known = {span.span_id for span in spans}
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    children: dict[str, list[Span]] = {}
    roots: list[Span] = []
    for span in ordered:
        parent = span.parent_id
        if parent is None or parent not in known or parent == span.span_id:
            roots.append(span)
        else:
            children.setdefault(parent, []).append(span)
    # The request's own span first: its parent is the client's, which is unknown here.
    roots.sort(key=lambda span: span.service != "gateway")
    begin_s = roots[0].start_s if roots else 0.0
    rows: list[Row] = []
    waiting = [(root, 0) for root in reversed(roots)]
    seen: set[str] = set()
    while waiting:
        span, depth = waiting.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        rows.append(_row(span, depth, begin_s))
        waiting += [(child, depth + 1) for child in reversed(children.get(span.span_id, []))]
    # Spans whose parents form a circle have no root.
    rows += [_row(span, 0, begin_s) for span in ordered if span.span_id not in seen]
    return rows


def _row(span: Span, depth: int, begin_s: float) -> Row:
    start_s = span.start_s - begin_s
    seconds = max(0.0, span.seconds)
    return Row(depth, span.name, process_of(span), start_s, seconds, span.error, span)


def process_of(span: Span) -> str:
    if span.service == "gateway":
        return "gateway"
    return f"kvd of {span.node}" if span.service == "kvd" else span.node


def length_s(rows: Sequence[Row]) -> float:
    """Of the time axis, which begins with the request."""
    return max((row.start_s + row.seconds for row in rows), default=0.0)


def bar(row: Row, axis_s: float, width: int) -> str:
    """The row's bar, with as many characters as the axis. It is at least a thin line."""
    if width <= 0 or axis_s <= 0:
        return EMPTY * max(0, width)
    per_s = width / axis_s
    first = min(width - 1, max(0, int(row.start_s * per_s)))
    last = min(width, max(first, round((row.start_s + row.seconds) * per_s)))
    drawn = FULL * (last - first) or SHORT
    return f"{EMPTY * first}{drawn}".ljust(width)[:width]
