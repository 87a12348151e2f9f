"""The gateway process: API and backend wired together, served until a signal stops it (see
`service.stopping`)."""

from __future__ import annotations

import gc
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment
from prfaas.gateway.api import GatewayApi, Limits, ServedModel
from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.api.loop_lag import measure_lag
from prfaas.gateway.api.metrics import ApiMetrics
from prfaas.gateway.api.prompts import THREADS, Prompts
from prfaas.gateway.api.request_log import RequestLog
from prfaas.gateway.backend import BackendOptions, running
from prfaas.gateway.request import Backend
from prfaas.listening import listen, service_url
from prfaas.planner.problem import Problem
from prfaas.security.reload import reload_on_hangup
from prfaas.security.tls import TlsIdentity
from prfaas.service.descriptors import raise_descriptor_limit
from prfaas.service.probes import add_probes
from prfaas.service.request_body import log_malformed_requests_briefly
from prfaas.service.stopping import Stopping
from prfaas.text import ModelTokenizer

_MB = 10**6
SHORTEST_DRAIN_S = 0.01  # to aiohttp, zero means no limit
# Drain the body this long after an early error, so that the client receives the response.
LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Contents of the files that the deployment names, and options that it does not have."""

    tokenizer: ModelTokenizer | None = None
    credentials: GatewayCredentials = field(default_factory=GatewayCredentials)
    backend: BackendOptions = BackendOptions()
    tls: TlsIdentity | None = None


async def run_gateway(
    deployment: Deployment,
    problem: Problem,
    options: GatewayOptions,
    report: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT. After SIGTERM it takes requests for `leave_s` more, and says
    meanwhile that it is not ready; then it closes its port and drains. Reports its URL once it
    listens."""
    raise_descriptor_limit()
    stopping = Stopping()
    stopping.handle_signals()
    clock = MonotonicClock()
    reload_on_hangup([options.credentials, options.backend.member_key, options.tls])
    with listen(deployment.gateway.host, deployment.gateway.port) as listening:
        async with running(deployment, problem, options.backend, clock) as backend:
            async with serving(deployment, backend, options, clock, listening, stopping) as url:
                # The garbage collector skips objects that live as long as the process: every stream
                # would wait for the 50 ms that a scan takes.
                gc.collect()
                gc.freeze()
                report(url)
                await stopping.wait_until_left(deployment.gateway.timeouts.leave_s)


@asynccontextmanager
async def serving(
    deployment: Deployment,
    backend: Backend,
    options: GatewayOptions,
    clock: Clock,
    listening: socket.socket,
    stopping: Stopping | None = None,
) -> AsyncIterator[str]:
    """Serves the API over any backend; yields its URL."""
    section, max_tokens = deployment.gateway, deployment.model.max_tokens
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prfaas-tokenising") as threads:
        metrics = ApiMetrics()
        metrics.include(backend.metrics)
        api = GatewayApi(
            ServedModel(deployment.model.name, max_tokens),
            backend,
            Prompts(options.tokenizer, max_tokens, threads),
            options.credentials,
            BodyReader(
                each_bytes=int(section.max_body_mb * _MB),
                all_bytes=int(section.max_bodies_mb * _MB),
                patience_s=section.timeouts.body_s,
            ),
            Limits(section.max_in_flight, section.timeouts.stall_s),
            RequestLog(metrics, clock),
        )
        app = api.application()
        add_probes(app, "gateway", stopping or Stopping(), backend.unready_reason)
        runner = web.AppRunner(
            app,
            # A client that disconnects cancels its request, also while nothing is written to it.
            handler_cancellation=True,
            access_log=None,
            # Also closes connections whose first request is never completed.
            keepalive_timeout=section.timeouts.body_s,
            lingering_time=LINGER_S,
            # aiohttp waits this long twice: once for the requests in flight, and once more after it
            # has refused the rest of the bodies that are still arriving.
            shutdown_timeout=max(section.timeouts.drain_s / 2, SHORTEST_DRAIN_S),
        )
        log_malformed_requests_briefly()
        await runner.setup()
        try:
            context = options.tls.public_http() if options.tls is not None else None
            await web.SockSite(runner, listening, ssl_context=context).start()
            async with measure_lag(metrics.loop_lag_s.observe):
                yield service_url(listening, tls=options.tls is not None)
        finally:
            await runner.cleanup()
