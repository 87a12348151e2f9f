"""Sends a heartbeat with this kvd's report to each gateway, every `heartbeat_s` of
`[kvd.timeouts]`.

A failed heartbeat is not retried before the next one. Nothing else in the kvd depends on it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from prfaas.config.host import KvdTimeouts
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import PeerError, PeerHttpError
from prfaas.http_client.client import HttpClient
from prfaas.kvd.report import Reporter

log = logging.getLogger(__name__)


async def send_heartbeats(
    http: HttpClient,
    gateway: str,
    kvd_url: str,
    cluster: str,
    reporter: Reporter,
    timeouts: KvdTimeouts,
) -> None:
    """Sends heartbeats to one gateway until cancelled."""
    url = f"{gateway.rstrip('/')}/prfaas/v1/register"
    registered: bool | None = None
    while True:
        body = msgspec.json.encode(Heartbeat(kvd_url, cluster, reporter.report()))
        problem = ""
        try:
            await http.request("POST", url, timeout_s=timeouts.gateway_call_s, body=body)
        except PeerHttpError as error:
            problem = f"responded with {error.status}: {error}"
        except PeerError as error:
            problem = str(error)
        if registered != (not problem):
            registered = not problem
            log.info("gateway %s: %s", gateway, problem or "has registered this kvd")
        await asyncio.sleep(timeouts.heartbeat_s)
