"""The cause that a diagnosis names first, for requests whose spans are written down here."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.dispatch.handoff import AttemptFailed
from prfaas.gateway.fleet.liveness import FellSilent
from prfaas.tracing.diagnosis import find_causes
from prfaas.tracing.prefill_time import PrefillTime, split_prefill
from prfaas.tracing.sentences import duration
from prfaas.tracing.spans import (
    ATTEMPT,
    BACK_OFF,
    CLUSTER,
    COMMIT,
    COPIES,
    CUT,
    DECODE,
    FAILURE,
    GRANT,
    KVD_SEND,
    LOST,
    NBYTES,
    NO_MEMORY,
    NO_STATE,
    NODE_DECODE,
    NODE_LEASE,
    NODE_PREFILL,
    NODE_QUEUE,
    NODE_REQUEST,
    OTHER,
    PREDICTED,
    PREFILL,
    READ,
    REASON,
    SILENT,
    STATELESS_TOKENS,
    TOKENIZE,
    WAIT,
    Span,
)
from prfaas.tracing.summary import Cause, CauseKind, RequestSummary
from prfaas.types import NodeId
from tests.tracing.spans_of import SpanList, summary


def handed_off(
    *,
    queue_s: float = 0.0,
    prefill_s: float = 0.1,
    transfer_s: float = 0.0,
    decode_s: float = 0.02,
    predicted_s: float | None = None,
    node_spans: bool = True,
    stateless: int = 0,
) -> tuple[SpanList, float]:
    """A request that far-0 prefills and pd-1 decodes; and its time to first token."""
    spans = SpanList()
    sent_s = 0.03
    computed_s = sent_s + queue_s + prefill_s
    committed_s = computed_s + transfer_s
    first_s = committed_s + decode_s
    spans.request(first_s + 1.0)
    spans.add(READ, 0.0, 0.005, spans.spans[0])
    spans.add(WAIT, 0.005, 0.006, spans.spans[0])
    attempt = spans.attempt(0.006, first_s + 1.0)
    attempt.attributes[STATELESS_TOKENS] = stateless
    spans.add(GRANT, 0.01, 0.02, attempt, kind="client")
    call = spans.add(PREFILL, sent_s, computed_s + 0.001, attempt, kind="client")
    if predicted_s is not None:
        call.attributes[PREDICTED] = predicted_s
    spans.add(COMMIT, 0.02, committed_s, attempt)
    decode = spans.add(DECODE, committed_s, first_s + 1.0, attempt, kind="client")
    if node_spans:
        served = spans.add(NODE_REQUEST, sent_s, computed_s, call, service="node", node="far-0")
        began_s = sent_s + queue_s
        spans.add(NODE_QUEUE, sent_s, began_s, served, service="node", node="far-0")
        spans.add(NODE_PREFILL, began_s, computed_s, served, service="node", node="far-0")
        end_s = first_s + 1.0
        there = spans.add(NODE_REQUEST, committed_s, end_s, decode, service="node", node="pd-1")
        spans.add(NODE_QUEUE, committed_s, first_s - 0.01, there, service="node", node="pd-1")
        spans.add(NODE_PREFILL, first_s - 0.01, first_s, there, service="node", node="pd-1")
        spans.add(NODE_DECODE, first_s, end_s, there, service="node", node="pd-1")
    return spans, first_s


def held(reason: str, cluster: str = "") -> dict[str, Any]:
    """Attributes of a wait at the gateway, for a node of a busy cluster or for any node at all."""
    return {REASON: reason} | ({CLUSTER: cluster} if cluster else {})


def first(spans: SpanList, request: RequestSummary) -> Cause:
    return find_causes(request, spans.spans, None)[0]


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("full queue", {"queue_s": 3.0}),
        ("cold cache", {"prefill_s": 3.0, "predicted_s": 3.1}),
        ("cold cache", {"prefill_s": 3.0}),
        ("slow prefill", {"prefill_s": 3.0, "predicted_s": 0.5}),
        ("lost state", {"prefill_s": 3.0, "predicted_s": 3.0, "stateless": 800}),
        ("slow link", {"transfer_s": 3.0}),
        ("busy decode", {"decode_s": 3.0}),
    ],
)
def test_the_part_that_took_longest_is_named(kind: CauseKind, times: dict[str, float]) -> None:
    spans, ttft_s = handed_off(**times)  # type: ignore[arg-type]
    found = first(spans, summary(ttft_s=ttft_s))
    assert found.kind == kind
    assert found.seconds == pytest.approx(3.0, rel=0.25)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("cold cache", {"prefill_s": 3.0, "predicted_s": 3.1}),
        ("slow prefill", {"queue_s": 2.0, "prefill_s": 1.0, "predicted_s": 0.5}),
        ("slow link", {"transfer_s": 3.0}),
        ("busy decode", {"decode_s": 3.0}),
    ],
)
def test_the_gateways_spans_alone_are_enough(kind: CauseKind, times: dict[str, float]) -> None:
    spans, ttft_s = handed_off(**times, node_spans=False)  # type: ignore[arg-type]
    assert first(spans, summary(ttft_s=ttft_s)).kind == kind


def test_a_body_that_arrives_slowly() -> None:
    spans = SpanList()
    root = spans.request(5.0)
    spans.add(READ, 0.0, 4.0, root)
    spans.add(TOKENIZE, 4.0, 4.5, root)
    found = first(spans, summary(ttft_s=5.0))
    assert found == Cause(
        "big body", 4.5, "The body took 4.00 s to arrive and 500 ms to be tokenised."
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0.0, "0.00 ms"), (0.00033, "0.33 ms"), (0.0123, "12.3 ms"), (0.9994, "999 ms")],
        *[(0.99999, "1.00 s"), (1.0, "1.00 s"), (12.34, "12.3 s"), (123.4, "123 s")],
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_wait_at_the_gateway_and_one_at_the_engine_are_one_cause() -> None:
    spans = SpanList()
    root = spans.request(6.0)
    spans.add(WAIT, 0.0, 2.0, root, **held("every queue is long enough", "pd"))
    attempt = spans.attempt(2.0, 6.0)
    call = spans.add(DECODE, 2.0, 6.0, attempt)
    spans.add(NODE_LEASE, 2.0, 2.1, call, service="node", node="pd-1")
    spans.add(NODE_QUEUE, 2.1, 4.9, call, service="node", node="pd-1")
    spans.add(NODE_PREFILL, 4.9, 5.0, call, service="node", node="pd-1")
    found = first(spans, summary(ttft_s=5.0, prefill="pd-1"))
    assert found.kind == "full queue" and found.seconds == pytest.approx(4.8)
    assert "2.00 s at the gateway for a node of pd (every queue is long enough)" in found.text
    assert "2.80 s in the queue" in found.text
    assert "pd-1" in found.text


def test_copies_of_prefixes() -> None:
    spans = SpanList()
    spans.request(5.0)
    spans.add(COPIES, 0.0, 4.0, spans.attempt(0.0, 5.0))
    assert first(spans, summary(ttft_s=5.0)).kind == "prefix copies"


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (SILENT, "hung node"),
        (LOST, "lost node"),
        (CUT, "cut link"),
        (NO_STATE, "lost state"),
        (NO_MEMORY, "no memory"),
        (OTHER, "retry"),
        ("a word of a later version", "retry"),
    ],
)
def test_a_failed_attempt_and_the_pause_after_it_count_for_the_failure(
    failure: str, kind: CauseKind
) -> None:
    spans, ttft_s = handed_off(prefill_s=1.0)
    later = SpanList()
    root = later.request(4.0 + ttft_s)
    failed = later.attempt(0.1, 3.0, error="something happened")
    failed.attributes[FAILURE] = failure
    # What the failed attempt had begun goes on for a while.
    call = later.add(PREFILL, 0.2, 3.0, failed)
    later.add(NODE_PREFILL, 0.2, 4.4, call, service="node", node="far-1")
    later.add(BACK_OFF, 3.0, 3.5, root)
    attempt = later.attempt(4.0, 4.0 + ttft_s)
    later.add(DECODE, 4.0, 4.0 + ttft_s, attempt)
    found = first(later, summary(ttft_s=4.0 + ttft_s))
    assert found.kind == kind and found.seconds == pytest.approx(3.4)
    assert "something happened" in found.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (str(FellSilent(NodeId("far-0"))), "hung node"),
        (str(AttemptFailed("the link from far is cut")), "cut link"),
        ("pd-0: no room for 12345 bytes", "no memory"),
        ("http://127.0.0.1:1: connection lost", "lost node"),
        ("this node has only 3 of 9 tokens cached; 6 to compute are more than 5", "lost state"),
        ("transfer 1 is failed: expired", "retry"),
    ],
)
def test_without_the_attribute_the_error_itself_tells(error: str, kind: CauseKind) -> None:
    spans = SpanList()
    spans.request(5.0)
    spans.attempt(0.0, 4.0, error=error)
    assert first(spans, summary(ttft_s=5.0)).kind == kind


def test_a_slow_link_is_told_with_its_rate() -> None:
    spans, ttft_s = handed_off(transfer_s=4.0)
    grant = next(span for span in spans.spans if span.name == GRANT)
    sent = spans.add(KVD_SEND, 0.1, 4.1, grant, service="kvd", node="far-0")
    sent.attributes[NBYTES] = 2_000_000
    text = first(spans, summary(ttft_s=ttft_s)).text
    assert "from far-0 to pd-1" in text and "2 MB" in text and "4 Mbit/s" in text


def test_a_node_that_answers_late_without_a_failure_hung_for_a_while() -> None:
    spans, ttft_s = handed_off(prefill_s=0.1)
    slow = [
        span if span.service == "gateway" and span.name != PREFILL else moved(span, 2.0)
        for span in spans.spans
        if span.name not in (COMMIT, DECODE)
    ]
    call = next(span for span in slow if span.name == PREFILL)
    slow[slow.index(call)] = moved(call, -2.0, end_s=call.end_s)
    found = find_causes(summary(ttft_s=ttft_s + 2.0), slow, None)[0]
    assert found.kind == "hung node" and "far-0" in found.text


def moved(span: Span, by_s: float, end_s: float | None = None) -> Span:
    end_s = span.end_s + by_s if end_s is None else end_s
    return msgspec.structs.replace(span, start_s=span.start_s + by_s, end_s=end_s)


def test_a_fast_request_has_nothing_unusual() -> None:
    spans, ttft_s = handed_off(prefill_s=0.002, decode_s=0.012)
    request = summary(ttft_s=ttft_s, cached_tokens=990)
    assert [one.kind for one in find_causes(request, spans.spans, None)][0] in (
        "nothing unusual",
        "busy decode",  # a step of the decode engine has most of so short a time
    )
    assert find_causes(summary(ttft_s=0.5), [], None)[0].kind == "nothing unusual"


def test_an_answer_that_does_not_stream_is_not_blamed_on_its_decode_node() -> None:
    spans, first_s = handed_off(node_spans=False)
    found = find_causes(summary(total_s=first_s + 1.0), spans.spans, None)
    assert "busy decode" not in [one.kind for one in found]


def test_a_request_that_no_node_could_take_did_not_meet_a_full_queue() -> None:
    spans = SpanList()
    root = spans.request(60.0)
    spans.add(WAIT, 0.0, 2.0, root, **held("every queue is long enough", "far"))
    spans.add(WAIT, 2.0, 60.0, root, **held("no node of pd decodes: both are lost"))
    refused = summary(total_s=60.0, outcome="shed", error="no node could take the request")
    (found,) = find_causes(refused, spans.spans, None)
    assert found.kind == "not served" and found.seconds == pytest.approx(58.0)
    assert "no node of pd decodes: both are lost" in found.text


def test_a_request_that_was_not_held_did_not_wait_for_a_node() -> None:
    spans = SpanList()
    root = spans.request(4.0)
    spans.add(WAIT, 0.0, 3.0, root)
    found = first(spans, summary(ttft_s=3.5))
    assert found.kind == "busy gateway" and found.seconds == pytest.approx(3.0)


def test_a_request_that_was_refused_at_once_met_a_limit() -> None:
    refused = summary(total_s=0.001, outcome="shed", error="too many requests in flight")
    found = find_causes(refused, [], None)[0]
    assert found.kind == "refused" and "too many requests in flight" in found.text


def test_the_route_predicts_where_the_spans_do_not() -> None:
    spans, ttft_s = handed_off(prefill_s=3.0)
    predicted = {"chosen": {"wait": False, "prefill_s": 0.4}}
    request = summary(ttft_s=ttft_s)
    assert find_causes(request, spans.spans, predicted)[0].kind == "slow prefill"
    assert find_causes(request, spans.spans, {"chosen": {"wait": True}})[0].kind == "cold cache"


def test_parents_in_a_circle_are_no_endless_loop() -> None:
    spans = SpanList()
    one = spans.add(NODE_PREFILL, 0.0, 1.0, service="node", node="x")
    other = spans.add(NODE_QUEUE, 0.0, 1.0, one, service="node", node="x")
    circle = [moved_to(one, other), other]
    assert find_causes(summary(ttft_s=1.0), circle, None)


def moved_to(span: Span, parent: Span) -> Span:
    return msgspec.structs.replace(span, parent_id=parent.span_id)


NAMES = [READ, WAIT, ATTEMPT, BACK_OFF, GRANT, COPIES, PREFILL, COMMIT, DECODE, NODE_REQUEST]
NAMES += [NODE_LEASE, NODE_QUEUE, NODE_PREFILL, NODE_DECODE, KVD_SEND, "a later span"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.floats(-1, 11),
            st.floats(-1, 11),
            st.integers(0, 20),
            st.sampled_from(["", "lost", "the link from far is cut"]),
        ),
        max_size=20,
    ),
    st.floats(0.001, 10),
    st.integers(0, 2_000),
)
def test_causes_never_have_more_time_than_there_was(
    drawn: list[tuple[str, float, float, int, str]], ttft_s: float, cached: int
) -> None:
    spans = SpanList()
    spans.request(10.0)
    for name, start_s, end_s, parent, error in drawn:
        above = spans.spans[parent % len(spans.spans)]
        spans.add(name, start_s, end_s, above, error=error, service="node", node="n")
    causes = find_causes(summary(ttft_s=ttft_s, cached_tokens=cached), spans.spans, None)
    assert causes and sum(one.seconds for one in causes) <= ttft_s + 1e-3
    assert [one.seconds for one in causes] == sorted((c.seconds for c in causes), reverse=True)
    for cause in causes:
        assert cause.text.endswith(".") and "\n" not in cause.text


@given(
    st.floats(0, 100),
    st.none() | st.floats(0, 100),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
)
def test_the_parts_of_a_prefill_are_no_more_than_its_time(
    seconds: float, predicted_s: float | None, prompt: int, cached: int, stateless: int
) -> None:
    parts = split_prefill(PrefillTime(seconds, predicted_s, prompt, cached, stateless))
    assert all(part.seconds >= 0 for part in parts)
    total = sum(part.seconds for part in parts)
    assert total <= seconds or math.isclose(total, seconds)
