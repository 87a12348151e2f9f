"""The kvd's server on the Unix socket: one connection per engine process.

Every call is answered before the next one is read; no handler waits. When a connection closes, the
leases of its process end (see `lease_holders`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from itertools import count
from typing import cast

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
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.types import NodeId

log = logging.getLogger(__name__)

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
        register = self.connected.pop(process, None)
        if register is not None:
            ended = len(leases.ended)
            log.info("engine %s has exited (%d leases ended)", register.engine_id, ended)
            if all(r.engine_id != register.engine_id for r in self.connected.values()):
                self.store.events.forget_engine(NodeId(register.engine_id))

    def release(self, lease_id: int) -> None:
        """Ends a lease for reading: an attached transfer, or a pinned prefix."""
        if not self.incoming.release(lease_id):
            self.pins.release(lease_id)

    def close(self) -> None:
        for transport in list(self._transports.values()):
            transport.abort()


class _Connection(asyncio.Protocol):
    def __init__(self, server: EngineSocketServer, process: int) -> None:
        self._server = server
        self._process = process
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.process_connected(self._process, self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.process_exited(self._process)

    def pause_writing(self) -> None:
        """The process does not read its answers: it gets no further ones until it does."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._handle(decode_call(body))
        except WireError as error:
            log.warning("closing the connection of engine process %d: %s", self._process, error)
            self._transport.abort()

    def _handle(self, numbered: NumberedCall) -> None:
        call = numbered.call
        try:
            if isinstance(call, InvalidCall):  # refused alone: other leases of the process stay
                raise InputError(call.problem)
            if isinstance(call, Register):
                self._register(numbered.number, call)
                return
            registered = self._process in self._server.connected
            answer = self._answer(call) if registered else _UNREGISTERED
        except InputError as error:
            answer = Refused("input", str(error))
        except PeerError as error:
            answer = Refused("transfer", str(error))
        if numbered.number:
            self._send(NumberedAnswer(numbered.number, answer))
        elif isinstance(answer, Refused):
            # No caller waits for an answer to Ready; the commit will report the missing segment.
            log.warning("engine process %d: %s", self._process, answer.problem)

    def _answer(self, call: Call) -> Answer:
        server, process = self._server, self._process
        holders = server.holders
        match call:
            case Ready():
                if holders.uses(call.lease_id, process):
                    server.outgoing.ready(call.lease_id, [s.segment for s in call.segments])
            case Begin():
                answer = server.outgoing.begin(call, self._notify_transfer_ended)
                if isinstance(answer, LeaseTicket):
                    holders.add(answer.lease_id, "write", process)
                return answer
            case Attach():
                ticket = server.incoming.attach(call.transfer_id)
                holders.add(ticket.lease_id, "read", process)
                return ticket
            case Pin():
                answer = server.pins.pin(call.hashes)
                if isinstance(answer, LeaseTicket):
                    holders.add(answer.lease_id, "read", process)
                return answer
            case Join():
                if not holders.join(call.lease_id, process):
                    return Refused("transfer", f"lease {call.lease_id} has ended")
            case Commit() | Abort() | Release():
                return self._end(call)
            case Publish():
                engine = NodeId(server.connected[process].engine_id)
                server.store.events.publish(engine, call.payload, call.group_names)
            case Flush():
                pass
            case Register() | InvalidCall():
                raise AssertionError("handled in _handle")
        return Done()

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
                server.release(call.lease_id)
        return Done()

    def _register(self, number: int, call: Register) -> None:
        store = self._server.store
        if self._process in self._server.connected:
            raise InputError(
                "this process has registered already", fix="register once on each connection"
            )
        storage = store.register(call)
        self._server.connected[self._process] = call
        log.info("engine %s has registered: %r", call.engine_id, storage.arena)
        arena = storage.arena
        registered = Registered(
            node=store.node,
            http_url=self._server.http_url,
            data_address=self._server.data_address,
            page_bytes=arena.page_bytes,
            pages=arena.pages,
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
