"""Mutated messages to kvds in this process, one *case* after the other.

A case is a kvd with its own model, memory and random numbers: case N of a seed sends the same kinds
of messages each time. The order of the threads of links and listeners is not reproducible.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from prfaas.contracts.kvd_api import PrefixMatch, PushStarted, spec_of
from prfaas.engine.chunks import resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.kvd.engine_socket.leases import MappedArena
from prfaas.kvd.engine_socket.messages import Attach, Begin, Commit, LeaseTicket, Ready, table_of
from prfaas.kvspec import Segment
from prfaas.types import Grant
from prfaas_lab.testing.hostile import as_json, mutate
from tests.cache.builders import BLOCK, SPECS
from tests.kvd.fuzz.oracle import Complaints, FuzzFailure, Resources, listening, resident_bytes
from tests.kvd.fuzz.sessions import Model, Sessions, about, http_bytes, with_heads
from tests.kvd.fuzz.traffic import Message, Traffic, shown
from tests.kvd.fuzz.world import EngineClient, FuzzLoop, HttpClientConnection, World, new_world
from tests.waiting import PATIENCE_S

MESSAGES_PER_CASE = 25_000
CLIENTS = 3  # of each kind, at the same time
HTTP_SHARE = 0.25
REGISTRATIONS = 0.05  # share of the messages that go to kvds without an engine
SETTLE_S = PATIENCE_S  # for transfers and threads to end
BATCH = 16  # messages between two turns of the event loop
MODELS = (
    Model(SPECS["all"], BLOCK),
    Model(SPECS["all"], BLOCK, whole_blocks=True),
    Model(SPECS["hybrid"], BLOCK),
    Model(SPECS["linear"], BLOCK),
    Model(SPECS["windowed"], 3, whole_blocks=True),
    Model(SPECS["full"], 1),
    Model(with_heads(SPECS["all"], 4), BLOCK),
    Model(with_heads(SPECS["hybrid"], 3), BLOCK),
)
# The hand-off afterwards must fit twice, 3 KiB, into the eighth that each form is guaranteed: the
# other form may have taken the rest, and a pool gives no memory back.
MEMORY = (1 << 15, 1 << 16, 1 << 20)
RSS_GROWTH = 256 << 20  # over a whole run; a leak of a few hundred bytes per message exceeds it


@dataclass
class Outcome:
    messages: int = 0  # mutated
    valid: int = 0
    cases: int = 0
    answers: Counter[str] = field(default_factory=Counter)


def fuzz_in_process(
    wanted: int,
    seed: int,
    *,
    first_case: int = 0,
    show: Callable[[float], None] = lambda _: None,
) -> Outcome:
    """Sends at least `wanted` mutated messages. FuzzFailure names the case and the last ones."""
    outcome = Outcome()
    before = Resources.now()
    resident = 0
    case = first_case
    while outcome.messages < wanted:
        messages = min(MESSAGES_PER_CASE, wanted - outcome.messages)
        _Case(seed, case, messages, outcome, show).run()
        before.check_returned(SETTLE_S)
        if case == first_case + 1:  # the first cases fill caches and pools of the interpreter
            resident = resident_bytes()
        case += 1
    if resident and resident_bytes() - resident > RSS_GROWTH:
        raise FuzzFailure(f"memory grew from {resident:,} to {resident_bytes():,} bytes")
    return outcome


class _Case:
    def __init__(
        self, seed: int, number: int, wanted: int, outcome: Outcome, show: Callable[[float], None]
    ) -> None:
        self._name = f"seed {seed}, case {number}"
        self._rng = random.Random(f"{seed}/{number}")
        self._until = outcome.messages + wanted
        self._outcome = outcome
        self._show = show
        self._last: deque[tuple[str, bytes]] = deque(maxlen=12)

    def run(self) -> None:
        with listening() as complaints, asyncio.Runner(loop_factory=FuzzLoop) as runner:
            runner.get_loop().set_exception_handler(complaints.of_loop)
            try:
                runner.run(self._run(complaints))
                complaints.check()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                said = "\n".join(
                    (
                        *complaints.found[:3],
                        *(f"{kind}: {shown(data)}" for kind, data in self._last),
                    )
                )
                raise FuzzFailure(f"{self._name}: {error!r}\nThe last messages:\n{said}") from error
        self._outcome.cases += 1

    async def _run(self, complaints: Complaints) -> None:
        rng = self._rng
        model = rng.choice(MODELS)
        with tempfile.TemporaryDirectory() as folder:
            ssd = Path(folder) if rng.random() < 0.3 else None
            async with (
                _lying_peer(rng) as peer_url,
                new_world(rng.choice(MEMORY), ssd, peer_url) as world,
            ):
                traffic = Traffic(Sessions(model, world.memory, rng), rng)
                await self._registrations(world, traffic, complaints)
                await self._traffic(world, traffic, complaints)
                await _leave(world)
                await _hand_over(world, model)
                await _leave(world)
                self._outcome.answers += world.answers
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        if leftover:
            raise FuzzFailure(f"tasks have not ended: {leftover}")

    def _sending(self, kind: str, message: Message) -> None:
        self._last.append((kind, message.data))
        if message.mutated:
            self._outcome.messages += 1
        else:
            self._outcome.valid += 1

    # Registrations --------------------------------------------------------------------------------

    async def _registrations(self, world: World, traffic: Traffic, complaints: Complaints) -> None:
        """Mutated first registrations, each with a kvd that has no engine yet; where the kvd
        accepts one, a session with that engine."""
        missing = self._until - self._outcome.messages
        until = self._outcome.messages + int(missing * REGISTRATIONS)
        while self._outcome.messages < until:
            fresh = world.without_engine()
            client = EngineClient(fresh)
            message = traffic.mutated_register()
            self._sending("register", message)
            client.send(message.data)
            storage = fresh.store.first
            if storage is not None and not client.closed:
                register = fresh.engines.connected[next(iter(fresh.engines.connected))]
                odd = Model(spec_of(register.groups), register.block_tokens, register.whole_blocks)
                sessions = Sessions(odd, fresh.memory, self._rng)
                odd_traffic = Traffic(sessions, self._rng)
                for _ in range(8):
                    message = odd_traffic.call(client.leases)
                    self._sending("call", message)
                    client.send(message.data)
                msgspec.json.encode(fresh.reporter.report())
                fresh.reporter.metrics()
            client.close()
            await asyncio.sleep(0)
            await fresh.settle(SETTLE_S)
            fresh.check_pool()
            fresh.store.close()
            world.answers += fresh.answers
            complaints.check()
            self._show(self._outcome.messages)

    # Sessions -------------------------------------------------------------------------------------

    async def _traffic(self, world: World, traffic: Traffic, complaints: Complaints) -> None:
        rng = self._rng
        engines: list[EngineClient] = []
        gateways: list[HttpClientConnection] = []
        turn = 0
        while self._outcome.messages < self._until:
            turn += 1
            for _ in range(BATCH):
                if rng.random() < HTTP_SHARE:
                    self._request(world, traffic, gateways)
                else:
                    self._call(world, traffic, engines)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if turn % 8 == 0:
                complaints.check()
                self._show(self._outcome.messages)
                world.links.sample()
                world.advance(rng.choice((0.01, 0.1, 1.0, 5.0)))
                # Links and the listener have threads of their own, which need the interpreter.
                await asyncio.sleep(0.001)
            if turn % 1024 == 0:
                for storage in world.store.storages:
                    storage.pool.check()
        for engine in engines:
            engine.close()
        for gateway in gateways:
            gateway.close()

    def _call(self, world: World, traffic: Traffic, engines: list[EngineClient]) -> None:
        rng = self._rng
        engines[:] = [client for client in engines if not client.closed]
        if len(engines) < CLIENTS:
            client = EngineClient(world)
            engines.append(client)
            if rng.random() < 0.98:  # the others do not register
                message = traffic.register(f"engine-{len(engines)}")
                self._sending("register", message)
                client.send(message.data)
        client = rng.choice(engines)
        message = traffic.call(client.leases)
        self._sending("call", message)
        at = rng.randrange(len(message.data) + 1) if rng.random() < 0.05 else 0
        for part in (message.data[:at], message.data[at:]):
            if part:
                client.send(part)
        if message.cut or rng.random() < 0.002:
            client.close()

    def _request(
        self, world: World, traffic: Traffic, gateways: list[HttpClientConnection]
    ) -> None:
        rng = self._rng
        gateways[:] = [client for client in gateways if not client.closed]
        while len(gateways) < CLIENTS:
            gateways.append(HttpClientConnection(world))
        client = rng.choice(gateways)
        message = traffic.request()
        self._sending("request", message)
        client.send(message.data, message.prompt)
        if message.cut or len(client.outstanding) > 16 or rng.random() < 0.01:
            client.close()


async def _leave(world: World) -> None:
    """All clients have left: nothing may remain."""
    for _ in range(3):
        await asyncio.sleep(0)
    await world.settle(SETTLE_S)
    until_s = time.monotonic() + PATIENCE_S
    while world.http.connections or len(asyncio.all_tasks()) > world.own_tasks:
        if time.monotonic() > until_s:
            raise FuzzFailure(f"requests have not ended: {asyncio.all_tasks()}")
        world.advance(400.0)  # longer than any wait that a request may ask for
        await asyncio.sleep(0.005)
    world.check_pool()


# A hand-off afterwards ----------------------------------------------------------------------------


async def _hand_over(world: World, model: Model) -> None:
    """A hand-off from this kvd to itself: the decode engine reads the bytes that the prefill engine
    wrote. The links give up early in this test, so on a busy machine it may take several tries."""
    storage = world.store.storage_of(model.compat)
    if storage is None:
        return
    if storage.spec != model.spec:
        raise FuzzFailure(f"the kvd has another model: {storage.spec}")
    problem = ""
    for attempt in range(20):
        # Prompts that no fuzzed message has named.
        client = EngineClient(world)
        prompt = [(7 * at + attempt * 131) % 251 for at in range(21 + attempt % 3)]
        try:
            problem = await _try_hand_over(world, model, client, prompt)
        finally:
            client.close()
        if not problem:
            return
        await world.settle(SETTLE_S)
    raise FuzzFailure(f"no hand-off works afterwards: {problem}")


async def _try_hand_over(
    world: World, model: Model, client: EngineClient, prompt: list[int]
) -> str:
    """Why it failed, or an empty string."""
    rng, numbers = random.Random(len(prompt)), count(1)
    storage = world.store.storage_of(model.compat)
    assert storage is not None
    traffic = Traffic(Sessions(model, world.memory, rng), rng)
    mapped = MappedArena(model.spec, model.block_tokens, storage.arena)
    size = model.block_tokens
    content = Content(model.spec, [*prompt, *[0] * size])

    async def answer(call: msgspec.Struct) -> object:
        number = next(numbers)
        client.send(traffic.framed(call, number))
        await _wait(lambda: client.closed or number in client.answers)
        return client.answers.get(number)

    await answer(model.register("afterwards"))
    gateway = HttpClientConnection(world)
    asked = traffic.sessions.open(prompt, model.compat)
    world.memory.granted.clear()
    gateway.send(http_bytes(asked, msgspec.json.encode(asked.body)), prompt)
    await _wait(lambda: not gateway.outstanding)
    gateway.close()
    if not world.memory.granted:
        return "no grant"
    grant: Grant = world.memory.granted[-1].grant
    ticket = await answer(Begin(model.hashes(prompt), len(prompt), None, grant))
    if not isinstance(ticket, LeaseTicket):
        return f"begin: {ticket}"
    writable = table_of(ticket.writable)
    ready = traffic.sessions.by_heads(model.segments(ticket))
    for name in ready:
        segment = name.segment
        group = next(g for g in model.spec.groups if g.name == segment.group)
        for part in _written(segment, size, getattr(group, "state_bytes", None) is not None):
            with suppress(Exception):  # not part of this lease: it was found in the pool
                content.write(part, mapped.views(part, writable))
    await answer(about(Ready, ticket, segments=tuple(ready)))
    await answer(about(Commit, ticket))
    await _wait(lambda: _state(world, grant) != "granted")
    if _state(world, grant) != "committed":
        return f"transfer: {world.incoming.status(grant.transfer_id)}"
    attached = await answer(Attach(grant.transfer_id))
    if not isinstance(attached, LeaseTicket):
        return f"attach: {attached}"
    readable = table_of(attached.readable)
    for segment in resume_segments(model.spec, len(prompt)):
        content.check(segment, mapped.views(segment, readable))
    return ""


async def _wait(condition: Callable[[], bool]) -> None:
    """Threads of links and listeners make it true."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise FuzzFailure("a hand-off takes too long")
        await asyncio.sleep(0.001)


def _state(world: World, grant: Grant) -> str:
    status = world.incoming.status(grant.transfer_id)
    return status.state if status is not None else "unknown"


def _written(segment: Segment, block_tokens: int, linear: bool) -> list[Segment]:
    """The segment in blocks: a window holds the last of them only."""
    if linear:
        return [segment]
    starts = range(segment.start, segment.stop, block_tokens)
    return [
        Segment(segment.group, segment.layer, start, min(start + block_tokens, segment.stop))
        for start in starts
    ]


# The source of pulls ------------------------------------------------------------------------------


@asynccontextmanager
async def _lying_peer(rng: random.Random) -> AsyncIterator[str]:
    """Another kvd, which answers with anything."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body: msgspec.Struct = PrefixMatch(rng.choice((0, 4, 8, 2**40, -4)), 8)
            if b"/v1/push" in head:
                body = PushStarted()
            data = msgspec.json.encode(body)
            if rng.random() < 0.5:
                data = as_json(mutate(msgspec.to_builtins(body), rng))
            status = rng.choice((200, 200, 200, 404, 500, 999))
            writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
            writer.write(data[: rng.choice((len(data), len(data), 3))])
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the kvd has closed the connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
