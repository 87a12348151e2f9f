"""Simulated runs as the data of one page that can be replayed. Pure: results in, plain data out.

A frame is a moment of the recording (`sim.results.recording`): what nodes and links did *then*.
Counts of requests come from the result's columns, up to the time of the frame, so that the last
frame has the totals of the run. Fields have the names of `scene.py`. What changes at every frame is
a *column*, with a value per frame. What changes rarely is *steps*: `[[frame, value], ...]`, where a
value holds until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prfaas import __version__
from prfaas.console.run_events import run_events
from prfaas.console.text_table import TextTable
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.explain import Explanation
from prfaas.scheduler.plan import Plan
from prfaas.sim.config import SimConfig
from prfaas.sim.results.recording import (
    ROUTE_KINDS,
    LinkMoment,
    Moment,
    NodeMoment,
    RecordedLink,
    Recording,
    thinned,
)
from prfaas.sim.results.result import Array, Counts, Flags, Requests, Result
from prfaas.types import NodeId

MOST_FRAMES = 600
# For all runs together, so that the file of many runs or nodes stays small enough to send.
_MOST_CELLS = 400_000  # figures of nodes: nodes x frames x runs
_MOST_REQUESTS = 6_000
_MOST_REQUESTS_OF_RUN = 2_000
_SLOWEST = 50  # requests of each run that the sample has in addition

_OUTCOMES = ("completed", "failed", "unanswered")


class ReportedRun(NamedTuple):
    name: str
    config: SimConfig  # that the result comes from
    result: Result  # with a recording
    summary: Sequence[tuple[str, str]]  # label and value; the same labels in every run
    tables: Sequence[TextTable] = ()
    notes: Sequence[str] = ()


def simulation_report(
    title: str, model: str, runs: Sequence[ReportedRun], tables: Sequence[TextTable] = ()
) -> dict[str, Any]:
    return {
        "kind": "simulation",
        "title": title,
        "model": model,
        "made_by": f"prfaas {__version__}",
        "summary_labels": [label for label, _ in runs[0].summary],
        "tables": [table.as_dict() for table in tables],
        "runs": [_run(run, len(runs)) for run in runs],
    }


def _run(run: ReportedRun, runs: int) -> dict[str, Any]:
    result = run.result
    recording = result.recording
    assert recording is not None, "the config asks for no moments"
    cells = _MOST_CELLS // (runs * len(recording.nodes))
    moments = thinned(recording.moments, max(2, min(MOST_FRAMES, cells)))
    counts = _CountsUntil(result, [moment.at_s for moment in moments])
    events, notes = run_events(result, run.config, counts.times_s[-1])
    return {
        "name": run.name,
        "policy": run.config.scheduler.policy,
        "summary": [list(row) for row in run.summary],
        "tables": [table.as_dict() for table in run.tables],
        "notes": [*run.notes, *notes],
        "window_s": [round(edge, 3) for edge in result.window_s],
        "times_s": _rounded(counts.times_s, 3),
        "clusters": _clusters(result, recording, moments),
        "links": _links(recording, moments),
        "homes": _homes(result, moments, counts),
        "ttft": _ttft(counts),
        "in_flight": counts.in_flight(),
        "events": events,
        "requests": _requests(result, recording, _MOST_REQUESTS // runs),
    }


# Nodes and links ----------------------------------------------------------------------------------


def _clusters(
    result: Result, recording: Recording, moments: Sequence[Moment]
) -> list[dict[str, Any]]:
    clusters = []
    for cluster in result.clusters:
        nodes = []
        for number, node in enumerate(recording.nodes):
            if node.cluster == cluster.name:
                seen = [moment.nodes[number] for moment in moments]
                nodes.append(
                    {"id": node.name, "name": node.name, "slots": node.slots, **_node(seen)}
                )
        clusters.append({"name": cluster.name, "kind": cluster.kind, "nodes": nodes})
    return clusters


def _node(seen: Sequence[NodeMoment]) -> dict[str, Any]:
    return {
        "role": _steps(node.role for node in seen),
        "becomes": _steps(None if node.planned == node.role else node.planned for node in seen),
        "status": _steps(_status(node) for node in seen),
        "active": [node.active for node in seen],
        "queued": [node.queued for node in seen],
    }


def _status(node: NodeMoment) -> str:
    if not node.alive:
        return "lost"
    if node.switching:
        return "not in use"
    return "in use" if node.role == node.planned else "drains"


def _links(recording: Recording, moments: Sequence[Moment]) -> list[dict[str, Any]]:
    return [
        _link(link, moments, [moment.links[number] for moment in moments])
        for number, link in enumerate(recording.links)
    ]


def _link(
    link: RecordedLink, moments: Sequence[Moment], seen: Sequence[LinkMoment]
) -> dict[str, Any]:
    source, target = link.link
    at_s = np.array([moment.at_s for moment in moments])
    bits = np.array([moment.carried_bits for moment in seen])
    rates = np.divide(np.diff(bits), np.diff(at_s))
    return {
        "source": source,
        "target": target,
        "rtt_s": link.rtt_s,
        "planned_bps": link.bps,
        "capacity_bps": _steps(moment.bps for moment in seen),
        "verdict": _steps(_verdict(moment) for moment in seen),
        "cause": _steps(_cause(moment) for moment in seen),
        "rate_bps": [0, *(round(rate) for rate in rates.tolist())],
        "backlog_bytes": [moment.backlog_bytes for moment in seen],
        "waited_s": [round(moment.waited_s, 3) for moment in seen],
    }


def _verdict(link: LinkMoment) -> str:
    if link.bps == 0:
        return "cut"
    congested = link.state is not None and link.state.health.verdict is LinkVerdict.CONGESTED
    return "congested" if congested else "clear"


def _cause(link: LinkMoment) -> str:
    """The signal that holds the verdict. A link that is clear has one while a queue builds up."""
    return "" if link.bps == 0 or link.state is None else link.state.health.cause


# Requests over time -------------------------------------------------------------------------------


class _CountsUntil:
    """Sums over the requests to which something has happened, at the time of each frame."""

    def __init__(self, result: Result, at_s: Sequence[float]) -> None:
        rows = result.requests
        self.rows = rows
        # The last token of a request that decodes elsewhere arrives after the last event.
        ends = rows.last_token_s[~np.isnan(rows.last_token_s)]
        self.times_s: list[float] = [*at_s[:-1], float(ends.max(initial=at_s[-1]))]
        # A stream that broke has ended, but the result does not say when: the last frame counts it.
        self.failed = ~np.isnan(rows.first_token_s) & np.isnan(rows.last_token_s)

    def sums(self, happened_s: Array, values: Array | Counts | None = None) -> Array:
        """Of the values, or of ones, of all requests with `happened_s` up to each frame."""
        known = ~np.isnan(happened_s)
        times = happened_s[known]
        order = np.argsort(times, kind="stable")
        ones = np.ones(len(times))
        added = ones if values is None else np.asarray(values, dtype=float)[known]
        so_far = np.concatenate(([0.0], np.cumsum(added[order])))
        return so_far[np.searchsorted(times[order], self.times_s, "right")]

    def counts(self, happened_s: Array, which: Flags, values: Counts | None = None) -> list[int]:
        """Whole numbers, of these requests only."""
        sums = self.sums(happened_s[which], None if values is None else values[which])
        return [round(value) for value in sums.tolist()]

    def at_the_end(self, which: Flags) -> list[int]:
        return [0] * (len(self.times_s) - 1) + [int(which.sum())]

    def in_flight(self) -> list[int]:
        rows = self.rows
        left = self.sums(rows.arrival_s) - self.sums(rows.last_token_s)
        ended = np.array(self.at_the_end(self.failed))
        return [round(value) for value in (left - ended).tolist()]


def _ttft(counts: _CountsUntil) -> dict[str, Any]:
    rows = counts.rows
    parts = {
        "wait_s": rows.wait_s,
        "prefill_s": rows.prefill_s,
        "transfer_s": rows.transfer_s,
        "decode_s": _decode_part_s(rows),
    }
    answered = ~np.isnan(rows.first_token_s)
    return {
        "first_tokens": counts.counts(rows.first_token_s, answered),
        **{
            name: _rounded(counts.sums(rows.first_token_s, np.nan_to_num(values)).tolist(), 3)
            for name, values in parts.items()
        },
    }


def _decode_part_s(rows: Requests) -> Array:
    """The rest of the TTFT: the wait for a slot, a decode step, the way back from elsewhere."""
    return rows.ttft_s - rows.wait_s - rows.prefill_s - rows.transfer_s


def _homes(result: Result, moments: Sequence[Moment], counts: _CountsUntil) -> list[dict[str, Any]]:
    rows = result.requests
    assert result.recording is not None
    stateless = np.array(result.recording.routes.stateless_tokens, dtype=np.int64)
    begun_s = rows.arrival_s + rows.wait_s
    prefilled_s = begun_s + rows.prefill_s
    homes = [cluster.name for cluster in result.clusters if cluster.kind == "pd"]
    made = []
    for number, name in enumerate(homes):
        here = rows.home == number
        arrived = counts.counts(rows.arrival_s, here)
        begun = counts.counts(begun_s, here)
        factors = [moment.threshold_factors[number] for moment in moments]
        made.append(
            {
                "cluster": name,
                **_plan_steps(_plans_in_force(result, name, counts.times_s), factors),
                "arrived": arrived,
                "waiting": [all_ - some for all_, some in zip(arrived, begun, strict=True)],
                "local": counts.counts(rows.last_token_s, here & ~rows.offloaded),
                "remote": counts.counts(rows.last_token_s, here & rows.offloaded),
                "failed": counts.at_the_end(here & counts.failed),
                "prompt_tokens": counts.counts(prefilled_s, here, rows.prompt_tokens),
                "cached_tokens": counts.counts(prefilled_s, here, rows.hit_tokens),
                "stateless_tokens": counts.counts(prefilled_s, here, stateless),
            }
        )
    return made


def _plans_in_force(result: Result, home: str, times_s: Sequence[float]) -> list[Plan]:
    changes = [c for c in result.plans if c.plan.problem.local.pool.cluster == home]
    at = np.searchsorted([change.at_s for change in changes], times_s, "right") - 1
    return [changes[max(index, 0)].plan for index in at.tolist()]


def _plan_steps(plans: Sequence[Plan], factors: Sequence[float]) -> dict[str, Any]:
    def steps(pick: Callable[[Plan], Any]) -> list[list[Any]]:
        return _steps(pick(plan) for plan in plans)

    in_force = zip(plans, factors, strict=True)
    return {
        "planned_threshold_tokens": steps(lambda plan: plan.threshold_tokens),
        "threshold_tokens": _steps(round(plan.threshold_tokens * by) for plan, by in in_force),
        "planned_rps": steps(lambda plan: round(plan.capacity_rps, 4)),
        "planned_share": steps(lambda plan: round(plan.offloaded_share, 4)),
        "plan_reason": steps(lambda plan: plan.reason),
    }


# The sample of requests ---------------------------------------------------------------------------


def _requests(result: Result, recording: Recording, most: int) -> dict[str, Any]:
    rows, routes = result.requests, recording.routes
    chosen = _sample(rows, sorted(routes.explanations), min(most, _MOST_REQUESTS_OF_RUN))
    outcome = np.where(np.isnan(rows.first_token_s), 2, np.where(np.isnan(rows.last_token_s), 1, 0))
    numbers = {node.name: number for number, node in enumerate(recording.nodes)}

    def whole(values: Sequence[int] | Counts) -> list[int]:
        found: list[int] = np.asarray(values, dtype=np.int64)[chosen].tolist()
        return found

    def seconds(values: Array) -> list[float | None]:
        return _rounded(values[chosen].tolist(), 3)

    return {
        "of": len(rows.arrival_s),
        "names": {
            "home": [cluster.name for cluster in result.clusters if cluster.kind == "pd"],
            "route": list(ROUTE_KINDS),
            "outcome": list(_OUTCOMES),
            "reason": list(routes.reasons),
            "node": list(numbers),
        },
        "columns": {
            "id": chosen.tolist(),
            "at_s": seconds(rows.arrival_s),
            "home": whole(rows.home),
            "route": whole(routes.kind),
            "outcome": whole(outcome),
            "reason": whole(routes.reason),
            "prefill": whole(routes.prefill),
            "decode": whole(routes.decode),
            "prompt_tokens": whole(rows.prompt_tokens),
            "cached_tokens": whole(rows.hit_tokens),
            "output_tokens": whole(rows.output_tokens),
            "nbytes": whole(routes.nbytes),
            "attempts": whole(rows.retries + 1),
            "ttft_s": seconds(rows.ttft_s),
            # 0 where the request has no TTFT, as in `RequestScene`.
            "wait_s": seconds(np.nan_to_num(rows.wait_s)),
            "prefill_s": seconds(np.nan_to_num(rows.prefill_s)),
            "transfer_s": seconds(np.nan_to_num(rows.transfer_s)),
            "decode_s": seconds(np.nan_to_num(_decode_part_s(rows))),
            "total_s": seconds(rows.last_token_s - rows.arrival_s),
            "alternatives": [
                _alternatives(routes.explanations.get(index), numbers) for index in chosen.tolist()
            ],
        },
    }


def _sample(rows: Requests, explained: Sequence[int], most: int) -> Counts:
    """Evenly spaced requests, which are the same in every run, and the slowest of this one."""
    every = max(1, -(-len(explained) // most))
    ttft_s = np.nan_to_num(rows.ttft_s, nan=-1.0)
    slowest = np.argsort(-ttft_s, kind="stable")[:_SLOWEST]
    even = np.array(explained[::every], dtype=np.int64)
    return np.unique(np.concatenate((even, slowest)))


def _alternatives(
    found: Explanation | None, numbers: Mapping[NodeId, int]
) -> list[list[float | None]] | None:
    if found is None:
        return None
    return [
        [
            numbers[option.node],
            option.cached_tokens,
            *_rounded((option.cost_s, *option.forecast), 3),
        ]
        for option in found.alternatives
    ]


# Plain data ---------------------------------------------------------------------------------------


def _steps(values: Iterable[Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for index, value in enumerate(values):
        if not found or found[-1][1] != value:
            found.append([index, value])
    return found


def _rounded(values: Iterable[float | None], digits: int) -> list[float | None]:
    """JSON has no NaN: what did not happen is null."""
    return [
        None if value is None or not np.isfinite(value) else round(value, digits)
        for value in values
    ]
