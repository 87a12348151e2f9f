"""The gateway process: API and backend wired together, served until a signal stops it (see
`service.stopping`)."""

from __future__ import annotations

import gc
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment
from prfaas.config.address import parse_network
from prfaas.gateway.api.app import GatewayApi, ServedModel
from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.api.loop_lag import measure_lag
from prfaas.gateway.api.metrics import ApiMetrics
from prfaas.gateway.api.prompts import QUEUED_PER_TENANT, THREADS, Prompts
from prfaas.gateway.api.request_log import RequestLog, RequestObserver
from prfaas.gateway.api.request_preparation import RequestPreparer
from prfaas.gateway.backend import BackendOptions, running
from prfaas.gateway.body_workers.messages import WorkerSettings
from prfaas.gateway.body_workers.pool import JOB_S, BodyWorkers, body_workers, memory_bound
from prfaas.gateway.console.access import ConsoleAccess
from prfaas.gateway.console.feed import Feed
from prfaas.gateway.console.paths import ConsolePaths
from prfaas.gateway.console.recent import RecentRequests
from prfaas.gateway.console.scenes import SceneSource
from prfaas.gateway.following.export import Observers, RequestExport
from prfaas.gateway.following.kept_requests import RequestHistory
from prfaas.gateway.following.paths import FollowingPaths
from prfaas.gateway.generation import Limits
from prfaas.gateway.request import Backend
from prfaas.gateway.tenants import Tenants
from prfaas.gateway.turns import Turns
from prfaas.listening import listen, service_url
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.security.own_host import OwnHost
from prfaas.security.reload import reloading
from prfaas.security.tls import TlsIdentity
from prfaas.service.bounded_site import BoundedSite, Connections
from prfaas.service.connections import (
    ConnectionTable,
    Proxies,
    bounds_of_process,
    most_of_gateway,
)
from prfaas.service.descriptors import raise_descriptor_limit
from prfaas.service.probes import add_probes
from prfaas.service.request_body import log_malformed_requests_briefly
from prfaas.service.stopping import Stopping
from prfaas.text import ModelTokenizer
from prfaas.tracing.otlp import chosen_exporter

