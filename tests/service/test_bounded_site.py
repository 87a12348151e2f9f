"""A service that clients open more connections to than it has room for."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from prfaas.security.tls import client_context, server_context
from prfaas.service.bounded_site import FIRST_REQUEST_S, GONE_S, BoundedSite, Connections
from prfaas.service.connections import Bounds, ConnectionTable, Reason
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from tests.waiting import HANG_S, PATIENCE_S

SOON_S = 0.2
LARGE_BYTES = 64 << 20  # far more than the kernel keeps for a client
SO_ATTACH_FILTER = 26  # of Linux; `socket` has no name for it


@dataclass(frozen=True, slots=True)
class Service:
    address: tuple[str, int]
    connections: Connections
    release: asyncio.Event  # for requests of /held
    cancelled: asyncio.Event  # a request of /held was

    @property
    def table(self) -> ConnectionTable:
        return self.connections.table

    async def open(self, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
        """Connections that send nothing."""
        loop, made = asyncio.get_running_loop(), []
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((source, 0))
            await loop.sock_connect(sock, self.address)
            made.append(sock)
        return made

    async def until(self, condition: Callable[[], bool]) -> None:
        """For what has no event to wait on."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def service(
    total: int,
    first_request_s: float = FIRST_REQUEST_S,
    tls: ssl.SSLContext | None = None,
    gone_s: float = GONE_S,
) -> AsyncIterator[Service]:
    release, cancelled = asyncio.Event(), asyncio.Event()

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def held(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        try:
            if "endless" in request.query:
                while True:
                    await response.write(bytes(1 << 16))
            await release.wait()
        except (asyncio.CancelledError, ConnectionError):
            cancelled.set()
            raise
        await response.write(b" done")
        return response

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE_BYTES))

    app = web.Application()
    app.router.add_get("/", hello)
    app.router.add_get("/large", large)
    app.router.add_get("/held", held)
    table = ConnectionTable(Bounds(total))
    connections = Connections("test", table, first_request_s=first_request_s, gone_s=gone_s)
    connections.watch(app)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    async with asyncio.timeout(HANG_S):
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        address = listening.getsockname()
        try:
            await BoundedSite(runner, listening, connections, ssl_context=tls).start()
            yield Service(address, connections, release, cancelled)
        finally:
            release.set()
            await runner.cleanup()


def client(source: str = "127.0.0.1") -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(source, 0)))


async def closed(sock: socket.socket) -> bool:
    """Whether the other end closes it, or has done so."""
    try:
        return not await asyncio.get_running_loop().sock_recv(sock, 1)
    except ConnectionError:
        return True


async def test_idle_connections_of_one_address_lock_no_other_out() -> None:
    async with service(32) as one, client("127.0.0.2") as other, client() as same:
        idle = await one.open(100)
        url = f"http://127.0.0.1:{one.address[1]}/"
        for http in (other, same):
            async with http.get(url) as answer:
                assert await answer.text() == "hello"
        assert len(one.table) <= one.table.bounds.per_address + 1
        assert one.table.closed[Reason.ADDRESS] >= 100 - one.table.bounds.per_address
        assert await closed(idle[0])
        for sock in idle:
            sock.close()
        await one.until(lambda: len(one.table) == 2)  # the two clients'


async def test_a_stream_is_never_closed_for_another_connection() -> None:
    async with service(8) as one, client() as http:
        url = f"http://127.0.0.1:{one.address[1]}/held"
        async with http.get(url) as answer:
            assert await answer.content.readexactly(5) == b"begun"
            idle = await one.open(40)
            await one.until(lambda: one.table.closed[Reason.ADDRESS] >= 36)
            one.release.set()
            assert await answer.content.read() == b" done"
        for sock in idle:
            sock.close()


