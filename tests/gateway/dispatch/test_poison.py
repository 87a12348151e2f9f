"""A request that kills every engine that gets it: the second engine is its last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import msgspec
import pytest

from prfaas.errors import RequestError
from prfaas.gateway.backend import GatewayBackend
from prfaas.gateway.request import GatewayRequest, RequestTrace
from tests.gateway.backends import (
    THRESHOLD,
    answered,
    deployment,
    gateway_request,
    prompt,
    serving,
)
from tests.gateway.conftest import Hosts
from tests.gateway.fleets import with_timeouts
from tests.node.hosts import Host
from tests.waiting import PATIENCE_S

LONG = 2 * THRESHOLD
DEADLY = 77_777  # a token id
_MARK = str(DEADLY).encode()


@dataclass
class Engine:
    """Stands between the gateway and a node, and kills the node once it has got the request."""

    host: Host
    url: str = ""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _carrying: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_dead(self) -> bool:
        return self.host.node.popen.poll() is not None

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()
        await asyncio.wait_for(asyncio.gather(*self._carrying), PATIENCE_S)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = urlsplit(self.host.url)
        try:
            from_node, to_node = await asyncio.open_connection(node.hostname, node.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, to_node}
        await asyncio.gather(self._pump(reader, to_node, looks=True), self._pump(from_node, writer))
        self._writers -= {writer, to_node}

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, looks: bool = False
    ) -> None:
        """The end of one direction is the end of both."""
        before = b""
        try:
            while data := await reader.read(1 << 16):
                if looks and _MARK in before + data:
                    self.host.node.popen.kill()
                    self._close()
                    return
                before = data[-len(_MARK) :]
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


@dataclass
class Case:
    backend: GatewayBackend
    engines: list[Engine]

    def dead(self) -> list[str]:
        return [engine.host.kvd_url for engine in self.engines if engine.is_dead]

    async def is_refused(self, request: GatewayRequest) -> RequestTrace:
        trace = RequestTrace(0.0)
        with pytest.raises(RequestError) as refused:
            async with asyncio.timeout(PATIENCE_S), self.backend.answer(request, trace):
                pass
        assert (refused.value.status, refused.value.code) == (503, "nodes_lost"), refused.value
        return trace


@asynccontextmanager
async def deadly(hosts: Hosts) -> AsyncIterator[Case]:
    """Time to notice that a kvd answers is short beside the load that a test may run under."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(host)) for host in hosts.all]
        nodes = [{"url": engine.url, "kvd_url": engine.host.kvd_url} for engine in engines]
        made = msgspec.structs.replace(
            deployment(nodes[: len(hosts.home)], nodes[len(hosts.home) :]),
            gateway=with_timeouts(kvd_poll_s=2.0),
        )
        try:
            yield Case(await stack.enter_async_context(serving(made)), engines)
        finally:
            for engine in engines:
                if engine.is_dead:
                    await asyncio.to_thread(engine.host.node.kill)
                    await asyncio.to_thread(engine.host.revive)


@pytest.mark.parametrize("part", ["prompt", "fields"])
async def test_a_request_kills_two_nodes_at_most(unassigned: Hosts, part: str) -> None:
    ids = prompt(LONG, f"poison {part}")
    poison = gateway_request([DEADLY, *ids] if part == "prompt" else ids)
    if part == "fields":
        poison = replace(poison, fields={**poison.fields, "stop_token_ids": [DEADLY]})
    async with deadly(unassigned) as case:
        trace = await case.is_refused(poison)
        assert trace.attempts == 2 and len(trace.failures) == 2
        assert len(case.dead()) == 2
        again = await case.is_refused(replace(poison, id="again"))
        assert (again.attempts, again.courses) == (0, [])
        assert len(case.dead()) == 2
        assert case.backend.state()["retries"]["denied"] == 0
        found = await answered(case.backend, gateway_request(ids))
        assert len(found.tokens) == 4
