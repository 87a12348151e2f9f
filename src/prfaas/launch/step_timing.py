"""How well the emulated engines of a deployment keep time, from their nodes' Prometheus pages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from prfaas.engine.api import StepTiming
from prfaas.http_client.client import HttpClient

ASK_S = 60.0  # for one response; only a process that hangs takes longer
_COUNTERS = {
    "prfaas_emulated_steps_total": "steps",
    "prfaas_emulated_wanted_seconds_total": "wanted_s",
    "prfaas_emulated_late_seconds_total": "late_s",
}


async def step_timing(http: HttpClient, node_urls: Iterable[str]) -> StepTiming:
    """The sum over the nodes. Raises `PeerError` when a node does not respond."""
    pages = await asyncio.gather(
        *(http.request("GET", f"{url}/metrics", timeout_s=ASK_S) for url in node_urls)
    )
    return sum_of([parse_timing(page.decode()) for page in pages])


def parse_timing(page: str) -> StepTiming:
    """All zeros for the page of a real engine's node."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in _COUNTERS:
                found[_COUNTERS[sample.name]] = sample.value
    return StepTiming(
        int(found.get("steps", 0)), found.get("wanted_s", 0.0), found.get("late_s", 0.0)
    )


def sum_of(timings: Iterable[StepTiming]) -> StepTiming:
    total = StepTiming()
    for one in timings:
        total = StepTiming(
            total.steps + one.steps, total.wanted_s + one.wanted_s, total.late_s + one.late_s
        )
    return total
