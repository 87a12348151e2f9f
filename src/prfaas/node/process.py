"""A node's process: connects engine, kvd, HTTP and events, and drains on SIGTERM."""

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
from prfaas.node.event_follower import EventFollower, PromptListener
from prfaas.node.events import EventTranslator
from prfaas.node.job_builder import JobBuilder
from prfaas.node.metrics import NodeMetrics
from prfaas.node.publisher import open_publisher
from prfaas.node.request_runner import open_request_runner
from prfaas.node.server import NodeApi, NodeModel
from prfaas.text import ModelTokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvdAddress:
    """Where the node's kvd is. Without a URL the node publishes no cache events."""

    socket: str
    url: str | None = None
    key: str | None = field(default=None, repr=False)  # for the kvd's HTTP API


@dataclass(frozen=True, slots=True)
class NodeSettings:
    name: str  # of the model in requests
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    advertise: str | None = None  # the URL under which gateways reach the node, where it differs
    events: str = "tcp://127.0.0.1:0"
    replay: str = "tcp://127.0.0.1:0"
    drain_s: float = 30.0  # how long running requests may take after SIGTERM
    leave_s: float = 0.0  # minimum seconds to stay up after SIGTERM


async def run_node(
    engine: Engine,
    tokenizer: ModelTokenizer | None,
    kvd: KvdAddress,
    settings: NodeSettings,
    report: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Calls `report` with the node's URL once the node
    takes requests."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listening = _listen(settings)
    port = listening.getsockname()[1]
    url = settings.advertise or f"http://{settings.host}:{port}"
    block_tokens = engine.compat.block_tokens
    metrics = NodeMetrics(settings.name, block_tokens, engine.limits)
    translator = EventTranslator(engine.spec, block_tokens)
    async with AsyncExitStack() as stack:
        stack.callback(listening.close)
        client = stack.enter_context(_client(engine, kvd, url))
        publisher = await stack.enter_async_context(
            open_publisher(settings.events, settings.replay)
        )
        request_runner = await stack.enter_async_context(
            open_request_runner(
                engine,
                JobBuilder(client, block_tokens),
                metrics,
                MonotonicClock(),
                PromptListener(translator, publisher),
            )
        )
        model = NodeModel(
            settings.name, tokenizer, kvd.url, publisher.endpoint, publisher.replay_endpoint
        )
        application = NodeApi(model, engine, request_runner, metrics).application()
        # Cancels the handler of a client that hangs up, even while nothing is written to it.
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listening).start()
        if kvd.url is not None:
            http = await stack.enter_async_context(open_client(kvd.key))
            follower = EventFollower(http, kvd.url)
            await stack.enter_async_context(_running(follower.follow(translator, publisher)))
        report(url)
        await stop.wait()
        _LOG.info("draining")
        await asyncio.gather(
            request_runner.drain(settings.drain_s), asyncio.sleep(settings.leave_s)
        )


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


def _client(engine: Engine, kvd: KvdAddress, url: str) -> KvdClient:
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
            str(error), where="--kvd", fix="start a kvd with `prfaas kvd`, or leave the option out"
        ) from None
