"""A run as a Chrome trace: one process per run, one track per node and link, one span per step.

Open it in https://ui.perfetto.dev or chrome://tracing. Plain data; the caller writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prfaas.sim.results.result import Result


def chrome_trace(runs: Mapping[str, Result]) -> dict[str, Any]:
    """Simulated seconds become the trace's microseconds. Spans of one track may overlap (a decode
    node serves many requests), so each span is an asynchronous pair of events with its own id."""
    events: list[dict[str, Any]] = []
    for process, (name, result) in enumerate(runs.items(), start=1):
        events.append(_name("process_name", process, 0, name))
        tracks: dict[str, int] = {}
        for number, span in enumerate(result.spans):
            track = tracks.get(span.track)
            if track is None:
                track = tracks[span.track] = len(tracks) + 1
                events.append(_name("thread_name", process, track, span.track))
            common = {
                "name": span.name,
                "cat": span.track,
                "id": f"{process}.{number}",
                "pid": process,
                "tid": track,
            }
            detail = {"request": span.request, "reason": span.reason}
            events.append({**common, "ph": "b", "ts": span.start_s * 1e6, "args": detail})
            events.append({**common, "ph": "e", "ts": span.end_s * 1e6})
        events += [
            {
                "name": f"plan: {change.plan.reason}",
                "cat": "plan",
                "ph": "i",
                "s": "p",
                "ts": change.at_s * 1e6,
                "pid": process,
                "tid": 0,
            }
            for change in result.plan_changes
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
