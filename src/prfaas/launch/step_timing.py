"""Timing errors of a deployment's emulated engines, read from the /metrics of their nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from prfaas.engine.api import StepTiming
from prfaas.errors import PeerError

_COUNTERS = {
    "prfaas_emulated_steps_total": "steps",
    "prfaas_emulated_wanted_seconds_total": "wanted_s",
    "prfaas_emulated_late_seconds_total": "late_s",
}


async def step_timing(http: aiohttp.ClientSession, node_urls: Iterable[str]) -> StepTiming:
    """The sum over the nodes. The session's timeout applies to each node."""
    pages = await asyncio.gather(*(_page(http, f"{url}/metrics") for url in node_urls))
    return sum_of([parse_timing(page) for page in pages])


def parse_timing(page: str) -> StepTiming:
    """The timing in one /metrics page; all zeros for a real engine."""
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


async def _page(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(url, raise_for_status=True) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise PeerError(f"{url}: no response: {error}") from None
