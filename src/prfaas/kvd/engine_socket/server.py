"""The kvd's server on the Unix socket: one connection for each form of an engine process.

A connection works on the pool of the form that it has registered, and on no other. `process` is the
number of a connection here: a process with two forms counts as two that share nothing.

Every call is answered before the next one is read. Only calls that reserve or pin pages may wait,
and only for the SSD tier; the later calls of that connection then wait as well, and the server
serves the other connections. When a connection closes, the leases of its process end (see
`lease_holders`), and a call that waits is not made.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import cast

import msgspec

from prfaas.errors import InputError, PeerError, WireError
from prfaas.kvd.engine_socket.lease_holders import LeaseHolders, LeaseKind
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Answer,
    Attach,
    Begin,
    Call,
    Commit,
    Done,
    Flush,
    FrameReader,
    InvalidCall,
    Join,
    LeaseTicket,
    NumberedAnswer,
    NumberedCall,
    Pin,
    Publish,
    Ready,
    Refused,
    Register,
    Registered,
    Release,
    TransferEnded,
    decode_call,
    frame,
)
from prfaas.kvd.engine_socket.pins import PinnedPrefixes
from prfaas.kvd.store import Storage, Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.outgoing import OutgoingTransfers, owner_of
from prfaas.kvspec import LinearState
from prfaas.types import NodeId, NotNow

log = logging.getLogger(__name__)

_WAITING_BYTES = 1 << 20  # of the calls that wait for an earlier one

_UNREGISTERED = Refused("input", "the first message of a connection must be a registration")


class EngineSocketServer:
    """The connected engine processes and their leases."""

    def __init__(
        self,
        store: Store,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        pins: PinnedPrefixes,
        data_address: str,
    ) -> None:
        self.data_address = data_address
        self.http_url = ""  # set when the HTTP server has started
        self.store = store
        self.incoming = incoming
        self.outgoing = outgoing
        self.pins = pins
        self.holders = LeaseHolders()
        self.connected: dict[int, Register] = {}
        self._transports: dict[int, asyncio.Transport] = {}
        self._numbers = count(1)

    def connection(self) -> asyncio.Protocol:
        return _Connection(self, next(self._numbers))

    def process_connected(self, process: int, transport: asyncio.Transport) -> None:
        self._transports[process] = transport

    def process_exited(self, process: int) -> None:
        self._transports.pop(process, None)
        leases = self.holders.process_exited(process)
        for lease_id in leases.incomplete:
            self.outgoing.abort_transfer(lease_id, "an engine process has exited")
        for lease_id, kind in leases.ended:
            if kind == "write":
                self.outgoing.abort(lease_id, "the engine has exited")
            else:
                self.release(lease_id)
        self.incoming.engine_exited(process)
        register = self.connected.pop(process, None)
        if register is not None:
            ended = len(leases.ended)
            log.info("engine %s has exited (%d leases ended)", register.engine_id, ended)
            if all(r.engine_id != register.engine_id for r in self.connected.values()):
                self.store.events.forget_engine(NodeId(register.engine_id))

    def release(self, lease_id: int, problem: str = "") -> None:
        """Ends a lease for reading: an attached transfer, or a pinned prefix."""
        if not self.incoming.release(lease_id, problem):
            self.pins.release(lease_id)

    def close(self) -> None:
        for transport in list(self._transports.values()):
            transport.abort()


class _Connection(asyncio.Protocol):
    def __init__(self, server: EngineSocketServer, process: int) -> None:
        self._server = server
        self._process = process
        self._frames = FrameReader()
        self._storage: Storage | None = None  # from the registration on
        self._waiting: asyncio.Task[None] | None = None  # a call that waits for the SSD
        self._pauses: set[str] = set()  # why reading is paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.process_connected(self._process, self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._server.process_exited(self._process)

    def pause_writing(self) -> None:
        """The process does not read its answers: it gets no further ones until it does."""
        self._pause_reading("answers")

    def resume_writing(self) -> None:
        self._resume_reading("answers")

    def _pause_reading(self, why: str) -> None:
        if not self._pauses:
            self._transport.pause_reading()
        self._pauses.add(why)

    def _resume_reading(self, why: str) -> None:
        if self._pauses == {why}:
            self._transport.resume_reading()
        self._pauses.discard(why)

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None:
            # Reading goes on for a while, so that the server learns when the process exits.
            if self._frames.add(data) > _WAITING_BYTES:
                self._pause_reading("calls")
            return
        try:
            for body in self._frames.feed(data):
                numbered = decode_call(body)
                prepared = self._prepared(numbered.call)
                if prepared is not None:
                    self._waiting = asyncio.create_task(self._handle_when(prepared, numbered))
                    return  # the frames that follow stay in the reader
                self._handle(numbered)
        except WireError as error:
            log.warning("closing the connection of engine process %d: %s", self._process, error)
            self._transport.abort()

    def _prepared(self, call: Call) -> AbstractAsyncContextManager[None] | None:
        """What the call has to wait for; None when it can be handled at once."""
        store, storage = self._server.store, self._storage
        if storage is None or not store.needs_preparation(storage):
            return None
        match call:
            case Begin() if call.answer_from is None:  # an answer never waits, and pins nothing
                promised = call.grant.checkpoint_tokens if call.grant is not None else ()
                wanted = call.checkpoint_tokens
                return store.prepared(
                    storage,
                    call.hashes,
                    call.tokens,
                    None if wanted is None else (*wanted, *promised),
                    promised,
                    owner_of(call),
                )
            case Pin():
                return store.prepared(storage, call.hashes)
            case _:
                return None

    async def _handle_when(
        self, prepared: AbstractAsyncContextManager[None], numbered: NumberedCall
    ) -> None:
        """A connection that closes cancels this, so nothing is reserved for it."""
        try:
            async with prepared:
                self._handle(numbered)
        except Exception:
            log.exception("closing the connection of engine process %d", self._process)
            self._transport.abort()
            return
        self._waiting = None
        if not self._transport.is_closing():
            self._resume_reading("calls")
            self.data_received(b"")

    def _handle(self, numbered: NumberedCall) -> None:
        call = numbered.call
        try:
            if isinstance(call, InvalidCall):  # refused alone: other leases of the process stay
                raise InputError(call.problem)
            if isinstance(call, Register):
                self._register(numbered.number, call)
                return
            storage = self._storage
            answer = _UNREGISTERED if storage is None else self._answer(call, storage)
        except InputError as error:
            answer = Refused("input", str(error))
        except PeerError as error:
            answer = Refused("transfer", str(error))
        except Exception as error:  # a defect ends this call, not the engine's other leases
            log.exception("engine process %d: %s failed", self._process, type(call).__name__)
            answer = Refused("transfer", f"the kvd failed: {error!r}")
        if numbered.number:
            self._send(NumberedAnswer(numbered.number, answer))
        elif isinstance(answer, Refused):
            # No caller waits for an answer to Ready; the commit will report the missing segment.
            log.warning("engine process %d: %s", self._process, answer.problem)

    def _answer(self, call: Call, storage: Storage) -> Answer:
        server, process = self._server, self._process
        holders = server.holders
        match call:
            case Ready():
                if holders.uses(call.lease_id, process):
                    server.outgoing.ready(call.lease_id, [s.share for s in call.segments])
            case Begin():
                begun = server.outgoing.begin(storage, call, self._notify_transfer_ended)
                return self._hold(begun, "write")
            case Attach():
                ticket = server.incoming.attach(
                    call.transfer_id, storage, attachments=call.attachments, engine=process
                )
                return self._hold(ticket, "read")
            case Pin():
                return self._hold(server.pins.pin(storage, call.hashes), "read")
            case Join():
                if call.instance != server.store.events.instance:
                    return Refused(
                        "transfer", f"lease {call.lease_id} is of another instance of the kvd"
                    )
                self._check_form_of_lease(call.lease_id, storage)
                if not holders.join(call.lease_id, process):
                    return Refused("transfer", f"lease {call.lease_id} has ended")
            case Commit() | Abort() | Release():
                return self._end(call)
            case Publish():
                self._publish(call, storage)
            case Flush():
                pass
            case Register() | InvalidCall():
                raise AssertionError("handled in _handle")
        return Done()

    def _check_form_of_lease(self, lease_id: int, storage: Storage) -> None:
        """InputError when the lease is of the other form: its pages are those of another arena."""
        owner = self._server.holders.owner(lease_id)
        if owner is None:
            return
        form = self._server.connected[owner].compat.form
        if form != storage.form:
            raise InputError(
                f"lease {lease_id} is of the {form} form, and this connection of the "
                f"{storage.form} form",
                where="lease_id",
                fix=f"join on the connection that has registered the {form} form",
            )

    def _publish(self, call: Publish, storage: Storage) -> None:
        if call.block_tokens not in (0, storage.block_tokens):
            raise InputError(
                f"blocks of {call.block_tokens} tokens, but the pool has {storage.block_tokens}",
                where="block_tokens",
                fix="publish with the block_tokens that the engine has registered with, or with 0",
            )
        engine = NodeId(self._server.connected[self._process].engine_id)
        states = {group.name for group in storage.spec.groups if isinstance(group, LinearState)}
        events = self._server.store.events
        events.publish(engine, call.payload, call.group_names, call.block_tokens, states)

    def _hold(self, answer: LeaseTicket | NotNow, kind: LeaseKind) -> LeaseTicket | NotNow:
        """From now on this process owns the lease; its ticket names this kvd's instance."""
        if isinstance(answer, NotNow):
            return answer
        self._server.holders.add(answer.lease_id, kind, self._process)
        return msgspec.structs.replace(answer, instance=self._server.store.events.instance)

    def _end(self, call: Commit | Abort | Release) -> Answer:
        server = self._server
        kind: LeaseKind = "read" if isinstance(call, Release) else "write"
        if not server.holders.end(call.lease_id, self._process, kind):
            return Refused(
                "transfer", f"lease {call.lease_id} has ended, or another process owns it"
            )
        match call:
            case Commit():
                server.outgoing.commit(call.lease_id)
            case Abort():
                server.outgoing.abort(call.lease_id, call.reason)
            case Release():
                server.release(call.lease_id, call.problem)
        return Done()

    def _register(self, number: int, call: Register) -> None:
        store = self._server.store
        if self._storage is not None:
            raise InputError(
                "this process has registered already",
                fix="register once on each connection, and on another one for another form",
            )
        storage = self._storage = store.register(call)
        self._server.connected[self._process] = call
        log.info(
            "engine %s has registered the %s form: %r", call.engine_id, storage.form, storage.arena
        )
        arena = storage.arena
        registered = Registered(
            node=store.node,
            http_url=self._server.http_url,
            data_address=self._server.data_address,
            page_bytes=arena.page_bytes,
            pages=arena.pages,
            instance=store.events.instance,
        )
        answer = frame(NumberedAnswer(number, registered))
        # Not through the transport, which cannot pass descriptors and has nothing to write yet.
        descriptor = self._transport.get_extra_info("socket").fileno()
        try:
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                socket.send_fds(sock, [answer], [storage.fd])
        except OSError as error:  # the process has exited in the meantime
            log.warning("engine %s: the registration was not answered: %s", call.engine_id, error)
            self._transport.abort()

    def _notify_transfer_ended(self, ended: TransferEnded) -> None:
        if not self._transport.is_closing():
            self._send(NumberedAnswer(0, ended))

    def _send(self, answered: NumberedAnswer) -> None:
        self._transport.write(frame(answered))
