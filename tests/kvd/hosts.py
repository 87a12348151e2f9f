"""Complete kvds for tests, each in a thread or a process, and an engine that writes known bytes."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from prfaas.clock import Clock
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.contracts.readiness import KvdReady, parse_readiness
from prfaas.engine.api import Export
from prfaas.engine.chunks import ExportPlan, resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.kvd.process import KvdOptions, RunningKvd, run_kvd
from prfaas.kvd.store import StoreOptions
from prfaas.kvspec import KVSpec
from prfaas.security.tls import TlsIdentity
from prfaas.types import BlockHash, Compat, Grant, NotNow
from tests.cache.builders import BLOCK, SPECS, hashes_of
from tests.waiting import PATIENCE_S

SPEC = SPECS["all"]
MEMORY_BYTES = 1 << 20
COMPAT = Compat("tiny", "1", "bytes", "bytes", BLOCK, "canonical")
T = TypeVar("T")


@dataclass
class Host:
    """A kvd as its engines and gateways see it."""

    socket: Path
    data: str
    url: str
    tls: ssl.SSLContext | None = None  # of its gateways

    def post(
        self, path: str, body: Any, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, bytes]:
        data = msgspec.json.encode(body)
        request = urllib.request.Request(self.url + path, data, dict(headers), method="POST")
        return _answer(request, self.tls)

    def get(
        self, path: str, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, bytes]:
        return _answer(urllib.request.Request(self.url + path, headers=dict(headers)), self.tls)

    def open(self, prompt: Sequence[int], **more: Any) -> Grant | NotNow:
        hashes = tuple(hashes_of(prompt))
        asked = OpenTransfer(hashes, len(prompt), more.pop("compat", COMPAT), **more)
        status, body = self.post("/v1/open", asked)
        assert status == 200, body
        return msgspec.json.decode(body, type=Grant | NotNow)

    def grant(self, prompt: Sequence[int], **more: Any) -> Grant:
        grant = self.open(prompt, **more)
        assert isinstance(grant, Grant), grant
        return grant

    def transfer(self, grant: Grant, wait_s: float = 0.0) -> dict[str, Any]:
        status, body = self.get(f"/v1/transfers/{grant.transfer_id}?wait_s={wait_s}")
        assert status == 200, body
        found = json.loads(body)
        assert isinstance(found, dict)
        return found

    def settled(self, grant: Grant) -> dict[str, Any]:
        return self.transfer(grant, wait_s=PATIENCE_S)

    def stats(self) -> dict[str, Any]:
        """With the pool's invariants checked."""
        status, body = self.get("/v1/stats?check=1")
        assert status == 200, body
        found = json.loads(body)
        assert isinstance(found, dict)
        return found

    def in_use(self) -> tuple[int, int]:
        """Pages of leases, and leases, of all pools."""
        stats = self.stats()
        pools = [pool["occupancy"] for pool in (stats["pool"], *stats["more_pools"])]
        pages = sum(pool["used_pages"] - pool["idle_pages"] for pool in pools)
        return pages, sum(pool["leases"] for pool in pools)

    def received_bytes(self) -> int:
        received = self.stats()["arrivals"]["received_bytes"]
        assert isinstance(received, int)
        return received

    def engine(self, name: str = "engine", spec: KVSpec = SPEC, **more: Any) -> KvdClient:
        settings: dict[str, Any] = {"block_tokens": BLOCK, "compat": COMPAT, **more}
        return KvdClient(self.socket, engine_id=name, spec=spec, **settings)


@contextmanager
def kvd(
    folder: Path, *, name: str = "kvd", clock: Clock | None = None, **options: Any
) -> Iterator[Host]:
    """In a thread of this process, with an event loop there: its clients block."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    here: Future[RunningKvd] = Future()

    async def serve() -> None:
        settings = {"store": StoreOptions(memory_bytes=MEMORY_BYTES), **options}
        try:
            kvd_options = KvdOptions(socket=folder / f"{name}.sock", **settings)
            async with run_kvd(kvd_options, clock) as started:
                here.set_result(started)
                await stop.wait()
        except BaseException as error:
            if here.done():
                raise
            here.set_exception(error)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        started = here.result(PATIENCE_S)
        tls: TlsIdentity | None = options.get("tls")
        context = tls.client() if tls is not None else None
        yield Host(started.socket, str(started.data), started.http_url, context)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the kvd does not end"
        loop.close()


@dataclass
class HostProcess(Host):
    process: subprocess.Popen[str] = field(kw_only=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextmanager
def kvd_process(folder: Path, *arguments: str, name: str = "kvd") -> Iterator[HostProcess]:
    """`prfaas kvd`, which can be killed."""
    socket = folder / f"{name}.sock"
    command = [sys.executable, "-m", "prfaas", "kvd", "--socket", str(socket)]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--memory", str(MEMORY_BYTES), *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        ready = parse_readiness(line, KvdReady)
        assert ready, (line, (folder / f"{name}.log").read_text())
        yield HostProcess(socket, ready.data, ready.http, process=process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return [(7 * at + seed * 131) % 251 for at in range(tokens)]


def names(prompt: Sequence[int]) -> list[BlockHash]:
    return hashes_of(prompt)


def fill(
    lease: WriteLease, prompt: Sequence[int], *, stop: int | None = None, spec: KVSpec = SPEC
) -> None:
    """Plays the engine: writes all required state in chunks of 8 tokens, up to `stop` tokens."""
    export = Export(lease, lease.tokens, lease.checkpoint_tokens, lease.skip_tokens)
    plan, content = ExportPlan(spec, export), Content(spec, prompt)
    layers = sorted({layer for group in spec.groups for layer in group.layers})
    ends = {*range(8, lease.tokens, 8), *lease.checkpoint_tokens, lease.tokens}
    start = lease.match_tokens
    for end in sorted(end for end in ends if end > start):
        if stop is not None and end > stop:
            return
        for layer in layers:
            for segment in (*plan.growing(layer, start, end), *plan.closing(layer, end)):
                content.write(segment, lease.buffers(segment))
                lease.ready(segment)
        start = end


def assert_holds(
    lease: ReadLease | WriteLease, prompt: Sequence[int], tokens: int, spec: KVSpec = SPEC
) -> None:
    """Every byte that an engine would read to continue after `tokens` tokens."""
    content = Content(spec, prompt)
    for segment in resume_segments(spec, tokens):
        content.check(segment, lease.views(segment))


def begun(answer: T | NotNow) -> T:
    assert not isinstance(answer, NotNow), answer
    return answer


def _answer(
    request: urllib.request.Request, tls: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S, context=tls) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
