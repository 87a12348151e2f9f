"""A node's process: wires engine, kvd, HTTP and events together, and drains when told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from prfaas.clock import MonotonicClock
from prfaas.engine.api import Engine
from prfaas.errors import ConnectionLost, InputError
from prfaas.http_client.client import open_client
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.node.event_follower import EventFollower, Learner
from prfaas.node.events import Announcer
from prfaas.node.job_builder import JobBuilder
from prfaas.node.metrics import NodeMetrics
from prfaas.node.publisher import publishing
from prfaas.node.request_runner import serving
from prfaas.node.server import Model, Surface
from prfaas.text import ModelTokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvdPlace:
    """Where the node's kvd is. Without its URL nobody hears of cache events from this node."""

    socket: str
    url: str | None = None
    key: str | None = field(default=None, repr=False)  # of its HTTP side


@dataclass(frozen=True, slots=True)
class NodeSettings:
    name: str  # of the model, as clients ask for it
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    advertise: str | None = None  # the URL others reach it at, where it differs
    events: str = "tcp://127.0.0.1:0"
    replay: str = "tcp://127.0.0.1:0"
    drain_s: float = 30.0  # how long requests under way may take after a SIGTERM
    leave_s: float = 0.0  # at least so long gateways hear that it leaves: prefixes can be saved


async def run_node(
    engine: Engine,
    words: ModelTokenizer | None,
    kvd: KvdPlace,
    settings: NodeSettings,
    report: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Reports its URL once it takes requests."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listening = _listen(settings)
    port = listening.getsockname()[1]
    url = settings.advertise or f"http://{settings.host}:{port}"
    block_tokens = engine.compat.block_tokens
    metrics = NodeMetrics(settings.name, block_tokens, engine.limits)
    announcer = Announcer(engine.spec, block_tokens)
    async with AsyncExitStack() as stack:
        stack.callback(listening.close)
        client = stack.enter_context(_client(engine, kvd, url))
        publisher = await stack.enter_async_context(publishing(settings.events, settings.replay))
        served = await stack.enter_async_context(
            serving(
                engine,
                JobBuilder(client, block_tokens),
                metrics,
                MonotonicClock(),
                Learner(announcer, publisher),
            )
        )
        model = Model(settings.name, words, kvd.url, publisher.endpoint, publisher.replay_endpoint)
        application = Surface(model, engine, served, metrics).application()
        # A client that hangs up ends its request, also where nothing is being written to it.
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listening).start()
        if kvd.url is not None:
            http = await stack.enter_async_context(open_client(kvd.key))
            follower = EventFollower(http, kvd.url)
            await stack.enter_async_context(_running(follower.follow(announcer, publisher)))
        report(url)
        await stop.wait()
        _LOG.info("draining")
        await asyncio.gather(served.drain(settings.drain_s), asyncio.sleep(settings.leave_s))


@asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _listen(settings: NodeSettings) -> socket.socket:
    try:
        return socket.create_server((settings.host, settings.port), backlog=1024)
    except OSError as error:
        raise InputError(
            f"cannot listen: {error.strerror or error}",
            where=f"{settings.host}:{settings.port}",
            fix="choose another --host or --port",
        ) from None


def _client(engine: Engine, kvd: KvdPlace, url: str) -> KvdClient:
    try:
        return KvdClient(
            kvd.socket,
            engine_id=url,
            spec=engine.spec,
            block_tokens=engine.compat.block_tokens,
            compat=engine.compat,
            url=url,
        )
    except ConnectionLost as error:
        raise InputError(
            str(error), where="--kvd", fix="start one with `prfaas kvd`, or leave the option out"
        ) from None
