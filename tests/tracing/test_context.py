"""The W3C trace context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.tracing.context import TraceContext, join_tracestate, new_trace, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True)])
def test_a_header_of_the_standard_is_read(flags: str, sampled: bool) -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert found == TraceContext(TRACE, SPAN, sampled)


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has four fields
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n00",
        f"01-{TRACE}-{SPAN}-01-{'x' * 1000}",
    ],
)
def test_an_invalid_header_counts_as_none(header: str | None) -> None:
    assert parse_traceparent(header) is None


@given(st.booleans())
def test_what_is_sent_can_be_read(sampled: bool) -> None:
    context = new_trace(sampled=sampled)
    assert parse_traceparent(context.traceparent) == context
    child = context.child()
    assert child.trace_id == context.trace_id
    assert child.span_id != context.span_id and child.sampled is sampled


def test_the_clients_state_is_passed_on_with_every_call() -> None:
    state = join_tracestate(["vendor=t61rcWkgMzE", "other=00f067aa0ba902b7"])
    assert state == "vendor=t61rcWkgMzE,other=00f067aa0ba902b7"
    context = new_trace(sampled=True)
    assert context.headers_of("of a call") == {"traceparent": "of a call"}
    child = context._replace(state=state).child()
    assert child.headers_of("of a call") == {"traceparent": "of a call", "tracestate": state}


@pytest.mark.parametrize("header", ["", " ", "a=1\r\nX: 2", "a=\u00e9", "a=\x00", "a=" + "x" * 511])
def test_a_state_that_cannot_be_passed_on_is_left_out(header: str) -> None:
    assert join_tracestate([header]) == ""


@given(st.text(max_size=100))
def test_no_text_raises(text: str) -> None:
    parse_traceparent(text)
