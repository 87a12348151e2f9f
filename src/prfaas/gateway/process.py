"""The gateway process: API and backend wired together, served until a signal stops it."""

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
SHORTEST_DRAIN_S = 0.01  # to aiohttp, zero means no limit
# Drain the body this long after an early error, so that the client receives the response.
LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Contents of the files that the deployment names, and options that it does not have."""

    tokenizer: ModelTokenizer | None = None
    keys: Sequence[TenantKey] = ()
    backend: BackendOptions = BackendOptions()
    drain_s: float = 30.0  # how long requests in flight may take after SIGTERM


async def run_gateway(
    deployment: Deployment,
    problem: Problem,
    options: GatewayOptions,
    report: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Reports its URL once it listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = MonotonicClock()
    with _listen(deployment.gateway.host, deployment.gateway.port) as listening:
        async with running(deployment, problem, options.backend, clock) as backend:
            async with serving(deployment, backend, options, clock, listening) as url:
                # The garbage collector skips objects that live as long as the process: every stream
                # would wait for the 50 ms that a scan takes.
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
    """Serves the API over any backend; yields its URL."""
    section, max_tokens = deployment.gateway, deployment.model.max_tokens
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prfaas-tokenising") as threads:
        metrics = ApiMetrics()
        metrics.include(backend.metrics)
        api = GatewayApi(
            ServedModel(deployment.model.name, max_tokens),
            backend,
            Prompts(options.tokenizer, max_tokens, threads),
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
            api.application(),
            # A client that disconnects cancels its request, also while nothing is written to it.
            handler_cancellation=True,
            access_log=None,
            # Also closes connections whose first request is never completed.
            keepalive_timeout=section.body_s,
            lingering_time=LINGER_S,
            # aiohttp waits this long twice: once for the requests in flight, and once more after it
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