_MB = 10**6
SHORTEST_DRAIN_S = 0.01  # to aiohttp, zero means no limit
# Drain the body this long after an early error, so that the client receives the response.
LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Contents of the files that the deployment names, and options that it does not have."""

    tokenizer: ModelTokenizer | None = None
    tokenizer_folder: Path | None = None  # where `tokenizer` is from: body workers load it, too
    # Start a body worker with the gateway. Otherwise the first long body starts it.
    warm_worker: bool = False
    credentials: GatewayCredentials = field(default_factory=GatewayCredentials)
    backend: BackendOptions = BackendOptions()
    tls: TlsIdentity | None = None

    def __post_init__(self) -> None:
        assert (self.tokenizer is None) == (self.tokenizer_folder is None)


async def run_gateway(
    deployment: Deployment,
    problem: Problem | NetworkProblem,
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
    tenants = Tenants(deployment.gateway, lambda: options.credentials.tenants)
    credentials = [options.credentials, options.backend.member_key, options.tls]
    with listen(deployment.gateway.host, deployment.gateway.port) as listening:
        async with (
            reloading(credentials, deployment.gateway.credentials_poll_s),
            running(deployment, problem, options.backend, clock, tenants) as backend,
        ):
            scenes = backend.scenes if deployment.gateway.console else None
            async with serving(
                deployment, backend, options, clock, listening, stopping, tenants, scenes
            ) as url:
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
    tenants: Tenants | None = None,
    scenes: SceneSource | None = None,
) -> AsyncIterator[str]:
    """Serves the API over any backend; yields its URL. `tenants` is also the backend's. `scenes`:
    what the console shows; None: there is no console."""
    section, max_tokens = deployment.gateway, deployment.model.max_tokens
    history = RequestHistory(clock)
    recent = None if scenes is None else RecentRequests(clock, history)
    observers: list[RequestObserver] = [history, *([] if recent is None else [recent])]
    metrics = ApiMetrics()
    metrics.include(backend.metrics)
    async with AsyncExitStack() as stack:
        exporter = stack.enter_context(chosen_exporter(section.otlp_endpoint, "gateway"))
        if exporter is not None:
            observers.append(RequestExport(exporter, deployment.model.name, clock))
        tenants = tenants or Tenants(section, lambda: options.credentials.tenants)
        workers = await stack.enter_async_context(
            _body_workers(deployment, options, tenants, clock, metrics)
        )
        threads = stack.enter_context(
            ThreadPoolExecutor(THREADS, thread_name_prefix="prfaas-tokenising")
        )
        turns = Turns(range(THREADS), tenants, clock, queued_per_tenant=QUEUED_PER_TENANT)
        stack.push_async_callback(turns.close)
        body_reader = BodyReader(
            each_bytes=int(section.max_body_mb * _MB),
            all_bytes=int(section.max_bodies_mb * _MB),
            patience_s=section.timeouts.body_s,
        )
        api = GatewayApi(
            ServedModel(deployment.model.name, max_tokens),
            backend,
            Prompts(
                RequestPreparer(deployment.model.name, max_tokens, options.tokenizer),
                threads,
                turns,
                workers,
            ),
            options.credentials,
            body_reader,
            Limits(tenants, section.timeouts.stall_s),
            RequestLog(
                metrics,
                clock,
                Observers(observers) if len(observers) > 1 else history,
                samples=exporter is not None,
            ),
            OwnHost.of(section.host, insecure=section.insecure or options.credentials.insecure),
        )
        console: ConsolePaths | None = None
        if scenes is not None and recent is not None:
            port = listening.getsockname()[1]
            access = ConsoleAccess(
                options.credentials, clock, section.host, port, tls=options.tls is not None
            )
            feed = Feed(scenes, recent, clock, access.describe)
            await stack.enter_async_context(feed.running())
            console = ConsolePaths(access, feed, recent, scenes, api.generation, body_reader)
        app = api.application(
            console, FollowingPaths(history, backend, deployment.model.name, clock)
        )
        most = most_of_gateway(section.max_in_flight)
        proxies = Proxies([parse_network(one, "gateway.proxies") for one in section.proxies])
        connections = Connections("gateway", ConnectionTable(bounds_of_process(most), proxies))
        connections.watch(app)
        metrics.include(connections.metrics)
        add_probes(app, "gateway", stopping or Stopping(), backend.unready_reason)
        runner = web.AppRunner(
            app,
            # A client that disconnects cancels its request, also while nothing is written to it.
            handler_cancellation=True,
            access_log=None,
            # The gateway does it itself, within limits and off the event loop.
            auto_decompress=False,
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
            await BoundedSite(runner, listening, connections, ssl_context=context).start()
            async with measure_lag(metrics.observe_lag):
                yield service_url(listening, tls=options.tls is not None)
        finally:
            await runner.cleanup()


@asynccontextmanager
async def _body_workers(
    deployment: Deployment,
    options: GatewayOptions,
    tenants: Tenants,
    clock: Clock,
    metrics: ApiMetrics,
) -> AsyncIterator[BodyWorkers]:
    body_bytes = int(deployment.gateway.max_body_mb * _MB)
    folder = options.tokenizer_folder
    settings = WorkerSettings(
        model=deployment.model.name,
        max_tokens=deployment.model.max_tokens,
        body_bytes=body_bytes,
        memory_bytes=memory_bound(body_bytes),
        job_s=JOB_S,
        tokenizer_folder=None if folder is None else str(folder.resolve()),
    )
    async with body_workers(settings, tenants, clock, metrics.count_lost_worker) as workers:
        metrics.bodies_waiting.set_function(lambda: workers.waiting)
        if options.warm_worker:
            workers.start_one()
        yield workers
