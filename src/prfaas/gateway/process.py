"""A gateway's process: front and back wired together, served until told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment
from prfaas.errors import InputError
from prfaas.gateway.api import GatewayApi, Limits, ServedModel
from prfaas.gateway.api.api_keys import Keyring, TenantKey
from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.loop_lag import measure_lag
from prfaas.gateway.api.metrics import ApiMetrics
from prfaas.gateway.api.prompts import THREADS, Prompts
from prfaas.gateway.api.request_log import RequestLog
from prfaas.gateway.backend import BackendOptions, running
from prfaas.gateway.request import Backend
from prfaas.planner.problem import Problem
from prfaas.text import ModelTokenizer

_LOG = logging.getLogger(__name__)
_MB = 10**6
SHORTEST_DRAIN_S = 0.01  # aiohttp takes zero for no limit
LINGER_S = 1.0  # what is still being sent behind a refusal is read so long, so that it is heard


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What was read from files that the deployment names, and what is not in it."""

    words: ModelTokenizer | None = None
    keys: Sequence[TenantKey] = ()
    back: BackendOptions = BackendOptions()
    drain_s: float = 30.0  # how long answers under way may take after a SIGTERM


async def run_gateway(
    deployment: Deployment,
    problem: Problem,
    options: GatewayOptions,
    report: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then lets answers end. Reports its URL once it listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = MonotonicClock()
    with _listen(deployment.gateway.host, deployment.gateway.port) as listening:
        async with running(deployment, problem, options.back, clock) as back:
            async with serving(deployment, back, options, clock, listening) as url:
                # What lives as long as the process is not looked through for garbage again: every
                # stream would wait for the 50 ms that takes.
                gc.collect()
                gc.freeze()
                report(url)
                await stop.wait()
                _LOG.info("draining")


@asynccontextmanager
async def serving(
    deployment: Deployment,
    backend: Backend,
    options: GatewayOptions,
    clock: Clock,
    listening: socket.socket,
) -> AsyncIterator[str]:
    """The front over any backend; yields its URL."""
    section, max_tokens = deployment.gateway, deployment.model.max_tokens
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prfaas-tokenising") as threads:
        metrics = ApiMetrics()
        metrics.include(backend.metrics)
        front = GatewayApi(
            ServedModel(deployment.model.name, max_tokens),
            backend,
            Prompts(options.words, max_tokens, threads),
            Keyring(options.keys),
            BodyReader(
                each_bytes=int(section.max_body_mb * _MB),
                all_bytes=int(section.max_bodies_mb * _MB),
                patience_s=section.body_s,
            ),
            Limits(section.max_in_flight, section.stall_s),
            RequestLog(metrics, clock),
        )
        runner = web.AppRunner(
            front.application(),
            # A client that hangs up ends its request, also where nothing is being written to it.
            handler_cancellation=True,
            access_log=None,
            # Also ends connections whose first request never gets complete.
            keepalive_timeout=section.body_s,
            lingering_time=LINGER_S,
            # aiohttp waits this long twice: once for the answers under way, and once more after it
            # has refused the rest of the bodies that are still arriving.
            shutdown_timeout=max(options.drain_s / 2, SHORTEST_DRAIN_S),
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            host, port = listening.getsockname()[:2]
            async with measure_lag(metrics.loop_lag_s.observe):
                yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            await runner.cleanup()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise InputError(
            f"cannot listen: {error.strerror or error}",
            where=f"{host}:{port}",
            fix="choose another --host or --port",
        ) from None
