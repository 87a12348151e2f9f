"""The kvd's process: makes its parts, connects them, and closes them in the right order."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address, parse_address
from prfaas.config.host import KvdSection, KvdTimeouts
from prfaas.errors import InputError
from prfaas.http_client.client import open_client
from prfaas.kvd.engine_socket.pins import PinnedPrefixes
from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.kvd.events import EventLog
from prfaas.kvd.heartbeat import send_heartbeats
from prfaas.kvd.http_api import HttpApi
from prfaas.kvd.report import Reporter
from prfaas.kvd.store import Store, StoreOptions
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas.transport.link import ConnectionBudget, LinkOptions
from prfaas.transport.listener import Listener
from prfaas.types import NodeId

SWEEP_S = 0.25
_SAMPLE_EVERY = 2  # sweeps per report of the links
_CONNECTIONS = 64  # of all links together, not counting the first of each
_DEFAULTS = KvdSection()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One certificate for the listener and one for links: a CA may issue each for one use only."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


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
    gateway_key: str | None = None  # for heartbeats to the gateways
    tls: TlsFiles | None = None
    # Required by this kvd's HTTP API, and sent to peers and to gateways without `gateway_key`.
    key: str | None = field(default=None, repr=False)
    store: StoreOptions = field(default_factory=StoreOptions)
    timeouts: KvdTimeouts = _DEFAULTS.timeouts
    connections: int = _DEFAULTS.connections  # per peer


@dataclass(frozen=True, slots=True)
class RunningKvd:
    """The addresses of a kvd that is running."""

    socket: Path
    data: Address
    http_url: str
    store: Store


@asynccontextmanager
async def run_kvd(options: KvdOptions, clock: Clock | None = None) -> AsyncIterator[RunningKvd]:
    """A kvd that serves until the block ends."""
    clock = clock or MonotonicClock()
    async with AsyncExitStack() as stack:
        tls, timeouts = options.tls, options.timeouts
        try:
            listener = Listener(
                *options.listen,
                tls=server_context(tls.ca, tls.cert, tls.key) if tls else None,
                clock=clock,
            )
        except OSError as error:
            raise InputError(f"{options.listen}: {error.strerror}", where="--listen") from None
        stack.callback(listener.close)
        lateness = LatenessMonitor(clock)
        stack.callback(lateness.close)
        data = _reachable(Address(*listener.address), options.advertise)
        events = EventLog(instance=uuid.uuid4().hex)
        store = Store(NodeId(options.node or f"kvd-{data}"), options.store, events, clock)
        links = Links(
            LinkOptions(
                connections=options.connections,
                connect_s=timeouts.connect_s,
                silence_s=timeouts.connection_silence_s,
                stall_s=timeouts.transfer_stall_s,
                tls_name=SERVICE_NAME if tls else None,
            ),
            tls=client_context(tls.ca, tls.client_cert, tls.client_key) if tls else None,
            budget=ConnectionBudget(_CONNECTIONS),
            late_since=lateness.since,
        )
        address = options.via or str(data)
        incoming = IncomingTransfers(store, listener, address, timeouts, clock)
        outgoing = OutgoingTransfers(store, links, clock)
        engines = EngineSocketServer(
            store, incoming, outgoing, PinnedPrefixes(store, clock), address
        )
        reporter = Reporter(store, incoming, outgoing, engines, links, listener, lateness)
        kvds = await stack.enter_async_context(open_client(options.key))
        gateway_key = options.key if options.gateway_key is None else options.gateway_key
        gateways = await stack.enter_async_context(open_client(gateway_key))
        api = HttpApi(store, incoming, outgoing, reporter, kvds)
        served = await _serve_http(stack, api.app(options.key), options.http)
        engines.http_url = http_url = f"http://{_reachable(served, options.advertise)}"
        await _serve_engines(stack, engines, options.socket)
        # Closed in the reverse order: first no new work, then current transfers, then the pages.
        # Links and listener signal this loop from their threads, so they close while it runs.
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(_sweep(incoming, links))]
        for gateway in options.gateways:
            heartbeats = send_heartbeats(
                gateways, gateway, http_url, options.cluster, reporter, timeouts
            )
            tasks.append(group.create_task(heartbeats))
        try:
            yield RunningKvd(options.socket, data, http_url, store)
        finally:
            for task in tasks:
                task.cancel()
            engines.close()
            await asyncio.to_thread(links.close)
            await asyncio.to_thread(listener.close)
            await asyncio.sleep(0)  # runs the callbacks that they have scheduled
            store.close()


async def _sweep(incoming: IncomingTransfers, links: Links) -> None:
    turn = 0
    while True:
        await asyncio.sleep(SWEEP_S)
        incoming.sweep()
        turn += 1
        if turn % _SAMPLE_EVERY == 0:
            links.sample()


def _reachable(address: Address, advertise: str | None) -> Address:
    """The address for peers: a wildcard can be listened on, but not connected to."""
    anywhere = address.host in ("0.0.0.0", "::")
    host = advertise or (socket.gethostname() if anywhere else address.host)
    return Address(host, address.port)


async def _serve_http(stack: AsyncExitStack, app: web.Application, address: Address) -> Address:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, address.host, address.port).start()
    except OSError as error:
        raise InputError(f"{address}: {error.strerror}", where="--http") from None
    return Address(*runner.addresses[0][:2])


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
