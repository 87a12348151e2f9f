"""One attempt of a request: its route, its calls and their times on the gateway's clock.

Spans are not made here. `following/request_spans.py` makes them from these records when a request
is looked up or exported, so that a request which is neither costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from prfaas.scheduler.request import Route
from prfaas.tracing.context import TraceContext, new_span_id

MOST_WAITS: Final = 8  # of one attempt


class Wait(NamedTuple):
    """Since when the router has held a request for one thing, and why. Until the next wait."""

    at_s: float
    reason: str
    cluster: str  # for whose nodes it waits; empty: no node may take it


class Call(msgspec.Struct, gc=False):
    """A call to a node or a kvd, or several that are made together."""

    span_id: str
    traceparent: str  # as it was sent
    sent_s: float
    answered_s: float | None = None  # None: it was not answered, or failed


class AttemptTrace(msgspec.Struct):
    route: Route
    span_id: str  # of the attempt's own span; the spans of its calls are children of it
    asked_s: float  # the router was asked for nodes
    routed_s: float
    waits: Sequence[Wait] = ()  # empty: the router did not hold the request
    # That the state was expected to need on the link; None: it stays in its cluster.
    transfer_s: float | None = None
    # None: the attempt had no such step, or did not get that far.
    grant: Call | None = None
    copies: Call | None = None  # of prefixes
    prefill: Call | None = None
    decode: Call | None = None  # answered: the first token is here
    committed_s: float | None = None
    transfer_id: str = ""
    ended_s: float | None = None  # None: it ends with the request
    failure: str = ""
    failure_kind: str = ""  # one of `spans.FAILURES`

    def fail(self, failure: str, kind: str, now_s: float) -> None:
        self.failure, self.failure_kind, self.ended_s = failure, kind, now_s


def begin_call(context: TraceContext, now_s: float) -> Call:
    """A call of an attempt of the request that has this context."""
    span_id = new_span_id()
    return Call(span_id, context.traceparent_of(span_id), now_s)
