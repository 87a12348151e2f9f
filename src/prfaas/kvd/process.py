"""The kvd's process: makes its parts, connects them, and closes them in the right order.

It stops as `service.stopping` says."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address, parse_address
from prfaas.config.host import KvdSection, KvdTimeouts
from prfaas.errors import InputError
from prfaas.http_client.client import open_client
from prfaas.kvd.drain import Drain
from prfaas.kvd.engine_socket.pins import PinnedPrefixes
from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.kvd.events import EventLog
from prfaas.kvd.heartbeat import send_heartbeats
from prfaas.kvd.http_api import HttpApi
from prfaas.kvd.report import Reporter
from prfaas.kvd.store import Store, StoreOptions, check_memory
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.listening import listen, reachable
from prfaas.security.exposure import Protection, is_loopback, refuse_exposure
from prfaas.security.own_host import OwnHost
from prfaas.security.peers import PeerRules
from prfaas.security.reload import reloading
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import SERVICE_NAME, TlsIdentity
from prfaas.service.bounded_site import BoundedSite, Connections
from prfaas.service.connections import ConnectionTable, bounds_of_process
from prfaas.service.descriptors import raise_descriptor_limit
from prfaas.service.stopping import Stopping
from prfaas.supervision import Failures, repeat
from prfaas.tracing.otlp import chosen_exporter
from prfaas.tracing.recorder import SpanRecorder
from prfaas.transport.host_speed import Sending, choose_sending
from prfaas.transport.link import ConnectionBudget, LinkOptions
from prfaas.transport.listener import Listener
from prfaas.transport.workers.pool import WorkerPool, default_workers
from prfaas.types import NodeId

log = logging.getLogger(__name__)

SWEEP_S = 0.25
_SAMPLE_EVERY = 2  # sweeps per report of the links
_CONNECTIONS = 64  # of all links together, not counting the first of each
_DEFAULTS = KvdSection()


@dataclass(frozen=True, slots=True)
class KvdOptions:
    socket: Path
    listen: Address = parse_address(_DEFAULTS.listen, "listen", any_port=True)
    http: Address = parse_address(_DEFAULTS.http, "http", any_port=True)
    node: str | None = None  # None: the data address
    # This host's address for peers. None: the listen address, or the host name for a wildcard.
    advertise: str | None = None
    via: str | None = None  # relay address that grants contain instead of the data address
    cluster: str = ""  # the cluster's name in the deployment, for gateways
    gateways: Sequence[str] = ()
    tls: TlsIdentity | None = None
    # Required by this kvd's HTTP API, and sent to peers and gateways.
    member_key: SharedKey | None = None
    metrics_key: SharedKey | None = None  # opens /metrics
    peers: Sequence[str] = ()  # hosts that KV may be sent to and pulled from
    insecure: bool = False  # any host may be reached, and a peer, without key and TLS
    store: StoreOptions = field(default_factory=StoreOptions)
    timeouts: KvdTimeouts = _DEFAULTS.timeouts
    connections: int | None = _DEFAULTS.connections  # per peer; None: as many as workers, or more
    workers: int | None = _DEFAULTS.workers  # None: by the number of cores
    otlp_endpoint: str | None = None  # None: the environment's, if it has one
    credentials_poll_s: float = _DEFAULTS.credentials_poll_s


@dataclass(frozen=True, slots=True)
class RunningKvd:
    """The addresses of a kvd that is running."""

    socket: Path
    data: Address
    http_url: str
    store: Store
    drain: Drain


async def serve_kvd(options: KvdOptions, report: Callable[[RunningKvd], None]) -> None:
    """Serves until SIGTERM or SIGINT, then refuses grants and finishes its transfers. Calls
    `report` once the kvd listens."""
    raise_descriptor_limit()
    stopping = Stopping()
    stopping.handle_signals()
    credentials = [options.member_key, options.metrics_key, options.tls]
    async with (
        reloading(credentials, options.credentials_poll_s),
        run_kvd(options, stopping=stopping) as kvd,
    ):
        report(kvd)
        await stopping.wait_until_left(options.timeouts.leave_s)
        await kvd.drain.run(options.timeouts.drain_s)


@asynccontextmanager
async def run_kvd(
    options: KvdOptions, clock: Clock | None = None, stopping: Stopping | None = None
) -> AsyncIterator[RunningKvd]:
    """A kvd that serves until the block ends."""
    clock = clock or MonotonicClock()
    async with AsyncExitStack() as stack:
        tls, timeouts = options.tls, options.timeouts
        _refuse_exposure(options)
        check_memory(options.store.memory_bytes)
        workers = WorkerPool(
            default_workers() if options.workers is None else options.workers,
            credentials=tls.contents if tls else None,
        )
        # Closed last: connections end with the help of their workers.
        stack.callback(workers.close)
        try:
            listener = Listener(
                *options.listen,
                tls=tls.server if tls else None,
                workers=workers,
                clock=clock,
            )
        except OSError as error:
            raise InputError(f"{options.listen}: {error.strerror}", where="--listen") from None
        stack.callback(listener.close)
        lateness = LatenessMonitor(clock)
        stack.callback(lateness.close)
        data = reachable(Address(*listener.address), options.advertise)
        events = EventLog(instance=uuid.uuid4().hex)
        store = Store(NodeId(options.node or f"kvd-{data}"), options.store, events, clock)
        stack.callback(store.close)
        await asyncio.to_thread(store.take_memory)
        exporter = stack.enter_context(chosen_exporter(options.otlp_endpoint, "kvd", store.node))
        recorder = SpanRecorder("kvd", clock, store.node, exporter)
        sending = await _choose_sending(options)
        trusted = options.insecure or options.member_key is not None
        peers = PeerRules(options.peers, trusted=trusted)
        links = Links(
            LinkOptions(
                connections=options.connections or max(LinkOptions().connections, workers.count),
                connect_s=timeouts.connect_s,
                silence_s=timeouts.connection_silence_s,
                stall_s=timeouts.transfer_stall_s,
                tls_name=SERVICE_NAME if tls else None,
                send_files=sending.send_files,
            ),
            tls=tls.client if tls else None,
            budget=ConnectionBudget(_CONNECTIONS),
            workers=workers,
            peers=peers,
            late_since=lateness.since,
        )
        address = options.via or str(data)
        incoming = IncomingTransfers(store, listener, address, timeouts, clock, recorder)
        outgoing = OutgoingTransfers(store, links, clock, recorder)
        engines = EngineSocketServer(
            store, incoming, outgoing, PinnedPrefixes(store, clock), address
        )
        connections = Connections("kvd", ConnectionTable(bounds_of_process()))
        reporter = Reporter(store, incoming, outgoing, engines, links, listener, lateness)
        reporter.include(connections.metrics)
        # Other kvds and the gateways of this kvd's configuration: both may see the member key.
        http = await stack.enter_async_context(
            open_client(
                options.member_key,
                tls=tls.client if tls else None,
                server_name=tls.server_name if tls else None,
            )
        )
        stopping = stopping or Stopping()
        api = HttpApi(store, incoming, outgoing, reporter, http, peers, stopping, clock, recorder)
        own_host = OwnHost.of(
            options.http.host, insecure=options.insecure, advertised=options.advertise
        )
        app = api.app(options.member_key, options.metrics_key, own_host)
        context = tls.member_http() if tls else None
        served = await _serve_http(stack, app, connections, options.http, context)
        scheme = "https" if tls else "http"
        api.url = http_url = f"{scheme}://{reachable(served, options.advertise)}"
        engines.http_url = http_url
        await _serve_engines(stack, engines, options.socket)
        # Closed in the reverse order: first no new work, then current transfers, then the pages.
        # Links and listener signal this loop from their threads, so they close while it runs.
        group = await stack.enter_async_context(asyncio.TaskGroup())
        failures = Failures(clock)
        tasks = [group.create_task(_sweep(incoming, links, failures))]
        for gateway in options.gateways:
            heartbeats = send_heartbeats(
                http, gateway, http_url, options.cluster, reporter, timeouts, failures
            )
            tasks.append(group.create_task(heartbeats))
        try:
            drain = Drain(incoming, outgoing, engines)
            yield RunningKvd(options.socket, data, http_url, store, drain)
        finally:
            for task in tasks:
                task.cancel()
            engines.close()
            await asyncio.to_thread(links.close)
            await asyncio.to_thread(listener.close)
            await asyncio.sleep(0)  # runs the callbacks that they have scheduled
            store.close()


async def _choose_sending(options: KvdOptions) -> Sending:
    """Takes a quarter of a second, which a kvd does not spend without need."""
    if options.tls is not None or is_loopback(options.listen.host):
        return Sending(True, "it encrypts, or has no other hosts, so the default applies")
    sending = await asyncio.to_thread(choose_sending)
    log.info("%s", sending)
    return sending


async def _sweep(incoming: IncomingTransfers, links: Links, failures: Failures) -> None:
    turn = 0

    async def step() -> None:
        nonlocal turn
        turn += 1
        failures.contain("sweep", incoming.sweep)
        if turn % _SAMPLE_EVERY == 0:
            failures.contain("sample", links.sample)

    await repeat(step, SWEEP_S, failures, loop="sweep")


def _refuse_exposure(options: KvdOptions) -> None:
    protection = Protection(
        options.member_key is not None, options.tls is not None, options.insecure
    )
    for host, where in ((options.listen.host, "--listen"), (options.http.host, "--http")):
        refuse_exposure(host, protection, where=where, key_flag="--member-key-file")


async def _serve_http(
    stack: AsyncExitStack,
    app: web.Application,
    connections: Connections,
    address: Address,
    tls: ssl.SSLContext | None,
) -> Address:
    # A client that leaves ends its handler: a wait for an event would go on for up to a minute.
    connections.watch(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        listening = listen(*address)
    except InputError as error:
        raise InputError(f"{address}: {error.problem}", where="--http") from None
    await BoundedSite(runner, listening, connections, ssl_context=tls).start()
    return Address(*listening.getsockname()[:2])


async def _serve_engines(stack: AsyncExitStack, engines: EngineSocketServer, path: Path) -> None:
    sock = _listening(path)
    server = await asyncio.get_running_loop().create_unix_server(engines.connection, sock=sock)

    def close() -> None:
        server.close()
        path.unlink(missing_ok=True)

    stack.callback(close)


def _listening(path: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise InputError(
                "another process listens on this socket",
                file=path,
                where="--socket",
                fix="give another path",
            )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # only engines of the same user may connect: they map the arena
    try:
        path.unlink(missing_ok=True)  # a killed kvd leaves its socket
        sock.bind(str(path))
        sock.listen()
    except OSError as error:
        sock.close()
        raise InputError(f"cannot listen: {error.strerror}", file=path, where="--socket") from None
    finally:
        os.umask(before)
    return sock