async def test_a_response_is_a_request_in_progress_until_it_is_sent() -> None:
    """Its connection was idle from the end of its handler on, and was cut for the next one."""
    async with service(8) as one, client() as http, AsyncExitStack() as others:
        url = f"http://127.0.0.1:{one.address[1]}"
        async with http.get(f"{url}/large") as answer:
            begun = await answer.content.readexactly(1 << 20)
            for _ in range(4):  # one more than the address may have beside this one
                other = await others.enter_async_context(client())
                async with other.get(url, headers={"Authorization": "Bearer a"}) as idle:
                    assert await idle.text() == "hello"
            await one.until(lambda: one.table.closed[Reason.ADDRESS] == 1)
            assert len(begun) + len(await answer.content.read()) == LARGE_BYTES


async def test_a_response_that_is_not_read_ends_its_connection() -> None:
    async with service(8, gone_s=1.0) as one:
        (sock,) = await one.open(1)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await loop.sock_recv(sock, 1)
        await one.until(lambda: not len(one.table))
        sock.close()


async def test_a_connection_without_a_request_does_not_stay() -> None:
    async with service(8, SOON_S) as one:
        (silent, begun) = await one.open(2)
        await asyncio.get_running_loop().sock_sendall(begun, b"GET / HTTP/1.1\r\n")
        assert await closed(silent) and await closed(begun)
        await one.until(lambda: one.table.closed[Reason.SLOW] == 2 and not len(one.table))
        silent.close()
        begun.close()


async def test_a_connection_with_a_request_stays() -> None:
    async with service(8, SOON_S) as one, client() as http:
        url = f"http://127.0.0.1:{one.address[1]}"
        async with http.get(f"{url}/held") as answer:
            (silent,) = await one.open(1)
            assert await closed(silent), "this one's time is over, and so would be the other's"
            one.release.set()
            assert await answer.content.read() == b"begun done"
        async with http.get(url) as again:
            assert again.status == 200 and len(one.table) == 1
        silent.close()


def vanish(sock: socket.socket) -> None:
    """As a host without power: from now on the kernel drops what arrives on the connection before
    TCP sees it, so that nothing is acknowledged, and nothing says so."""
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0
    buffer = ctypes.create_string_buffer(drop_all)
    program = struct.pack("HL", 1, ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@pytest.mark.parametrize("query", ["", "?endless=1"], ids=["silent", "sending"])
async def test_a_request_ends_when_its_client_has_vanished(query: str) -> None:
    """Also while nothing is sent to it, as during a long prefill."""
    async with service(8, gone_s=2.0) as one:
        loop = asyncio.get_running_loop()
        (sock,) = await one.open(1)
        await loop.sock_sendall(sock, f"GET /held{query} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert await loop.sock_recv(sock, 1)
        vanish(sock)
        await one.cancelled.wait()
        await one.until(lambda: not len(one.table))
        sock.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateSet:
    return make_certificates(tmp_path_factory.mktemp("certs"), ["localhost"])


@pytest.mark.parametrize(("total", "count"), [(64, 300), (10_000, 3000)])
async def test_connections_without_a_handshake_do_not_stay(
    certificates: CertificateSet, total: int, count: int
) -> None:
    """At first as many stay as the bound of new ones says, and then none."""
    context = server_context(certificates.ca, certificates.server, certificates.server_key)
    async with service(total, 2.0, context) as one:
        most = one.table.bounds.new_per_address
        silent = await one.open(count)
        await one.until(lambda: sum(one.table.closed.values()) >= count - most)
        assert len(one.table) <= most
        await one.until(lambda: not len(one.table))
        assert sum(one.table.closed.values()) == count
        for sock in silent:
            assert await closed(sock)
            sock.close()
        async with client("127.0.0.2") as http:
            context = client_context(certificates.ca, certificates.client, certificates.client_key)
            url = f"https://127.0.0.1:{one.address[1]}/"
            async with http.get(url, ssl=context, server_hostname="localhost") as answer:
                assert await answer.text() == "hello"
