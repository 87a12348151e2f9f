"""A kvd of the hostile member, with its engine: it has the member key and answers in its *manner*.

Its model is another one than the deployment's, so that no request is ever routed to it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeAlias

import msgspec

from prfaas.contracts.kvd_api import (
    ArrivalCounters,
    EngineReport,
    KvdReport,
    Occupancy,
    PoolCounters,
    PoolReport,
    ProofOfMembership,
    Role,
    shapes_of,
)
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.security.shared_key import SharedKey
from prfaas.types import Compat, LinkStats, NodeId
from prfaas_lab.faults.actors.connections import SOURCE, Network
from prfaas_lab.testing.hostile import mutate_json

Manner: TypeAlias = Literal[
    "malformed",
    "not numbers",
    "huge",
    "slow",
    "redirects",
    "mute",
    "fails",
    "not HTTP",
    "endless",
    "changes its format",
    "flaps",
    "borrows a name",
    "false events",
    "false links",
    "engine elsewhere",
    "well-behaved",
]
MANNERS: tuple[Manner, ...] = Manner.__args__  # type: ignore[attr-defined]
OTHER_MODEL = "another-model"  # never that of the deployment
MOST_CONNECTIONS = 24  # of gateways to one fake kvd
HUGE_BYTES = 40 << 20
HEAD_BYTES, BODY_BYTES = 64 << 10, 1 << 20  # of a request that is read
SLOW_EVERY_S = 1.0
MUTE_S = 90.0  # longer than every timeout of a gateway's poll
FLAP_S = (2.0, 8.0)
POLL_S = 5.0  # of a long poll for events
_SPEC = KVSpec((FullAttention("full", (0, 1), 64), LinearState("state", (2, 3), 256)))
_LENGTH = re.compile(rb"content-length: ([0-9]+)", re.IGNORECASE)
_METRICS = b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'


class FakeKvd:
    # limits: each parameter is one part of what this kvd pretends to be.
    def __init__(
        self,
        manner: Manner,
        cluster: str,
        network: Network,
        key: SharedKey,
        draw: random.Random,
        *,
        name: str,
        elsewhere: list[str],
        links_to: list[str],
    ) -> None:
        """`elsewhere`: URLs of services that are not its own. `links_to`: data addresses of kvds
        about which it reports."""
        self.manner = manner
        self.cluster = cluster
        self.url = ""  # set while it serves
        self._network = network
        self._key = key
        self._draw = draw
        self._name = name
        self._elsewhere = elsewhere
        self._links_to = links_to
        self._instance = uuid.uuid4().hex
        self._revision = "1"
        self._connections = 0
        self._is_served = asyncio.Event()

    async def served(self) -> str:
        """Waits until this kvd has served for the first time; its URL."""
        await self._is_served.wait()
        return self.url

    @property
    def kind(self) -> str:
        return f"member: {self.manner}"

    # Reports --------------------------------------------------------------------------------------

    def report(self) -> KvdReport:
        """A report in which only single values are false."""
        compat = Compat(OTHER_MODEL, self._revision, "float32", "float32", 64, "canonical")
        pool = PoolReport(
            compat, shapes_of(_SPEC), 64, 4096, Occupancy(100, 0, 0, 0, 0), {}, PoolCounters()
        )
        engine_url = self.url
        if self.manner == "engine elsewhere":
            engine_url = self._draw.choice(self._elsewhere)
        return KvdReport(
            node=NodeId(self._name),
            instance=self._instance,
            data_address=f"{SOURCE}:9",
            role=Role(),
            engines=(EngineReport("engine", engine_url, 1),),
            pool=pool,
            incoming={},
            outgoing={},
            held_leases=0,
            arrivals=ArrivalCounters(0, 0, 0, 0, 0, 0),
            links=self._links() if self.manner == "false links" else (),
            next_seq={NodeId(self._name): self._draw.randrange(1 << 40)},
        )

    def _links(self) -> tuple[LinkStats, ...]:
        """The links of the deployment stand still, with a terabyte waiting."""
        now_s = time.monotonic()
        return tuple(
            LinkStats(address, now_s, 4, 0.0, 1 << 40, 1 << 30, 1000.0, 0.0, 5.0, 1.0, 1000, 1)
            for address in self._links_to
        )

    def _stats(self) -> bytes:
        whole = msgspec.to_builtins(self.report())
        draw = self._draw
        match self.manner:
            case "malformed":
                return mutate_json(whole, draw)
            case "not numbers":
                text = msgspec.json.encode({**whole, "late_s": 12345.0})
                value = draw.choice((b"NaN", b"Infinity", b"1e999", b"-1e308", b"9" * 5_000))
                return text.replace(b"12345.0", value)
            case "huge":
                return msgspec.json.encode({**whole, "x": "y" * HUGE_BYTES})
            case "changes its format":
                self._revision = str(draw.randrange(10**6))
        return msgspec.json.encode(self.report())

    def _events(self) -> bytes:
        draw = self._draw
        page: dict[str, Any] = {
            "node": self._name,
            "instance": self._instance,
            "next_seq": draw.choice((0, 5, 2**40, -1)),
            "events": [
                {
                    "seq": draw.choice((0, 1, 2**40, -5)),
                    "node": draw.choice((self._name, "another")),
                    "group": draw.choice(("full", "state", "none")),
                    "block_tokens": draw.choice((64, 0, -1, 2**40)),
                    "hashes": [msgspec.to_builtins(draw.randbytes(32)) for _ in range(200)],
                    "action": draw.choice(("stored", "removed", "eaten")),
                }
                for _ in range(draw.randint(0, 20))
            ],
        }
        if draw.random() < 0.5:
            page["snapshot"] = {
                "full": [msgspec.to_builtins(draw.randbytes(32)) for _ in range(2_000)]
            }
        return msgspec.json.encode(page)

    # Serving --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until cancelled."""
        port = 0
        while True:
            async with self._serving(port) as bound:
                port = bound
                if self.manner != "flaps":
                    await asyncio.Event().wait()
                await asyncio.sleep(self._draw.uniform(*FLAP_S))
            self._instance = uuid.uuid4().hex
            await asyncio.sleep(self._draw.uniform(*FLAP_S))

    @asynccontextmanager
    async def _serving(self, port: int) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, SOURCE, port, limit=HEAD_BYTES)
        try:
            bound: int = server.sockets[0].getsockname()[1]
            self.url = f"http://{SOURCE}:{bound}"
            self._is_served.set()
            yield bound
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            # RuntimeError: uvloop refuses to write to a connection that the gateway has closed.
            with suppress(OSError, EOFError, asyncio.LimitOverrunError, RuntimeError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    found = _LENGTH.search(head)
                    nbytes = min(int(found[1]), BODY_BYTES) if found else 0
                    body = await reader.readexactly(nbytes)
                    await self._network.budget.turn()
                    await self._respond(
                        head.split(b" ", 2)[1].decode(errors="replace"), body, writer
                    )
                    await writer.drain()
        except asyncio.CancelledError:
            pass  # the actors end, and asyncio would print a traceback for each connection
        except Exception as error:
            self._network.census.record_failure(self.kind, error)
        finally:
            self._connections -= 1
            writer.transport.abort()

    async def _respond(self, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        path = target.partition("?")[0]
        self._network.census.record(self.kind, f"asked for {path}", 0.0)
        if path == "/v1/prove":
            challenge = msgspec.json.decode(body)["challenge"]
            proofs = tuple(self._key.prove(challenge, self.url))
            writer.write(_http(200, msgspec.json.encode(ProofOfMembership(proofs))))
            return
        match self.manner:
            case "slow":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                for _ in range(int(MUTE_S / SLOW_EVERY_S)):
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(SLOW_EVERY_S)
            case "mute":
                await asyncio.sleep(MUTE_S)
            case "redirects":
                to = self._draw.choice(self._elsewhere)
                writer.write(_http(302, b"", f"Location: {to}{path}"))
            case "fails":
                writer.write(
                    _http(self._draw.choice((400, 401, 404, 429, 500, 503, 999)), b"x" * 99_999)
                )
            case "not HTTP":
                writer.write(self._draw.randbytes(5_000))
            case "endless":
                await self._endless(writer)
            case _:
                writer.write(_http(200, await self._body(path)))

    async def _endless(self, writer: asyncio.StreamWriter) -> None:
        """A response without an end, faster than it can be read."""
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        while True:
            await self._network.budget.turn()
            writer.write(chunk)
            await writer.drain()

    async def _body(self, path: str) -> bytes:
        match path:
            case "/v1/stats":
                return self._stats()
            case "/v1/events":
                if self.manner == "false events":
                    await asyncio.sleep(SLOW_EVERY_S)
                    return self._events()
                await asyncio.sleep(POLL_S)
                page = {"node": self._name, "instance": self._instance, "next_seq": 0}
                return msgspec.json.encode({**page, "snapshot": {"full": [], "state": []}})
            case "/v1/models":
                return msgspec.json.encode({"data": [{"id": OTHER_MODEL, "max_model_len": 4096}]})
            case "/metrics":
                if self.manner == "not numbers":
                    return _METRICS.replace(b"0.0", self._draw.choice((b"NaN", b"-1", b"1e300")))
                return _METRICS
            case "/v1/role":
                return msgspec.json.encode(Role())
        return b"{}"


def _http(status: int, body: bytes, *lines: str) -> bytes:
    head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body
