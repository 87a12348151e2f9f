"""What `prfaas trace` shows of recorded spans: the waterfall, the causes, a file for Perfetto."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from rich.console import Console

from prfaas.cli.trace_display import print_followed, print_kept
from prfaas.contracts.trace_api import FollowedRequest, KeptRequests
from prfaas.tracing.diagnosis import find_causes
from prfaas.tracing.perfetto import trace_events
from prfaas.tracing.spans import Span
from prfaas.tracing.summary import RequestSummary
from tests.goldens.canonical import Golden

TRACE = "ab" * 16
BEGIN_S = 1_000.0  # since the epoch
# What makes each request slow: names of the parameters of `_handed_off`.
REQUESTS: dict[str, dict[str, float]] = {
    "full_queue": {"queue_s": 3.0},
    "cold_cache": {"prefill_s": 3.0, "predicted_s": 3.125},
    "slow_prefill": {"prefill_s": 3.0, "predicted_s": 0.5},
    "lost_state": {"prefill_s": 3.0, "predicted_s": 3.0, "stateless": 800},
    "slow_link": {"transfer_s": 3.0},
    "busy_decode": {"decode_s": 3.0},
    "nothing_unusual": {},
    "hung_node": {"failed_s": 2.0},
}
AS_JSON = {"slow_link", "hung_node"}


def goldens() -> Iterator[Golden]:
    summaries = []
    for name, times in REQUESTS.items():
        spans, ttft_s = _handed_off(**times)
        summary = _summary(name, ttft_s)
        causes = find_causes(summary, spans, None)
        missing = ("http://10.0.0.1:7080: it has forgotten the trace",)
        followed = FollowedRequest(summary, causes, tuple(spans), missing)
        yield Golden(f"{name}.txt", _printed(partial(_show, followed)))
        if name in AS_JSON:
            yield Golden(f"{name}.json", msgspec.to_builtins(followed))
            yield Golden(f"{name}.perfetto.json", trace_events(summary, spans, causes))
        summaries.append(summary)
    failed = msgspec.structs.replace(summaries[-1], outcome="failed", error="the node was lost")
    kept = KeptRequests(tuple(summaries), tuple(summaries[:3]), (failed,))
    yield Golden("kept.txt", _printed(lambda screen: print_kept(screen, kept)))


def _show(followed: FollowedRequest, screen: Console) -> None:
    print_followed(screen, followed)


def _printed(show: Callable[[Console], None]) -> str:
    out = io.StringIO()
    show(Console(file=out, width=110, highlight=False, color_system=None, force_terminal=False))
    return out.getvalue()


def _summary(name: str, ttft_s: float) -> RequestSummary:
    return RequestSummary(
        id=f"req-{name}",
        trace_id=TRACE,
        at_s=BEGIN_S,
        outcome="completed",
        route="remote",
        home="pd",
        prefill="far-0",
        decode="pd-1",
        prompt_tokens=1_000,
        output_tokens=40,
        ttft_s=ttft_s,
        total_s=ttft_s + 1.0,
    )


class _Spans(list[Span]):
    """Spans with times in seconds since the request began. Names are those that travel."""

    def begin(
        self, name: str, start_s: float, end_s: float, parent: Span | None = None, **more: Any
    ) -> Span:
        parent_id = None if parent is None else parent.span_id
        given: dict[str, Any] = {"service": "gateway", "parent_id": parent_id, **more}
        number = f"{len(self) + 1:016x}"
        span = Span(name, TRACE, number, BEGIN_S + start_s, BEGIN_S + end_s, **given)
        self.append(span)
        return span


def _handed_off(
    *,
    queue_s: float = 0.0,
    prefill_s: float = 0.125,
    transfer_s: float = 0.0,
    decode_s: float = 0.03125,
    predicted_s: float | None = None,
    stateless: float = 0,
    failed_s: float = 0.0,
) -> tuple[list[Span], float]:
    """A request that far-0 prefills and pd-1 decodes; and its time to first token."""
    spans = _Spans()
    began_s = 0.015625 + failed_s
    sent_s = began_s + 0.015625
    computed_s = sent_s + queue_s + prefill_s
    committed_s = computed_s + transfer_s
    first_s = committed_s + decode_s
    end_s = first_s + 1.0
    root = spans.begin("request", 0.0, end_s, kind="server")
    spans.begin("read body", 0.0, 0.0078125, root)
    spans.begin("tokenize", 0.0078125, 0.01171875, root)
    spans.begin("wait for a node", 0.01171875, 0.015625, root)
    if failed_s:
        why = {"prfaas.attempt.failure": "silent node", "prfaas.peer.node": "far-1"}
        error = "far-1 has fallen silent"
        spans.begin("attempt", 0.015625, began_s, root, error=error, attributes=why)
    known = {"prfaas.stateless_tokens": int(stateless)}
    attempt = spans.begin("attempt", began_s, end_s, root, attributes=known)
    spans.begin("grant", began_s, sent_s, attempt, kind="client")
    predicted = {} if predicted_s is None else {"prfaas.predicted_seconds": predicted_s}
    call = spans.begin("prefill", sent_s, computed_s, attempt, kind="client", attributes=predicted)
    far = {"service": "node", "node": "far-0"}
    served = spans.begin("node request", sent_s, computed_s, call, kind="server", **far)
    spans.begin("node queue", sent_s, sent_s + queue_s, served, **far)
    spans.begin("node prefill", sent_s + queue_s, computed_s, served, **far)
    transfer = {"prfaas.transfer.id": "t-1", "prfaas.transfer.bytes": 1 << 30}
    kvds: dict[str, Any] = {"service": "kvd", "attributes": transfer}
    spans.begin("kvd send", sent_s, committed_s, served, node="far-0", **kvds)
    spans.begin("kvd receive", sent_s, committed_s, attempt, node="pd-1", **kvds)
    spans.begin("wait for commit", sent_s, committed_s, attempt)
    decode = spans.begin("decode", committed_s, end_s, attempt, kind="client")
    near = {"service": "node", "node": "pd-1"}
    there = spans.begin("node request", committed_s, end_s, decode, kind="server", **near)
    spans.begin("node queue", committed_s, first_s - 0.015625, there, **near)
    spans.begin("node decode", first_s, end_s, there, **near)
    return spans, first_s
