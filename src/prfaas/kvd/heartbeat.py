"""Sends a heartbeat with this kvd's report to each gateway, every `BEAT_S` seconds.

A failed heartbeat is not retried before the next one. Nothing else in the kvd depends on it.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from prfaas.contracts.kvd_api import Heartbeat
from prfaas.kvd.report import Reporter

log = logging.getLogger(__name__)

BEAT_S = 2.0
_TIMEOUT_S = 5.0


async def send_heartbeats(
    http: aiohttp.ClientSession,
    gateway: str,
    kvd_url: str,
    cluster: str,
    reporter: Reporter,
    key: str | None = None,
) -> None:
    """Runs until it is cancelled."""
    url = f"{gateway.rstrip('/')}/prfaas/v1/register"
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    registered: bool | None = None
    while True:
        body = msgspec.json.encode(Heartbeat(kvd_url, cluster, reporter.report()))
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        problem = ""
        try:
            async with http.post(url, data=body, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    problem = f"responded with {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
        if registered != (not problem):
            registered = not problem
            log.info("gateway %s: %s", gateway, problem or "has registered this kvd")
        await asyncio.sleep(BEAT_S)
