"""The Unix socket's side of the kvd: one connection per engine process.

Every call is answered before the next is read; nothing here waits. When a connection closes, what
its process held goes back (see `holds`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from itertools import count
from typing import cast

from prfaas.errors import InputError, PeerError, WireError
from prfaas.kvd.engine_socket.lease_holders import Holds
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Answer,
    Answered,
    Attach,
    Begin,
    Call,
    Commit,
    Done,
    Flush,
    Frames,
    Join,
    Numbered,
    Pin,
    Publish,
    Ready,
    Refused,
    Register,
    Registered,
    Release,
    Sent,
    Ticket,
    decode_call,
    frame,
)
from prfaas.kvd.engine_socket.pins import Pins
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.types import NodeId

log = logging.getLogger(__name__)

_UNREGISTERED = Refused("input", "the first message of a connection must be a registration")


class Engines:
    """Every engine process that is connected, and what they hold together."""

    def __init__(
        self,
        store: Store,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        pins: Pins,
        events: EventLog,
        data_address: str,
    ) -> None:
        self.data_address = data_address
        self.http_url = ""  # once it is served
        self.store = store
        self.incoming = incoming
        self.outgoing = outgoing
        self.pins = pins
        self.events = events
        self.holds = Holds()
        self.connected: dict[int, Register] = {}
        self._transports: dict[int, asyncio.Transport] = {}
        self._numbers = count(1)

    def connection(self) -> asyncio.Protocol:
        return _Connection(self, next(self._numbers))

    def opened(self, process: int, transport: asyncio.Transport) -> None:
        self._transports[process] = transport

    def gone(self, process: int) -> None:
        self._transports.pop(process, None)
        lost = self.holds.gone(process)
        for lease_id in lost.maimed:
            self.outgoing.give_up_sending(lease_id, "an engine process has gone")
        for lease_id, kind in lost.ended:
            if kind == "write":
                self.outgoing.abort(lease_id, "the engine has gone")
            else:
                self.let_go(lease_id)
        register = self.connected.pop(process, None)
        if register is not None:
            log.info("engine %s has left (%d leases ended)", register.engine_id, len(lost.ended))
            if all(r.engine_id != register.engine_id for r in self.connected.values()):
                self.events.forget_engine(NodeId(register.engine_id))

    def let_go(self, lease_id: int) -> None:
        """A lease that was read: an attached transfer, or a pinned prefix."""
        if not self.incoming.release(lease_id):
            self.pins.release(lease_id)

    def close(self) -> None:
        for transport in list(self._transports.values()):
            transport.abort()


class _Connection(asyncio.Protocol):
    def __init__(self, engines: Engines, process: int) -> None:
        self._engines = engines
        self._process = process
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._engines.opened(self._process, self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engines.gone(self._process)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(decode_call(body))
        except WireError as error:
            log.warning("local connection %d cut: %s", self._process, error)
            self._transport.abort()

    def _take(self, numbered: Numbered) -> None:
        call = numbered.call
        try:
            if isinstance(call, Register):
                self._register(numbered.number, call)
                return
            registered = self._process in self._engines.connected
            answer = self._answer(call) if registered else _UNREGISTERED
        except InputError as error:
            answer = Refused("input", str(error))
        except PeerError as error:
            answer = Refused("transfer", str(error))
        if numbered.number:
            self._send(Answered(numbered.number, answer))
        elif isinstance(answer, Refused):
            # Nobody waits for an answer to Ready; a commit will miss the segment.
            log.warning("local connection %d: %s", self._process, answer.problem)

    def _answer(self, call: Call) -> Answer:
        engines, process = self._engines, self._process
        holds = engines.holds
        match call:
            case Ready():
                if holds.touches(call.lease_id, process):
                    engines.outgoing.ready(call.lease_id, [s.segment for s in call.segments])
            case Begin():
                answer = engines.outgoing.begin(call, self._sent)
                if isinstance(answer, Ticket):
                    holds.take(answer.lease_id, "write", process)
                return answer
            case Attach():
                ticket = engines.incoming.attach(call.transfer_id)
                holds.take(ticket.lease_id, "read", process)
                return ticket
            case Pin():
                answer = engines.pins.pin(call.hashes)
                if isinstance(answer, Ticket):
                    holds.take(answer.lease_id, "read", process)
                return answer
            case Join():
                if not holds.join(call.lease_id, process):
                    return Refused("transfer", f"lease {call.lease_id} has ended")
            case Commit() | Abort() | Release():
                return self._end(call)
            case Publish():
                engine = NodeId(engines.connected[process].engine_id)
                engines.events.publish(engine, call.payload, call.group_names)
            case Flush():
                pass
            case Register():
                raise AssertionError("taken care of before")
        return Done()

    def _end(self, call: Commit | Abort | Release) -> Answer:
        engines = self._engines
        wanted = "read" if isinstance(call, Release) else "write"
        if engines.holds.end(call.lease_id, self._process) != wanted:
            return Refused("transfer", f"lease {call.lease_id} has ended, or is another process's")
        match call:
            case Commit():
                engines.outgoing.commit(call.lease_id)
            case Abort():
                engines.outgoing.abort(call.lease_id, call.reason)
            case Release():
                engines.let_go(call.lease_id)
        return Done()

    def _register(self, number: int, call: Register) -> None:
        store = self._engines.store
        shelf = store.register(call)
        self._engines.connected[self._process] = call
        log.info("engine %s has registered: %r", call.engine_id, shelf.arena)
        arena = shelf.arena
        registered = Registered(
            node=store.node,
            http_url=self._engines.http_url,
            data_address=self._engines.data_address,
            page_bytes=arena.page_bytes,
            pages=arena.pages,
        )
        answer = frame(Answered(number, registered))
        # Past the transport, which has nothing to write yet: it cannot pass descriptors.
        descriptor = self._transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            socket.send_fds(sock, [answer], [shelf.fd])

    def _sent(self, sent: Sent) -> None:
        if not self._transport.is_closing():
            self._send(Answered(0, sent))

    def _send(self, answered: Answered) -> None:
        self._transport.write(frame(answered))
