"""The kvd's process: makes every part, joins them, and ends them in the right order."""

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
from prfaas.config.address import Address
from prfaas.errors import InputError
from prfaas.http_client.client import open_client
from prfaas.kvd.engine_socket.pins import Pins
from prfaas.kvd.engine_socket.server import Engines
from prfaas.kvd.events import EventLog
from prfaas.kvd.heartbeat import beat
from prfaas.kvd.http_api import GatewaySide
from prfaas.kvd.report import Reporter
from prfaas.kvd.store import Store, StoreOptions
from prfaas.kvd.transfers.incoming import IncomingTransfers, TransferOptions
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.security.tls import SERVICE_NAME, client_context, server_context
from prfaas.transport.link import ConnectionBudget, LinkOptions
from prfaas.transport.listener import Listener
from prfaas.types import NodeId

SWEEP_S = 0.25
_SAMPLE_EVERY = 2  # sweeps between two reports of the links
_CONNECTIONS = 64  # of all links together, beyond the first of each


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One certificate for listening, one for sending: a CA may issue them for one use only."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


@dataclass(frozen=True, slots=True)
class KvdOptions:
    socket: Path
    listen: Address = Address("127.0.0.1", 0)
    http: Address = Address("127.0.0.1", 0)
    node: str | None = None  # None: the data address
    advertise: str | None = None  # this host as others reach it; None: as it listens, or its name
    via: str | None = None  # what grants name instead of the data address
    cluster: str = ""  # of the deployment, for gateways
    gateways: Sequence[str] = ()
    gateway_key: str | None = None  # that they ask for
    tls: TlsFiles | None = None
    key: str | None = field(default=None, repr=False)  # of HTTP, here and at peers and gateways
    store: StoreOptions = field(default_factory=StoreOptions)
    transfers: TransferOptions = field(default_factory=TransferOptions)
    connections: int = LinkOptions().connections  # to each peer


@dataclass(frozen=True, slots=True)
class Running:
    """Where a kvd can be reached."""

    socket: Path
    data: Address
    http_url: str
    store: Store


@asynccontextmanager
async def running(options: KvdOptions, clock: Clock | None = None) -> AsyncIterator[Running]:
    """A kvd, serving until the block ends."""
    clock = clock or MonotonicClock()
    async with AsyncExitStack() as stack:
        tls = options.tls
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
        instance = uuid.uuid4().hex
        events = EventLog(instance)
        store = Store(NodeId(options.node or f"kvd-{data}"), options.store, events)
        links = Links(
            LinkOptions(connections=options.connections, tls_name=SERVICE_NAME if tls else None),
            tls=client_context(tls.ca, tls.client_cert, tls.client_key) if tls else None,
            budget=ConnectionBudget(_CONNECTIONS),
            late_since=lateness.since,
        )
        address = options.via or str(data)
        incoming = IncomingTransfers(store, listener, address, options.transfers, clock)
        outgoing = OutgoingTransfers(store, links, clock)
        engines = Engines(store, incoming, outgoing, Pins(store, clock), events, address)
        reporter = Reporter(
            instance,
            address,
            store,
            incoming,
            outgoing,
            engines,
            events,
            links,
            listener,
            lateness,
        )
        kvds = await stack.enter_async_context(open_client(options.key))
        gateway_key = options.key if options.gateway_key is None else options.gateway_key
        gateways = await stack.enter_async_context(open_client(gateway_key))
        side = GatewaySide(store, incoming, outgoing, events, reporter, kvds)
        served = await _serve_http(stack, side.app(options.key), options.http)
        engines.http_url = http_url = f"http://{_reachable(served, options.advertise)}"
        await _serve_engines(stack, engines, options.socket)
        # Ended in the reverse order: no new work, then what is under way, then the pages. Links and
        # the listener signal this loop from their threads, so they end while it still runs.
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(_sweep(incoming, links))]
        for gateway in options.gateways:
            beating = beat(gateways, gateway, http_url, options.cluster, reporter)
            tasks.append(group.create_task(beating))
        try:
            yield Running(options.socket, data, http_url, store)
        finally:
            for task in tasks:
                task.cancel()
            engines.close()
            await asyncio.to_thread(links.close)
            await asyncio.to_thread(listener.close)
            await asyncio.sleep(0)  # what they have signalled
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
    """A wildcard is an address to listen on, not one to connect to."""
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


async def _serve_engines(stack: AsyncExitStack, engines: Engines, path: Path) -> None:
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
                "another process serves it", file=path, where="--socket", fix="give another path"
            )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # engines of the same user only: they map the arena
    try:
        path.unlink(missing_ok=True)  # what a killed kvd has left
        sock.bind(str(path))
        sock.listen()
    except OSError as error:
        sock.close()
        raise InputError(f"cannot listen: {error.strerror}", file=path, where="--socket") from None
    finally:
        os.umask(before)
    return sock
