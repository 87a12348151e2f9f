"""The span that a service records for a call."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.errors import InputError
from prfaas.tracing.context import new_trace
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.server_span import DISCONNECTED, server_span
from prfaas.tracing.spans import Span
from tests.tracing.test_recorder import ManualClock

CALLER = new_trace(sampled=False)


def recorded(recorder: SpanRecorder) -> Span:
    (span,) = recorder.spans_of(CALLER.trace_id)
    return span


def test_a_call_has_the_callers_span_as_its_parent() -> None:
    clock = ManualClock()
    recorder = SpanRecorder("kvd", clock, "east-1", epoch=lambda: clock.now_s)
    with server_span(recorder, "kvd grant", CALLER.traceparent) as span:
        assert span.parent == CALLER and span.context is not None
        assert span.context.trace_id == CALLER.trace_id
        span.attributes["prfaas.transfer.bytes"] = 3
        clock.now_s += 2.0
    found = recorded(recorder)
    assert (found.parent_id, found.span_id) == (CALLER.span_id, span.context.span_id)
    assert (found.kind, found.error, found.seconds) == ("server", "", 2.0)
    assert found.attributes == {"prfaas.transfer.bytes": 3}


@pytest.mark.parametrize(
    "error, shown",
    [
        (InputError("is 0", where="tokens"), "tokens: is 0"),
        (ValueError(), "ValueError"),
        (asyncio.CancelledError(), DISCONNECTED),
    ],
)
def test_a_call_that_raises_has_the_error(error: BaseException, shown: str) -> None:
    recorder = SpanRecorder("kvd", ManualClock())
    with (
        pytest.raises(type(error)),
        server_span(recorder, "kvd grant", CALLER.traceparent),
    ):
        raise error
    assert recorded(recorder).error == shown


def test_a_handler_may_name_the_error_of_its_answer() -> None:
    recorder = SpanRecorder("kvd", ManualClock())
    with server_span(recorder, "kvd grant", CALLER.traceparent) as span:
        span.error = "no memory"
    assert recorded(recorder).error == "no memory"


@pytest.mark.parametrize("header", [None, "", "00-abc", "00-" + "0" * 32 + "-" + "1" * 16 + "-01"])
def test_without_a_valid_trace_nothing_is_recorded(header: str | None) -> None:
    recorder = SpanRecorder("kvd", ManualClock())
    with server_span(recorder, "kvd grant", header) as span:
        assert span.parent is None and span.context is None
    assert recorder.spans_of(CALLER.trace_id) == []
