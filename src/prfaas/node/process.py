"""A node's process: connects engine, kvd and HTTP, and stops as `service.stopping` says."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from prfaas.clock import MonotonicClock
from prfaas.config.host import NodeTimeouts
from prfaas.engine.api import Engine
from prfaas.errors import ConnectionLost, InputError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.listening import listen, service_url
from prfaas.node.job_builder import JobBuilder
from prfaas.node.metrics import NodeMetrics
from prfaas.node.request_reader import NodeModel
from prfaas.node.request_runner import open_request_runner
from prfaas.node.server import NodeApi
from prfaas.security.own_host import OwnHost, host_name
from prfaas.security.reload import reloading
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import TlsIdentity
from prfaas.service.bounded_site import BoundedSite, Connections
from prfaas.service.connections import ConnectionTable, bounds_of_process
from prfaas.service.descriptors import raise_descriptor_limit
from prfaas.service.exposition import include
from prfaas.service.stopping import Stopping
from prfaas.text import ModelTokenizer
from prfaas.tracing.otlp import chosen_exporter
from prfaas.tracing.recorder import SpanRecorder

KVD_POLL_S = 0.1  # between two attempts to reach a kvd that starts beside the node
PREPARE_S = 10.0  # for a device to register the first pages of the kvd's arena: a second is usual


@dataclass(frozen=True, slots=True)
class KvdAddress:
    """Where the node's kvd is. Without a URL the node cannot tell it in `/v1/models`."""

    socket: str
    url: str | None = None
    process_id: int | None = None  # of a kvd that this node has started

    def files(self) -> Sequence[Path]:
        """The kvd has files of its own."""
        return ()

    def reload(self) -> None:
        """Makes the node's own kvd read its credentials again."""
        if self.process_id is not None:
            os.kill(self.process_id, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Values of `config.host.NodeSection` that the process needs; defaults are defined there."""

    name: str  # of the model in requests
    host: str
    port: int
    advertise: str | None
    timeouts: NodeTimeouts
    insecure: bool = False
    keep_answers: bool = True
    otlp_endpoint: str | None = None  # None: the environment's, if it has one
    credentials_poll_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeCredentials:
    """What the node requires of its callers, and shows to its kvd."""

    member_key: SharedKey | None = None
    metrics_key: SharedKey | None = None  # opens /metrics
    tls: TlsIdentity | None = None


async def run_node(
    engine: Engine,
    tokenizer: ModelTokenizer | None,
    kvd: KvdAddress,
    settings: NodeSettings,
    credentials: NodeCredentials,
    report: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT. After SIGTERM the node takes requests for `leave_s` more, and
    says meanwhile that it is not ready; then it drains. Calls `report` with the node's URL once the
    node takes requests."""
    raise_descriptor_limit()
    stopping = Stopping()
    stopping.handle_signals()
    member_key, metrics_key, tls = (
        credentials.member_key,
        credentials.metrics_key,
        credentials.tls,
    )
    listening = listen(settings.host, settings.port)
    url = settings.advertise or service_url(listening, tls=tls is not None)
    block_tokens = engine.compat.block_tokens
    metrics = NodeMetrics(settings.name, block_tokens, engine.limits)
    async with AsyncExitStack() as stack:
        stack.callback(listening.close)
        await stack.enter_async_context(
            reloading([member_key, metrics_key, tls, kvd], settings.credentials_poll_s)
        )
        keeps = settings.keep_answers
        await _wait_for_kvd(kvd.socket, settings.timeouts.kvd_wait_s, stopping)
        client = stack.enter_context(_client(engine, kvd, url, keeps_answers=keeps))
        await _prepare_memory(engine, client)
        # Under the name of its kvd: the two are one host.
        kvd_name, clock = client.registered.node, MonotonicClock()
        exporter = stack.enter_context(chosen_exporter(settings.otlp_endpoint, "node", kvd_name))
        recorder = SpanRecorder("node", clock, kvd_name, exporter)
        request_runner = await stack.enter_async_context(
            open_request_runner(
                engine,
                JobBuilder(client, block_tokens, keeps_answers=keeps),
                metrics,
                clock,
            )
        )
        model = NodeModel(settings.name, tokenizer, kvd.url)
        api = NodeApi(
            model,
            engine,
            request_runner,
            metrics,
            stopping,
            lambda: "" if client.connected else "the node's kvd does not answer",
            recorder,
        )
        await api.start()
        own_host = OwnHost.of(
            settings.host,
            insecure=settings.insecure,
            advertised=host_name(settings.advertise) if settings.advertise else None,
        )
        application = api.application(member_key, metrics_key, own_host)
        # Cancels the handler of a client that hangs up, even while nothing is written to it.
        connections = Connections("node", ConnectionTable(bounds_of_process()))
        connections.watch(application)
        include(metrics.registry, connections.metrics)
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        context = tls.member_http() if tls is not None else None
        await BoundedSite(runner, listening, connections, ssl_context=context).start()
        report(url)
        await stopping.wait_until_left(settings.timeouts.leave_s)
        await request_runner.drain(settings.timeouts.drain_s)


async def _wait_for_kvd(path: str, wait_s: float, stopping: Stopping) -> None:
    """Returns when a process listens on the socket, or the time is up."""
    clock = MonotonicClock()
    until_s = clock.now() + wait_s
    while clock.now() < until_s and not stopping.begun:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                return
        await asyncio.sleep(KVD_POLL_S)


async def _prepare_memory(engine: Engine, client: KvdClient) -> None:
    """Otherwise the first request would wait while a device prepares the pages."""
    mapped: list[mmap.mmap] = []
    client.watch_memory(mapped.append)
    for memory in mapped:
        await asyncio.to_thread(engine.use_memory, memory, wait_s=PREPARE_S)
    client.watch_memory(engine.use_memory)


def _client(engine: Engine, kvd: KvdAddress, url: str, *, keeps_answers: bool) -> KvdClient:
    try:
        return KvdClient(
            kvd.socket,
            engine_id=url,
            spec=engine.spec,
            block_tokens=engine.compat.block_tokens,
            compat=engine.compat,
            url=url,
            keeps_answers=keeps_answers,
        )
    except ConnectionLost as error:
        raise InputError(
            str(error), where="--kvd", fix="start a kvd with `prfaas kvd`, or leave the option out"
        ) from None
