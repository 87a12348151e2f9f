"""A kvd against engines, gateways and other kvds that do everything in any order: restarts, calls
that come twice, grants that are replayed, joins with stale tickets, and exits at any time.

The kvd's parts are real, and so are its listener and its links; its engines' messages go through
the handler of the engine socket. What holds after every step: the pool's invariants, and every byte
that can be found under the hashes of a prompt is that prompt's. What holds at the end, when every
process has exited and every transfer has ended: no lease, pin or page is left.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar

import msgspec
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prfaas.contracts.kvd_api import shapes_of
from prfaas.engine.chunks import resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.errors import PrfaasError
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Answer,
    Attach,
    Begin,
    Call,
    Commit,
    Done,
    FrameReader,
    Join,
    LeaseTicket,
    NumberedCall,
    Pin,
    Ready,
    Refused,
    Register,
    Registered,
    Release,
    SegmentName,
    decode_answer,
    frame,
    table_of,
)
from prfaas.kvd.engine_socket.pins import PinnedPrefixes
from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.transport.link import LinkOptions
from prfaas.types import Grant, NotNow, TransferId
from tests.cache.builders import BLOCK, SEEDED
from tests.kvd.hosts import COMPAT, SPEC, fill, names, prompt_of
from tests.kvd.transfers.parts import Parts, transfer_parts
from tests.kvd.transfers.test_outgoing import until

EXAMPLES, STEPS = 16, 40
LINK = LinkOptions(connections=1)
ROOMY, TIGHT = 1 << 20, 12_000  # bytes of memory: everything fits, or hardly anything
SHARED = prompt_of(16)
PROMPTS = [
    tuple(prompt)
    for prompt in (
        SHARED,
        [*SHARED, *prompt_of(11, seed=1)],
        [*SHARED, *prompt_of(8, seed=2)],
        prompt_of(20, seed=3),
        prompt_of(3, seed=4),
    )
]
PROMPT = st.sampled_from(PROMPTS)
ANY = st.integers(0, 1 << 16)  # which one of those that there are
T = TypeVar("T")


class Transport(asyncio.Transport):
    """The kvd's end of an engine's connection, without a socket but for the registration."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.answers: dict[int, Any] = {}
        self.closed = False
        self._frames = FrameReader()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.here if name == "socket" else default

    def write(self, data: Any) -> None:
        for body in self._frames.feed(bytes(data)):
            numbered = decode_answer(body)
            self.answers[numbered.number] = numbered.answer

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True
        self.here.close()
        self.there.close()


