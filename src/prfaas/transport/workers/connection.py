"""One connection in a worker: a thread that carries out the kvd's orders and reports about them."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost, PeerError, WireError
from prfaas.transport.buffers import DISCARDED, FileRange
from prfaas.transport.channel import (
    DISCARD_BYTES,
    TICK_S,
    Channel,
    TimeLimit,
    shake_hands,
    shut_down,
)
from prfaas.transport.wire import (
    HEADER_BYTES,
    PIECE_BYTES,
    Kind,
    intact,
    parse_header,
    seal,
)
from prfaas.transport.workers.messages import (
    PACKET_BYTES,
    PART_BYTES,
    Body,
    Discard,
    Head,
    Input,
    Lost,
    Order,
    Range,
    ReceiveBody,
    Received,
    ReceivePayload,
    Report,
    SendBytes,
    SendFrame,
    Sent,
    Serve,
    Started,
    Working,
    encode,
    read_order,
)
from prfaas.transport.workers.read_ahead import ReadAhead


class MappedArenas(Protocol):
    def view(self, arena: int) -> memoryview:
        """Raises WireError when the kvd has not announced the arena."""

    def fd(self, arena: int) -> int: ...


class _Finished(Exception):
    """The kvd needs this connection no more."""


def serve_connection(
    serve: Serve,
    sock: socket.socket,
    orders: socket.socket,
    context: Callable[[], ssl.SSLContext],
    arenas: MappedArenas,
    clock: Clock,
) -> None:
    """Runs until the connection ends or the kvd closes `orders`. Closes both sockets."""
    try:
        try:
            sock = _with_tls(serve, sock, orders, context, clock)
            channel = Channel(sock, clock, serve.silence_s, send_files=serve.send_files)
            _Connection(channel, orders, arenas).run(serve.side)
        except _Finished:
            return
        except ssl.SSLError as error:
            lost = Lost("tls", error.reason or str(error))
        except TimeoutError:
            lost = Lost("connection", f"no TLS handshake within {serve.handshake_s:g} s")
        except WireError as error:
            lost = Lost("protocol", str(error))
        except (PeerError, OSError, ValueError) as error:
            lost = Lost("connection", str(error))
        shut_down(sock)
        _report_end(orders, lost)
    finally:
        shut_down(sock)
        sock.close()
        orders.close()


def _with_tls(
    serve: Serve,
    sock: socket.socket,
    orders: socket.socket,
    context: Callable[[], ssl.SSLContext],
    clock: Clock,
) -> socket.socket:
    if serve.tls is None:
        return sock
    sock.setblocking(False)
    wrapped = context().wrap_socket(
        sock,
        server_side=serve.tls == "server",
        server_hostname=serve.server_name if serve.tls == "client" else None,
        do_handshake_on_connect=False,
    )
    gone = select.poll()
    gone.register(orders, 0)  # reports a hang-up only
    shake_hands(wrapped, TimeLimit(serve.handshake_s, clock, lambda: bool(gone.poll(0))))
    return wrapped


def _report_end(orders: socket.socket, lost: Lost) -> None:
    try:
        orders.settimeout(TICK_S)
        orders.send(encode(lost))
    except OSError:
        pass  # the kvd has closed it, or takes no reports: the end of the socket shows the rest


class _Connection:
    def __init__(self, channel: Channel, orders: socket.socket, arenas: MappedArenas) -> None:
        self._channel = channel
        self._orders = orders
        self._arenas = arenas
        self._packet = memoryview(bytearray(PACKET_BYTES))
        self._scratch = memoryview(bytearray())
        self._granted = False  # the kvd has let a frame of this connection write to an arena
        self._ahead = ReadAhead()
        orders.setblocking(True)
        channel.watch(orders)
        self._has_order = select.poll()
        self._has_order.register(orders, select.POLLIN)

    def run(self, side: str) -> None:
        self._report(Started())
        if side == "sender":
            self._run_sender()
        else:
            self._run_receiver()

    # A sender: frames go out, and what the peer answers is passed on ------

    def _run_sender(self) -> None:
        while True:
            readable = self._channel.wait(TICK_S)
            if self._channel.fileno() in readable:
                self._pass_on_input()
            if self._orders.fileno() in readable:
                order = self._next_order()
                if isinstance(order, SendFrame):
                    self._send_frame(order)
                else:
                    self._send_bytes(order)

    def _send_frame(self, order: SendFrame) -> None:
        views = [self._view(part) for part in order.ranges]
        head = bytearray(order.head)
        if order.checked:
            seal(head, views)
        if self._channel.can_send_files:
            files = [
                FileRange(self._arenas.fd(arena), at, size) for arena, at, size in order.ranges
            ]
            self._channel.send_files(memoryview(head), files, self._meanwhile_sending)
        else:
            nbytes = len(head) + sum(view.nbytes for view in views)
            self._channel.send([memoryview(head), *views], nbytes, self._meanwhile_sending)
        self._report(Sent())

    def _meanwhile_sending(self) -> None:
        if self._channel.fileno() in self._channel.wait(0):
            self._pass_on_input()
        self._report(Working(0))

    def _pass_on_input(self) -> None:
        data = self._channel.receive_available(PART_BYTES)
        if data:
            self._report(Input(data))

    # A receiver: frames come in, and the kvd decides where their bytes go ------

    def _run_receiver(self) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        while True:
            readable = self._channel.wait(TICK_S)
            if self._orders.fileno() in readable:
                self._send_bytes(self._next_order())
            if self._channel.fileno() in readable:
                try:
                    arrived = self._channel.receive_if_any(head, wait=False)
                except ConnectionLost:
                    self._send_last_answers()
                    raise
                if arrived:
                    self._receive_frame(head)

    def _send_last_answers(self) -> None:
        """The peer sends no more, but it may read the answers to its last frames."""
        while self._has_order.poll(TICK_S * 1e3):
            self._send_bytes(self._next_order())

    def _receive_frame(self, head: memoryview) -> None:
        header = parse_header(head)
        table_bytes = header.pieces * PIECE_BYTES
        # The kvd decides by the header alone whether to read more from a peer that has shown no
        # grant: until it has, the table is read on its order, as a body is.
        table = bytearray(table_bytes if self._granted else 0)
        if table:
            self._channel.receive([memoryview(table)], len(table))
        self._report(Head(bytes(head) + table))
        left = header.body_bytes - len(table)
        if self._granted and header.kind is Kind.DATA:
            order = self._read_ahead(left)
        else:
            order = None
        ranges: list[Range] = []
        while left:
            order = order or self._next_order()
            if isinstance(order, ReceivePayload) and header.kind is Kind.DATA:
                ranges += order.ranges
                if not order.last and len(ranges) <= left:
                    order = None
                    continue
                views = self._targets(ranges, left)
                self._receive(views, left)
                left = 0
                self._granted = True
                self._report(Received(intact(head, header, table, views)))
            elif isinstance(order, Discard) and 0 < order.nbytes <= left:
                self._discard(order.nbytes)
                left -= order.nbytes
                self._report(Received(True))
            elif isinstance(order, ReceiveBody) and 0 < order.nbytes <= left:
                part = memoryview(bytearray(min(order.nbytes, PART_BYTES)))
                self._receive([part], part.nbytes)
                left -= part.nbytes
                if len(table) < table_bytes:
                    table += part
                self._report(Body(bytes(part)))
            else:
                self._send_bytes(order)
            order = None

    def _read_ahead(self, nbytes: int) -> Order | None:
        """Reads until the kvd has decided, and returns its order if there is one by then. Answers
        to earlier frames are sent meanwhile."""
        order: Order | None = None

        def is_decided() -> bool:
            nonlocal order
            while order is None and self._has_order.poll(0):
                order = self._next_order()
                if isinstance(order, SendBytes):
                    self._send_bytes(order)
                    order = None
            return order is not None

        self._ahead.fill(self._channel, nbytes, is_decided)
        return order

    def _receive(self, views: list[memoryview], nbytes: int) -> None:
        before = self._ahead.nbytes
        rest = self._ahead.pass_on(views)
        known = before - self._ahead.nbytes
        if rest:
            self._channel.receive(
                rest, nbytes - known, lambda more: self._meanwhile_receiving(known + more)
            )

    def _discard(self, nbytes: int) -> None:
        while nbytes:
            dropped = self._scratch_of(min(nbytes, DISCARD_BYTES))
            self._receive([dropped], dropped.nbytes)
            nbytes -= dropped.nbytes

    def _targets(self, ranges: Sequence[Range], nbytes: int) -> list[memoryview]:
        if sum(size for _, _, size in ranges) != nbytes:
            raise WireError(f"the order's ranges are not the {nbytes} bytes of the frame")
        discarded = sum(size for arena, _, size in ranges if arena == DISCARDED)
        scratch = self._scratch_of(discarded)
        views, at = [], 0
        for part in ranges:
            if part[0] == DISCARDED:
                views.append(scratch[at : at + part[2]])  # not twice: the checksum covers it
                at += part[2]
            else:
                views.append(self._view(part))
        return views

    def _scratch_of(self, nbytes: int) -> memoryview:
        """`nbytes` is at most the size of a body, which `parse_header` has checked."""
        if self._scratch.nbytes < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def _meanwhile_receiving(self, nbytes: int) -> None:
        self._report(Working(nbytes))
        # The kvd may answer with acknowledgements or progress. They do not wait for the next tick,
        # unless bytes of the frame arrive first.
        while self._orders.fileno() in self._channel.wait(TICK_S):
            self._send_bytes(self._next_order())

    # Both ---------------------------------------------------------------------------------------

    def _view(self, part: Range) -> memoryview:
        arena, offset, nbytes = part
        view = self._arenas.view(arena)[offset : offset + nbytes]
        if view.nbytes != nbytes or offset < 0:
            raise WireError(f"bytes {offset} to {offset + nbytes} are outside arena {arena}")
        return view

    def _send_bytes(self, order: Order) -> None:
        if not isinstance(order, SendBytes):
            raise WireError(f"an order came at the wrong time: {type(order).__name__}")
        data = memoryview(order.data)
        self._channel.send([data], data.nbytes)

    def _next_order(self) -> Order:
        """Waits for it: the kvd ends the wait by closing its end, also when it dies."""
        try:
            nbytes = self._orders.recv_into(self._packet)
        except ConnectionError:
            raise _Finished from None
        if not nbytes:
            raise _Finished
        try:
            return read_order(self._packet[:nbytes])
        except msgspec.MsgspecError as error:
            raise WireError(f"not an order: {error}") from None

    def _report(self, report: Report) -> None:
        try:
            self._orders.send(encode(report))
        except OSError:
            raise _Finished from None
