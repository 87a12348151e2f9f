"""`GET /live` and `GET /ready`, for orchestrators and load balancers. They need no key.

/live   200 while the event loop runs. A process that does not answer has to be restarted.
/ready  200 when requests should be sent here, 503 with the reason when they should not.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from prfaas.service.stopping import Stopping

PROBE_PATHS = frozenset({"/live", "/ready"})


class Liveness(msgspec.Struct, frozen=True):
    live: bool = True


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str = ""  # why the service is not ready


def add_probes(
    app: web.Application, service: str, stopping: Stopping, problem: Callable[[], str]
) -> None:
    """`problem` says why the service is not ready; empty when it is. While the service stops, every
    response closes its connection, so that clients connect to another one."""

    async def live(request: web.Request) -> web.Response:
        return _json(Liveness())

    async def ready(request: web.Request) -> web.Response:
        reason = f"this {service} is stopping" if stopping.begun else problem()
        return _json(Readiness(not reason, reason), status=503 if reason else 200)

    async def close_connection(request: web.Request, response: web.StreamResponse) -> None:
        if stopping.begun:
            response.force_close()
            response.headers["Connection"] = "close"

    app.router.add_get("/live", live)
    app.router.add_get("/ready", ready)
    app.on_response_prepare.append(close_connection)


def _json(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