class Engine:
    """One process of an engine, connected to one kvd process."""

    def __init__(self, server: EngineSocketServer) -> None:
        self.transport = Transport()
        self.number = 0
        self._protocol = server.connection()
        self._protocol.connection_made(self.transport)
        self._protocol.data_received(
            frame(NumberedCall(1, Register("engine", shapes_of(SPEC), BLOCK, COMPAT)))
        )
        data, descriptors, _, _ = socket.recv_fds(self.transport.there, 1 << 16, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        (body,) = FrameReader().feed(data)
        assert isinstance(decode_answer(body).answer, Registered)
        self.process = max(server.connected)

    gone = False  # as a `KvdConnection`

    def call(self, call: Call) -> Answer:
        self.number += 1
        self._protocol.data_received(frame(NumberedCall(self.number, call)))
        assert not self.transport.closed, f"{call} has cost the engine its connection"
        answer: Answer = self.transport.answers.pop(self.number)
        return answer

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        self._protocol.data_received(frame(NumberedCall(0, Ready(lease_id, (segment,)))))
        assert not self.transport.closed

    def exit(self) -> None:
        self.transport.closed = True
        self._protocol.connection_lost(None)
        self.transport.close()


class Held(NamedTuple):
    """A ticket that an engine has been given, of this kvd process or of an earlier one."""

    ticket: LeaseTicket
    prompt: tuple[int, ...]


class Granted(NamedTuple):
    grant: Grant
    prompt: tuple[int, ...]


class KvdMachine(RuleBasedStateMachine):
    @initialize(memory_bytes=st.sampled_from([ROOMY, TIGHT]))
    def build(self, memory_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory_bytes = memory_bytes
        self.instances = 0
        self.tickets: list[Held] = []
        self.grants: list[Granted] = []
        self.begin_kvd()

    def begin_kvd(self) -> None:
        self.stack = AsyncExitStack()
        made = self.run(
            self.stack.enter_async_context(
                transfer_parts(memory_bytes=self.memory_bytes, link=LINK)
            )
        )
        self.parts: Parts = made
        self.instances += 1
        self.instance = made.store.events.instance = f"instance {self.instances}"
        pins = PinnedPrefixes(made.store, made.clock)
        self.server = EngineSocketServer(made.store, made.incoming, made.outgoing, pins, "h:1")
        self.engines = [Engine(self.server)]
        self.sent: set[TransferId] = set()  # grants that this kvd process has begun to send

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(what)

    # Engines --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.engines) < 4)
    @rule()
    def start_process(self) -> None:
        self.engines.append(Engine(self.server))

    @precondition(lambda self: len(self.engines) > 1)
    @rule(which=ANY)
    def exit_process(self, which: int) -> None:
        self.engines.pop(which % len(self.engines)).exit()

    @rule(which=ANY, prompt=PROMPT)
    def begin(self, which: int, prompt: tuple[int, ...]) -> None:
        request = Begin(tuple(names(prompt)), len(prompt))
        self.keep(self.engine(which).call(request), prompt)

    @precondition(lambda self: self.grants)
    @rule(which=ANY, grant=ANY, twice=st.booleans())
    def begin_with_a_grant(self, which: int, grant: int, twice: bool) -> None:
        """Which may have been used before, here or by an earlier kvd process."""
        granted = self.grants[grant % len(self.grants)]
        request = Begin(
            tuple(names(granted.prompt)), len(granted.prompt), (), granted.grant, b"tail"
        )
        for _ in range(1 + twice):
            before = self.leases()
            answer = self.engine(which).call(request)
            if isinstance(answer, LeaseTicket):
                assert granted.grant.transfer_id not in self.sent, "a grant was used twice"
                self.sent.add(granted.grant.transfer_id)
                self.keep(answer, granted.prompt)
            else:
                assert self.leases() == before

    @rule(which=ANY, prompt=PROMPT)
    def pin(self, which: int, prompt: tuple[int, ...]) -> None:
        answer = self.engine(which).call(Pin(tuple(names(prompt))))
        if isinstance(answer, LeaseTicket):
            self.check_readable(answer, prompt)
        self.keep(answer, prompt)

    @precondition(lambda self: self.tickets)
    @rule(which=ANY, ticket=ANY)
    def join(self, which: int, ticket: int) -> None:
        held = self.tickets[ticket % len(self.tickets)].ticket
        answer = self.engine(which).call(Join(held.lease_id, held.instance))
        if held.instance != self.instance:
            assert isinstance(answer, Refused), "a ticket of another kvd process was accepted"
        forged = self.engine(which).call(Join(held.lease_id, ""))
        assert isinstance(forged, Refused)

    @precondition(lambda self: self.tickets)
    @rule(which=ANY, ticket=ANY, stop=st.sampled_from([None, 8, 16]))
    def write(self, which: int, ticket: int, stop: int | None) -> None:
        """Only into pages that this process may write to, as the engine's client sees to it. A
        process that may not only claims to have written."""
        held, prompt = self.tickets[ticket % len(self.tickets)]
        engine = self.engine(which)
        if held.instance == self.instance and self.server.holders.uses(
            held.lease_id, engine.process
        ):
            lease = WriteLease(held, self.parts.mapped, engine, Future())
            if held.writable:
                fill(lease, prompt, stop=stop)
            return
        for segment in resume_segments(SPEC, len(prompt)):
            name = SegmentName(segment.group, segment.layer, segment.start, segment.stop)
            engine.ready(held.lease_id, name)

    @precondition(lambda self: self.tickets)
    @rule(which=ANY, ticket=ANY, how=st.sampled_from(["commit", "abort", "release", "twice"]))
    def end(self, which: int, ticket: int, how: str) -> None:
        held = self.tickets[ticket % len(self.tickets)].ticket
        calls: dict[str, list[Call]] = {
            "commit": [Commit(held.lease_id)],
            "abort": [Abort(held.lease_id, "test")],
            "release": [Release(held.lease_id, "other_prompt")],
            "twice": [Commit(held.lease_id), Commit(held.lease_id)],
        }
        answers = [self.engine(which).call(call) for call in calls[how]]
        assert [isinstance(answer, Done) for answer in answers].count(True) <= 1

    @precondition(lambda self: self.grants)
    @rule(which=ANY, grant=ANY, attachments=st.sampled_from([1, 1, 3]))
    def attach(self, which: int, grant: int, attachments: int) -> None:
        granted = self.grants[grant % len(self.grants)]
        answer = self.engine(which).call(Attach(granted.grant.transfer_id, attachments))
        if isinstance(answer, LeaseTicket):
            assert answer.hashes == tuple(names(granted.prompt))
            assert answer.tokens == len(granted.prompt)
            self.check_readable(answer, granted.prompt)
        self.keep(answer, granted.prompt)

    # Gateways and other kvds ----------------------------------------------------------------------

    @precondition(lambda self: len(self.grants) < 8)
    @rule(prompt=PROMPT)
    def open(self, prompt: tuple[int, ...]) -> None:
        """The kvd is the sender and the receiver."""
        answer = self.parts.open(prompt)
        if isinstance(answer, Grant):
            self.grants.append(Granted(answer, prompt))

    @precondition(lambda self: self.grants)
    @rule(grant=ANY, prompt=PROMPT, own=st.booleans(), broken=st.booleans())
    def push(self, grant: int, prompt: tuple[int, ...], own: bool, broken: bool) -> None:
        granted = self.grants[grant % len(self.grants)]
        hashes = names(granted.prompt if own else prompt)
        used = granted.grant
        if broken:
            used = msgspec.structs.replace(used, data_address="no address", max_bytes=1 << 20)
        before = self.leases()
        try:
            answer = self.parts.outgoing.push(self.parts.storage, used, hashes)
        except PrfaasError:
            assert self.leases() == before
            return
        if answer is None and self.leases() != before:
            assert used.transfer_id not in self.sent, "a grant was used twice"
            self.sent.add(used.transfer_id)

    @precondition(lambda self: self.grants)
    @rule(grant=ANY)
    def abort_transfer(self, grant: int) -> None:
        transfer_id = self.grants[grant % len(self.grants)].grant.transfer_id
        self.parts.incoming.abort(transfer_id, "test")

    # Time -----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 31.0]))
    def turn(self, seconds: float) -> None:
        self.parts.clock.advance(seconds)
        self.run(asyncio.sleep(0.002))  # the links' threads may do something; nothing relies on it
        self.parts.incoming.sweep()

    @precondition(lambda self: len(self.grants) < 8)
    @rule(which=ANY, prompt=PROMPT, use=st.sampled_from(["attach", "release", "twice", "leave"]))
    def hand_off(self, which: int, prompt: tuple[int, ...], use: str) -> None:
        """As it should be, in the middle of everything else."""
        grant, engine = self.parts.open(prompt), self.engine(which)
        if not isinstance(grant, Grant):
            return
        self.grants.append(Granted(grant, prompt))
        ticket = engine.call(Begin(tuple(names(prompt)), len(prompt), (), grant, b"tail"))
        if not isinstance(ticket, LeaseTicket):
            return
        self.sent.add(grant.transfer_id)
        self.keep(ticket, prompt)
        fill(WriteLease(ticket, self.parts.mapped, engine, Future()), prompt)
        assert isinstance(engine.call(Commit(ticket.lease_id)), Done)
        self.run(until(lambda: self.state_of(grant) != "granted"))
        assert self.state_of(grant) == "committed"
        if use == "leave":
            return
        found = engine.call(Attach(grant.transfer_id, 1 + (use == "twice")))
        assert isinstance(found, LeaseTicket)
        if use == "twice":  # the second attachment may never be released
            self.keep(engine.call(Attach(grant.transfer_id)), prompt)
        assert isinstance(engine.call(Attach(grant.transfer_id)), Refused)
        self.check_readable(found, prompt)
        self.keep(found, prompt)
        if use == "release":
            assert isinstance(engine.call(Release(found.lease_id)), Done)

    @precondition(lambda self: self.instances < 3)
    @rule()
    def restart(self) -> None:
        """Tickets and grants of the old process stay with engines and gateways."""
        self.end_kvd()
        self.begin_kvd()

    # What holds -----------------------------------------------------------------------------------

    @invariant()
    def every_byte_is_that_of_its_prompt(self) -> None:
        if self.parts.store.first is None:
            return
        pool = self.parts.storage.pool
        pool.check()
        for prompt in PROMPTS:
            lease = pool.pin(names(prompt), now=self.parts.clock.now())
            if isinstance(lease, NotNow):
                continue
            try:
                self.check(prompt, lease.tokens, pool.tables(lease.id).readable)
            finally:
                pool.release(lease.id, self.parts.clock.now())

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.end_kvd()
            self.loop.close()

    def end_kvd(self) -> None:
        parts, server = self.parts, self.server
        try:
            for engine in self.engines:
                engine.exit()
            for granted in self.grants:
                parts.incoming.abort(granted.grant.transfer_id, "the end")
            # As a kvd does when it exits: what is still sent to other kvds has failed.
            self.run(asyncio.to_thread(parts.links.close))
            self.run(until(self.is_idle))
            assert parts.in_use() == (0, 0), "pages of leases, and leases"
            assert len(server.holders) == 0
        finally:
            self.engines = []
            self.run(self.stack.aclose())

    def is_idle(self) -> bool:
        """No transfer is under way in either direction."""
        incoming = self.parts.incoming.counts()
        under_way = incoming["granted"] + incoming["committed"]
        return not under_way and not self.parts.outgoing.counts()["sending"]

    # Inside ---------------------------------------------------------------------------------------

    def engine(self, which: int) -> Engine:
        return self.engines[which % len(self.engines)]

    def state_of(self, grant: Grant) -> str:
        status = self.parts.incoming.status(grant.transfer_id)
        return status.state if status is not None else "unknown"

    def leases(self) -> int:
        return self.parts.storage.pool.occupancy().leases

    def keep(self, answer: Answer, prompt: tuple[int, ...]) -> None:
        if isinstance(answer, LeaseTicket):
            assert answer.instance == self.instance
            self.tickets.append(Held(answer, prompt))

    def check_readable(self, ticket: LeaseTicket, prompt: tuple[int, ...]) -> None:
        self.check(prompt, ticket.tokens, table_of(ticket.readable))

    def check(self, prompt: tuple[int, ...], tokens: int, table: Any) -> None:
        content = Content(SPEC, prompt)
        for segment in resume_segments(SPEC, tokens) if tokens else ():
            content.check(segment, self.parts.mapped.views(segment, table))


def test_the_kvd_keeps_its_promises_whatever_comes_in_any_order() -> None:
    run_state_machine_as_test(
        KvdMachine,
        settings=settings(
            SEEDED,
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            phases=(Phase.generate,),  # with real links, shrinking a failure would take minutes
        ),
    )
