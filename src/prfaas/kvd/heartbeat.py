"""Tells gateways that this kvd is here, again and again. A gateway that does not answer is tried
again at the next beat; nothing here depends on it."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from prfaas.errors import PeerError, PeerHttpError
from prfaas.http_client.client import HttpClient
from prfaas.kvd.report import Report, Reporter

log = logging.getLogger(__name__)

BEAT_S = 2.0
_ANSWER_S = 5.0


class Heartbeat(msgspec.Struct, frozen=True):
    """The body of a gateway's /prfaas/v1/register."""

    kvd_url: str
    cluster: str
    report: Report


async def beat(
    http: HttpClient, gateway: str, kvd_url: str, cluster: str, reporter: Reporter
) -> None:
    """Until cancelled."""
    url = f"{gateway.rstrip('/')}/prfaas/v1/register"
    heard = None
    while True:
        body = msgspec.json.encode(Heartbeat(kvd_url, cluster, reporter.report()))
        problem = ""
        try:
            await http.request("POST", url, timeout_s=_ANSWER_S, body=body)
        except PeerHttpError as error:
            problem = f"answers {error.status}: {error}"
        except PeerError as error:
            problem = str(error)
        if heard != (not problem):
            heard = not problem
            log.info("gateway %s: %s", gateway, problem or "has registered this kvd")
        await asyncio.sleep(BEAT_S)
