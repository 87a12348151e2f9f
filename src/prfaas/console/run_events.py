"""What happened once in a simulated run: plans, changes of roles, faults, changed links."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from prfaas.console.scene import EventKind, EventScene
from prfaas.scheduler.view import LinkId
from prfaas.sim.config import ClusterFault, LinkFault, NodeFault, RateChange, SimConfig
from prfaas.sim.results.recording import Recording
from prfaas.sim.results.result import PlanChange, Result

MOST_EVENTS = 500
# The rate of a link may change every second. A change below a fifth of the rate is no event.
_LEAST_CHANGE = 0.2


class _Event(NamedTuple):
    at_s: float
    kind: EventKind
    text: str
    where: str


def run_events(
    result: Result, config: SimConfig, end_s: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """The events up to the end of the run, ascending in time, and notes on what is left out."""
    recording = result.recording
    assert recording is not None
    found = [_plan(change) for change in result.plans]
    found += _roles(recording)
    found += _faults(config)
    for link in recording.links:
        found += _rates(link.link, link.bps, config.links.get(link.link, ()))
    found = sorted((e for e in found if e.at_s <= end_s), key=lambda event: event.at_s)
    notes = []
    if len(found) > MOST_EVENTS:
        notes.append(f"The time line has the first {MOST_EVENTS} of {len(found):,} events.")
    scenes = [
        EventScene(number, round(event.at_s, 3), event.kind, event.text, event.where)
        for number, event in enumerate(found[:MOST_EVENTS], start=1)
    ]
    return msgspec.to_builtins(scenes), notes


def _plan(change: PlanChange) -> _Event:
    plan = change.plan
    home = plan.problem.local.pool.cluster
    prefill = "1 node prefills" if plan.n_prefill == 1 else f"{plan.n_prefill} nodes prefill"
    decode = "1 decodes" if plan.n_decode == 1 else f"{plan.n_decode} decode"
    threshold = f"threshold {plan.threshold_tokens:,} tokens, " if plan.problem.remotes else ""
    text = (
        f"{home} has a plan for {plan.capacity_rps:.2f} requests/s: {threshold}{prefill} and "
        f"{decode}. Reason: {plan.reason}."
    )
    return _Event(change.at_s, "plan", text, home)


def _roles(recording: Recording) -> list[_Event]:
    words = {"prefill": "now prefills", "decode": "now decodes"}
    return [
        _Event(change.at_s, "role", f"{change.node} {words[change.role]}.", change.node)
        for change in recording.role_changes
    ]


def _faults(config: SimConfig) -> list[_Event]:
    found = []
    for fault in config.faults:
        kind: EventKind
        match fault:
            case NodeFault(node):
                kind, where, words = "node", str(node), (f"{node} is lost.", f"{node} is back.")
            case ClusterFault(cluster):
                kind, where = "cluster", str(cluster)
                words = (f"The cluster {cluster} is lost.", f"The cluster {cluster} is back.")
            case LinkFault(link):
                kind, where = "link", " -> ".join(link)
                words = (f"The link {where} is cut.", f"The link {where} is back.")
            case _:
                continue  # only tests make the others
        found.append(_Event(fault.at_s, kind, words[0], where))
        if fault.until_s < math.inf:
            found.append(_Event(fault.until_s, kind, words[1], where))
    return found


def _rates(link: LinkId, bps: float, changes: tuple[RateChange, ...]) -> list[_Event]:
    where = " -> ".join(link)
    found = []
    told = 1.0
    for change in changes:
        share = change.share
        if share == told or (share > 0 and abs(share - told) < _LEAST_CHANGE * told):
            continue
        if share == 0:
            text = f"The link {where} is cut."
        else:
            again = "is back and carries" if told == 0 else "carries"
            text = f"The link {where} {again} {share * bps / 1e9:g} of {bps / 1e9:g} Gbit/s."
        found.append(_Event(change.at_s, "link", text, where))
        told = share
    return found
