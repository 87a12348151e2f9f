"""The rows of a waterfall, and the same spans as a file for Perfetto."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prfaas.tracing.perfetto import trace_events
from prfaas.tracing.spans import (
    COMMIT,
    DECODE,
    GRANT,
    KVD_RECEIVE,
    KVD_SEND,
    NODE_REQUEST,
    PREFILL,
    READ,
    TRANSFER_ID,
)
from prfaas.tracing.waterfall import FULL, SHORT, bar, length_s, rows_of
from tests.tracing.spans_of import SpanList, summary


def handed_off() -> SpanList:
    spans = SpanList()
    root = spans.request(4.0)
    attempt = spans.attempt(0.5, 4.0)
    spans.add(READ, 0.0, 0.5, root)
    grant = spans.add(GRANT, 0.5, 0.6, attempt, kind="client")
    received = spans.add(KVD_RECEIVE, 0.6, 2.5, grant, service="kvd", node="pd-1")
    call = spans.add(PREFILL, 0.6, 2.0, attempt, kind="client")
    spans.add(NODE_REQUEST, 0.7, 1.9, call, service="node", node="far-0", kind="server")
    sent = spans.add(KVD_SEND, 0.8, 2.4, grant, service="kvd", node="far-0")
    for span in (received, sent):
        span.attributes[TRANSFER_ID] = "t-1"
    spans.add(COMMIT, 0.6, 2.5, attempt)
    spans.add(DECODE, 2.5, 4.0, attempt, kind="client", error="it broke")
    return spans


def test_children_follow_their_parent_in_the_order_of_their_starts() -> None:
    rows = rows_of(list(reversed(handed_off().spans)))
    assert [(row.depth, row.name, row.process) for row in rows] == [
        (0, "request", "gateway"),
        (1, "read body", "gateway"),
        (1, "attempt", "gateway"),
        (2, "grant", "gateway"),
        (3, "kvd receive", "kvd of pd-1"),
        (3, "kvd send", "kvd of far-0"),
        (2, "wait for commit", "gateway"),
        (2, "prefill", "gateway"),
        (3, "node request", "far-0"),
        (2, "decode", "gateway"),
    ]
    assert length_s(rows) == 4.0 and rows[-1].error == "it broke"


def test_bars_lie_on_one_axis() -> None:
    rows = {row.name: row for row in rows_of(handed_off().spans)}
    assert bar(rows["request"], 4.0, 8) == FULL * 8
    assert bar(rows["read body"], 4.0, 8) == FULL + " " * 7
    assert bar(rows["decode"], 4.0, 8) == " " * 5 + FULL * 3
    assert bar(rows["grant"], 4.0, 8).strip() == SHORT


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.floats(-5, 5), st.floats(-5, 5), st.booleans()),
        max_size=30,
    ),
    st.integers(0, 200),
)
def test_every_span_has_one_row_whatever_peers_have_sent(
    drawn: list[tuple[int, float, float, bool]], width: int
) -> None:
    """Parents may be unknown, or form circles; spans may end before they start."""
    spans = SpanList()
    for number, (parent, start_s, end_s, known) in enumerate(drawn):
        span = spans.add(f"n{number}", start_s, end_s, service="node", node="x")
        parent_id = f"{parent + 1:016x}" if known else "f" * 16
        spans.spans[-1] = msgspec.structs.replace(span, parent_id=parent_id)
    rows = rows_of(spans.spans)
    assert sorted(row.name for row in rows) == sorted(span.name for span in spans.spans)
    for row in rows:
        assert len(bar(row, length_s(rows), width)) == width
    events = trace_events(summary(), spans.spans, ())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(spans.spans)


def file_of(spans: SpanList) -> list[dict[str, Any]]:
    content = json.loads(json.dumps(trace_events(summary(ttft_s=3.0), spans.spans, ())))
    assert content["otherData"]["request"] == "req-1"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_perfetto_has_a_process_for_each_service_and_node() -> None:
    events = file_of(handed_off())
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[1] == "gateway"
    assert set(names.values()) == {"gateway", "far-0", "kvd of far-0", "kvd of pd-1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {names[event["pid"]] for event in slices if event["name"] == "kvd send"} == {
        "kvd of far-0"
    }
    (broken,) = [event for event in slices if event["args"].get("error")]
    assert broken["name"] == "decode" and broken["dur"] == 1_500_000.0


def test_perfetto_threads_nest() -> None:
    """A viewer draws events of one thread as a stack: two that overlap must not be on one."""
    events = [event for event in file_of(handed_off()) if event["ph"] == "X"]
    for one in events:
        for other in events:
            if one is other or (one["pid"], one["tid"]) != (other["pid"], other["tid"]):
                continue
            first, later = sorted((one, other), key=lambda e: (e["ts"], -e["dur"]))
            end = first["ts"] + first["dur"]
            assert later["ts"] >= end or later["ts"] + later["dur"] <= end


def test_perfetto_arrows_lead_from_calls_and_from_sender_to_receiver() -> None:
    events = file_of(handed_off())
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    arrows: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event)
    drawn = set()
    for begin, end in arrows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f") and begin["ts"] <= end["ts"]
        for tip in (begin, end):
            assert any(
                event["ph"] == "X"
                and (event["pid"], event["tid"]) == (tip["pid"], tip["tid"])
                and event["ts"] <= tip["ts"] <= event["ts"] + event["dur"]
                for event in events
            )
        drawn.add((begin["name"], names[begin["pid"]], names[end["pid"]]))
    assert ("call", "gateway", "far-0") in drawn
    assert ("transfer", "kvd of far-0", "kvd of pd-1") in drawn
