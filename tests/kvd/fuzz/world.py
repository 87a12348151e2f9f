"""A kvd without its process: the real parts, connected as `kvd/process.py` connects them, and
clients whose bytes go straight to its protocols. Its time passes only when it is advanced."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web, web_app

from prfaas.config.address import Address
from prfaas.config.host import KvdTimeouts
from prfaas.http_client.client import open_client
from prfaas.kvd.engine_socket.messages import (
    FrameReader,
    LeaseTicket,
    decode_answer,
)
from prfaas.kvd.engine_socket.pins import PinnedPrefixes
from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.kvd.events import EventLog
from prfaas.kvd.http_api import HttpApi
from prfaas.kvd.report import Reporter
from prfaas.kvd.store import Store, StoreOptions
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.lateness import LatenessMonitor
from prfaas.security.peers import PeerRules
from prfaas.service.stopping import Stopping
from prfaas.transport.link import ConnectionBudget, LinkOptions
from prfaas.transport.listener import Listener
from prfaas.types import Grant, NodeId, NotNow
from prfaas_lab.testing.clock import FakeClock
from tests.kvd.fuzz.http_responses import Responses
from tests.kvd.fuzz.oracle import FuzzFailure
from tests.kvd.fuzz.sessions import Granted, Memory

NODE = "pool"
TIMEOUTS = KvdTimeouts(grant_s=60.0, dispatch_s=30.0, remember_s=120.0)
# Real time: transfers to peers that do not answer must fail before the run can end.
LINK = LinkOptions(connect_s=0.5, open_s=0.5, silence_s=1.0, stall_s=1.0, probe_s=0.2, idle_s=1.0)
_OPENED: Any = Grant | NotNow


class FuzzLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers can be made due."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


@dataclass
class World:
    store: Store
    clock: FakeClock
    loop: FuzzLoop
    listener: Listener
    lateness: LatenessMonitor
    links: Links
    incoming: IncomingTransfers
    outgoing: OutgoingTransfers
    engines: EngineSocketServer
    reporter: Reporter
    http: web.Server
    memory: Memory
    answers: Counter[str]
    own_tasks: int = 1  # of the event loop, apart from those that serve requests

    def without_engine(self) -> World:
        """Another kvd with the same links, listener and clock."""
        options = self.store.options
        store = Store(NodeId(NODE), options, EventLog("instance"), self.clock)
        address = self.memory.data_address
        incoming = IncomingTransfers(store, self.listener, address, TIMEOUTS, self.clock)
        outgoing = OutgoingTransfers(store, self.links, self.clock)
        pins = PinnedPrefixes(store, self.clock)
        engines = EngineSocketServer(store, incoming, outgoing, pins, address)
        reporter = Reporter(
            store, incoming, outgoing, engines, self.links, self.listener, self.lateness
        )
        return replace(
            self,
            store=store,
            incoming=incoming,
            outgoing=outgoing,
            engines=engines,
            reporter=reporter,
            memory=Memory(address, self.memory.peer_url, NODE),
            answers=Counter(),
        )

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.loop.skipped_s += seconds
        self.incoming.sweep()

    def busy(self) -> str:
        """What has not ended, or an empty string."""
        incoming, outgoing = self.incoming.counts(), self.outgoing.counts()
        leases = sum(one.pool.occupancy().leases for one in self.store.storages)
        counts = {
            "leases": leases,
            "held leases": len(self.engines.holders),
            "engines": len(self.engines.connected),
            "granted": incoming["granted"],
            "committed": incoming["committed"],
            "attached": incoming["attached"],
            **outgoing,
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    async def settle(self, within_s: float) -> None:
        """Returns when every transfer and lease has ended. The clients have left."""
        until_s = time.monotonic() + within_s
        while busy := self.busy():
            if time.monotonic() > until_s:
                raise FuzzFailure(f"not ended after all clients have left: {busy}")
            self.advance(70.0)
            await asyncio.sleep(0.01)

    def check_pool(self) -> None:
        for storage in self.store.storages:
            try:
                storage.pool.check()
            except AssertionError as error:
                raise FuzzFailure(f"the pool's invariants are broken: {error}") from error
            occupancy = storage.pool.occupancy()
            if occupancy.leases or occupancy.used_pages != occupancy.idle_pages:
                raise FuzzFailure(f"pages are still in use: {occupancy}")


class EngineClient:
    """The connection of an engine process, without an event loop's transport."""

    def __init__(self, world: World) -> None:
        self.leases: dict[int, LeaseTicket] = {}
        self.closed = False
        self.paused = False  # the kvd does not read from this connection now
        self.answers: dict[int, object] = {}  # by number
        self._world = world
        self._frames = FrameReader()
        # The kvd passes the arena's descriptor on a real socket.
        self._here, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._here.setblocking(False)
        self._there.setblocking(False)
        self._protocol = world.engines.connection()
        self._protocol.connection_made(_EngineTransport(self, self._there))

    def send(self, data: bytes) -> None:
        if not self.closed and not self.paused:
            self._protocol.data_received(data)
            if b"register" in data:
                self._receive_descriptors()

    def receive(self, data: bytes) -> None:
        """The kvd has written this."""
        for body in self._frames.feed(data):
            numbered = decode_answer(body)
            self.answers[numbered.number] = numbered.answer
            self._world.answers[type(numbered.answer).__name__] += 1
            if isinstance(numbered.answer, LeaseTicket):
                self.leases[numbered.answer.lease_id] = numbered.answer
                self._world.memory.leases.append(numbered.answer)

    def _receive_descriptors(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._here, 1 << 16, 64)
        except BlockingIOError:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self.receive(data)

    def close(self) -> None:
        """Idempotent. The kvd learns of it at once."""
        if not self.closed:
            self.closed = True
            self._protocol.connection_lost(None)
            self._here.close()
            self._there.close()


