"""The spans of several processes on one clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.following.alignment import find_shift_s, join_spans
from prfaas.tracing.spans import Span
from tests.gateway.following.builders import span_of

# The gateway's: a request, a short call (grant) and a long one (prefill).
OWN = [
    span_of("1", None, 100.0, 110.0, service="gateway", node="", kind="server"),
    span_of("2", "1", 101.0, 101.2, service="gateway", node="", kind="client"),
    span_of("3", "1", 102.0, 106.0, service="gateway", node="", kind="client"),
]


def shifted(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.span_id[0]: (round(span.start_s, 6), round(span.end_s, 6)) for span in spans}


def test_spans_that_fit_are_not_shifted() -> None:
    served = [
        span_of("a", "3", 102.1, 105.9, kind="server"),
        span_of("b", "a", 103.0, 105.0),
    ]
    assert join_spans(OWN, served) == [*OWN, *served]


@pytest.mark.parametrize("off_s", [-3600.0, -0.5, 0.5, 3600.0])
def test_a_host_whose_clock_differs_is_shifted_as_a_whole(off_s: float) -> None:
    served = [
        span_of("a", "2", 101.05 + off_s, 101.15 + off_s, kind="server", service="kvd"),
        span_of("b", "3", 102.1 + off_s, 105.5 + off_s, kind="server"),
        span_of("c", "b", 103.0 + off_s, 105.0 + off_s),
    ]
    found = shifted(join_spans(OWN, served))
    assert found["a"] == (101.05, 101.15), "the short call says best where the clock is"
    assert found["b"] == (102.1, 105.5) and found["c"] == (103.0, 105.0)


def test_a_span_that_ends_a_moment_after_its_call_is_shifted_by_that_moment() -> None:
    served = [span_of("a", "3", 102.5, 106.002, kind="server")]
    assert shifted(join_spans(OWN, served))["a"] == (102.498, 106.0)


def test_a_server_that_took_longer_than_its_call_is_centred() -> None:
    served = [span_of("a", "2", 50.0, 51.2, kind="server")]
    assert shifted(join_spans(OWN, served))["a"] == (100.5, 101.7)


def test_a_host_that_only_sends_is_shifted_no_more_than_it_must() -> None:
    """Its span follows from a call to another host."""
    for start_s, end_s, expected in (
        (102.0, 104.0, (102.0, 104.0)),  # it fits
        (99.0, 102.0, (101.0, 104.0)),  # it would begin before the grant
        (112.0, 114.0, (108.0, 110.0)),  # it would end after the request
    ):
        served = [span_of("a", "2", start_s, end_s, service="kvd")]
        assert shifted(join_spans(OWN, served))["a"] == expected


def test_hosts_are_shifted_each_by_itself() -> None:
    served = [
        span_of("a", "3", 3.0, 4.0, kind="server", node="far0"),
        span_of("b", "3", 102.5, 103.0, kind="server", node="home0"),
    ]
    found = shifted(join_spans(OWN, served))
    assert found["b"] == (102.5, 103.0) and found["a"] == (103.5, 104.5)


def test_spans_of_other_requests_with_the_same_trace_are_left_out() -> None:
    served = [
        span_of("a", "3", 102.1, 105.9, kind="server"),
        span_of("b", "9", 102.0, 103.0, kind="server"),  # of a call that another gateway made
        span_of("c", "b", 102.0, 103.0),
        span_of("d", None, 102.0, 103.0),
        span_of("1", "3", 102.0, 103.0, name="forged"),  # has the id of the gateway's own span
        span_of("e", "f", 102.0, 103.0),
        span_of("f", "e", 102.0, 103.0),  # a circle
    ]
    assert join_spans(OWN, served) == [*OWN, served[0]]


def test_parents_come_before_their_children() -> None:
    served = [
        span_of("b", "a", 101.9, 105.0),
        span_of("c", "b", 101.5, 105.0),
        span_of("a", "3", 102.1, 105.9, kind="server"),
        span_of("d", "1", 109.0, 109.5),
    ]
    found = join_spans(OWN, served)
    assert [span.span_id[0] for span in found] == ["1", "2", "3", "a", "b", "c", "d"]


@given(
    off_s=st.floats(-1e5, 1e5),
    lead_s=st.floats(0.0, 0.05),
    took_s=st.floats(0.0, 0.1),
)
def test_server_spans_lie_within_their_calls(off_s: float, lead_s: float, took_s: float) -> None:
    start_s = 101.0 + lead_s + off_s
    served = [span_of("a", "2", start_s, start_s + took_s, kind="server")]
    shift_s = find_shift_s({span.span_id: span for span in OWN}, served)
    slack = 1e-6
    assert served[0].start_s + shift_s >= 101.0 - slack
    assert served[0].end_s + shift_s <= 101.2 + slack
    if abs(off_s) < 1e-9:
        assert shift_s == 0.0
