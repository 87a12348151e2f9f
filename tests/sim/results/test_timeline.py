from __future__ import annotations

import json
from collections import Counter

from prfaas.sim.results.result import TimelineSpan
from prfaas.sim.results.timeline import chrome_trace
from tests.sim.made_results import result

SPANS = (
    TimelineSpan("far-0", "prefill", 1.0, 2.5, 7, "long"),
    TimelineSpan("near-1", "decode", 2.5, 9.0, 7, ""),
    TimelineSpan("near-1", "decode", 3.0, 8.0, 8, ""),
)


def test_spans_become_balanced_pairs_on_named_tracks() -> None:
    trace = chrome_trace({"paper": result([0.5] * 10, spans=SPANS, plans=2)})
    events = trace["traceEvents"]
    json.dumps(trace)
    named = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {"paper", "far-0", "near-1"}
    begins = [e for e in events if e["ph"] == "b"]
    ends = {(e["cat"], e["id"]): e for e in events if e["ph"] == "e"}
    assert len(begins) == len(ends) == len(SPANS)
    for begin, span in zip(begins, SPANS, strict=True):
        assert begin["ts"] == span.start_s * 1e6
        assert ends[begin["cat"], begin["id"]]["ts"] == span.end_s * 1e6
        assert begin["args"] == {"request": span.request, "reason": span.reason}
    assert Counter(e["ph"] for e in events)["i"] == 1  # the plan that was made under way


def test_each_run_is_a_separate_process() -> None:
    run = result([0.5] * 10, spans=SPANS)
    events = chrome_trace({"paper": run, "adaptive": run})["traceEvents"]
    spans = [event for event in events if event["ph"] == "b"]
    assert {event["pid"] for event in spans} == {1, 2}
    assert len({event["id"] for event in spans}) == 2 * len(SPANS)
