"""Sends a heartbeat with this kvd's report to each gateway, every `heartbeat_s` of
`[kvd.timeouts]`.

A failed heartbeat is not retried before the next one. Nothing else in the kvd depends on it.
"""

from __future__ import annotations

import logging

import msgspec

from prfaas.config.host import KvdTimeouts
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.errors import PeerError, PeerHttpError
from prfaas.http_client.client import HttpClient
from prfaas.kvd.report import Reporter
from prfaas.supervision import Failures, one_line, repeat

log = logging.getLogger(__name__)

_RESPONSE_BYTES = 64 << 10


async def send_heartbeats(
    http: HttpClient,
    gateway: str,
    kvd_url: str,
    cluster: str,
    reporter: Reporter,
    timeouts: KvdTimeouts,
    failures: Failures,
) -> None:
    """Sends heartbeats to one gateway until cancelled."""
    url = f"{gateway.rstrip('/')}/prfaas/v1/register"
    registered: bool | None = None

    async def step() -> None:
        nonlocal registered
        body = msgspec.json.encode(Heartbeat(kvd_url, cluster, reporter.report()))
        problem = ""
        # Several gateways may share an address, as while one replaces the other: each connection
        # may lead to another of them, and all have to know this kvd.
        http.close_idle(url)
        try:
            await http.request(
                "POST", url, timeout_s=timeouts.gateway_call_s, body=body, max_bytes=_RESPONSE_BYTES
            )
        except PeerHttpError as error:
            problem = f"responded with {error.status}: {error}"
        except PeerError as error:
            problem = str(error)
        if registered != (not problem):
            registered = not problem
            log.info("gateway %s: %s", gateway, one_line(problem) or "has registered this kvd")

    await repeat(step, timeouts.heartbeat_s, failures, loop="heartbeat")