class _EngineTransport(asyncio.Transport):
    def __init__(self, client: EngineClient, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self._client = client
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._closing:
            self._client.receive(bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True
        asyncio.get_running_loop().call_soon(self._client.close)

    def pause_reading(self) -> None:
        self._client.paused = True

    def resume_reading(self) -> None:
        self._client.paused = False


class HttpClientConnection(asyncio.Transport):
    """A connection of the HTTP API: the server's transport and the client in one."""

    def __init__(self, world: World) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.closed = False
        self.outstanding: deque[Sequence[int]] = deque()  # the prompts of the requests
        self._world = world
        self._responses = Responses()
        self._protocol = world.http()
        self._protocol.connection_made(self)

    def send(self, data: bytes, prompt: Sequence[int] = ()) -> None:
        if not self.closed:
            self.outstanding.append(prompt)
            self._protocol.data_received(data)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        for status, body in self._responses.feed(bytes(data)):
            prompt = self.outstanding.popleft() if self.outstanding else ()
            self._world.answers[f"HTTP {status}"] += 1
            if status == 500:
                raise FuzzFailure(f"HTTP 500: {body!r}")
            if status == 200 and prompt:
                opened = msgspec.json.decode(body, type=_OPENED)
                if isinstance(opened, Grant):
                    self._world.memory.granted.append(Granted(opened, prompt))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


@asynccontextmanager
async def new_world(memory_bytes: int, ssd: Path | None, peer_url: str) -> AsyncIterator[World]:
    """No engine has registered yet."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FuzzLoop)
    clock = FakeClock()
    peers = PeerRules((), trusted=True)  # any host: refusing most of them would hide defects
    async with AsyncExitStack() as stack:
        lateness = LatenessMonitor(clock)
        stack.callback(lateness.close)
        listener = stack.enter_context(Listener(clock=clock))
        address = str(Address(*listener.address))
        options = StoreOptions(memory_bytes=memory_bytes, ssd=ssd, ssd_bytes=memory_bytes)
        store = Store(NodeId(NODE), options, EventLog("instance"), clock)
        stack.callback(store.close)
        links = Links(LINK, tls=None, budget=ConnectionBudget(8), peers=peers)
        incoming = IncomingTransfers(store, listener, address, TIMEOUTS, clock)
        outgoing = OutgoingTransfers(store, links, clock)
        pins = PinnedPrefixes(store, clock)
        engines = EngineSocketServer(store, incoming, outgoing, pins, address)
        reporter = Reporter(store, incoming, outgoing, engines, links, listener, lateness)
        kvds = await stack.enter_async_context(open_client())
        api = HttpApi(store, incoming, outgoing, reporter, kvds, peers, Stopping(), clock)
        runner = web.AppRunner(api.app(), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        memory = Memory(address, peer_url, NODE)
        try:
            yield World(
                store,
                clock,
                loop,
                listener,
                lateness,
                links,
                incoming,
                outgoing,
                engines,
                reporter,
                runner.server,
                memory,
                Counter(),
                own_tasks=len(asyncio.all_tasks()),
            )
        finally:
            await asyncio.to_thread(links.close)
            await asyncio.to_thread(listener.close)
            await asyncio.sleep(0)
            # aiohttp keeps the handlers of applications, and with them this world's arena.
            web_app._cached_build_middleware.cache_clear()
