"""The receiving end: one fixed port, a thread per connection, bytes straight into owners' buffers.

`expect` must announce a grant before the listener accepts any frame of its transfer. The listener
closes the connection of a peer without a valid grant and does not answer it. A slow or hostile peer
costs a thread and a scratch buffer, within `max_connections`. Such a peer holds no lock, and the
pieces that it claimed are free again when its connection times out.

A connection is *unproven* until one of its frames shows the grant of a transfer that has not ended.
It has one deadline from the moment it was accepted, whatever it sends, and there are few such
connections: when there is no room for another one, an older one is closed. They do not take the
places of proven connections. A header is checked before a body is read or memory is allocated.
"""

from __future__ import annotations

import enum
import logging
import math
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address
from prfaas.errors import ConnectionLost, InputError, PeerError, PrfaasError, WireError
from prfaas.transport.buffers import DISCARDED
from prfaas.transport.channel import (
    DISCARD_BYTES,
    TICK_S,
    Channel,
    TimeLimit,
    set_options,
    shake_hands,
    shut_down,
)
from prfaas.transport.messages import HELLO, Ended, Hello, Manifest, Reason, decode, encode
from prfaas.transport.receiver import ReceiverStats, ReceiverTransfers
from prfaas.transport.receiver_transfer import BufferOwner, Claims, ReceiverTransfer
from prfaas.transport.wire import (
    HEADER_BYTES,
    MAX_ACKS,
    NO_TRANSFER,
    PIECE_BYTES,
    Header,
    Kind,
    SegmentPiece,
    encode_message,
    encode_progress,
    encode_sequences,
    intact,
    parse_header,
    parse_table,
)
from prfaas.transport.workers.channel import WorkerChannel
from prfaas.transport.workers.messages import Serve
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import Grant, TransferId

log = logging.getLogger(__name__)

_ACK_DELAY_S = 5e-3
_PROGRESS_EVERY_S = 0.1  # for a frame that takes longer than a tick to arrive
_UNKNOWN = Ended(False, "the receiver knows no such grant")
_FROM_SENDERS = {Kind.OPEN, Kind.DATA, Kind.PROBE, Kind.ABORT}  # frames that show a grant


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    max_connections: int = 256  # that have shown a grant
    max_unproven: int = 128  # for one more, the oldest of the host with the most of them is closed
    max_measuring: int = 64  # of path checks, `prfaas doctor`
    silence_s: float = 10.0  # timeout of a peer in the middle of a frame
    # These three count whatever the peer sends meanwhile. The first two count from the moment when
    # the connection was accepted, so that the TLS handshake is included.
    unproven_s: float = 10.0  # time to show a grant
    measure_s: float = 180.0  # time for a path check
    idle_s: float = 600.0  # time since the last frame of a transfer that has not ended
    measure_bytes_per_minute: int = 2 << 30  # limit for the path check, `prfaas doctor`
    buffer_bytes: int | None = None  # None: the kernel sizes socket buffers itself


class Listener:
    """Serves from construction until `close`; `with Listener(...) as listener:` does both."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        options: ListenerOptions | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        workers: WorkerPool | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`tls` returns the context of the next handshake: new certificates count for connections
        that are accepted later. With `workers`, these processes move the bytes, and make the
        handshakes with their own credentials. The host "::" accepts IPv4 connections, too."""
        self._options = options or ListenerOptions()
        self._tls = tls
        self.workers = workers
        self._clock = clock or MonotonicClock()
        self._transfers = ReceiverTransfers(self._clock)
        self._measure = _MeasureBudget(self._options.measure_bytes_per_minute, self._clock)
        self._closing = threading.Event()
        self._slots = _Slots(self._options)
        self._warnings = _Warnings(self._clock)
        self._lock = threading.Lock()  # guards the set below
        self._threads: set[threading.Thread] = set()
        self._server = _listen(host, port)
        self._server.settimeout(TICK_S)
        self.address = Address(*self._server.getsockname()[:2])
        self._start(self._accept)
        self._start(self._maintain)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, grant: Grant, owner: BufferOwner) -> Callable[[], int]:
        """Announces a grant: its transfer may begin from now until the grant's deadline. Returns a
        function that says how many of its bytes have arrived so far."""
        return self._transfers.expect(grant, owner)

    def cancel(self, transfer_id: TransferId, reason: str) -> None:
        """Ends a transfer from this side; does nothing when it has ended already. The owner's
        `ended` is called when no connection writes to its buffers, perhaps before this returns."""
        self._transfers.cancel(transfer_id, reason)

    @property
    def connections(self) -> int:
        return len(self._slots)

    def stats(self) -> ReceiverStats:
        return self._transfers.stats()

    def close(self) -> None:
        """Ends every transfer and waits for every thread. Idempotent."""
        self._closing.set()
        shut_down(self._server)  # wakes the thread that accepts, which `close` does not
        self._server.close()
        stuck = False
        while not stuck:  # a connection may arrive while the first threads are joined
            with self._lock:
                threads = [t for t in self._threads if t.is_alive()]
                threads = [t for t in threads if t is not threading.current_thread()]
            if not threads:
                break
            self._slots.shut_all()
            for thread in threads:
                thread.join(timeout=self._options.silence_s + 1)
            stuck = any(thread.is_alive() for thread in threads)
        self._transfers.end_all("the receiver is shutting down")

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="prfaas-listener", daemon=True)
        # Start the thread under the lock: either `close` finds it running, or the thread finds
        # `_closing` set and ends at once.
        with self._lock:
            self._threads.add(thread)
            thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, peer = self._server.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing.is_set():
                    return
                # For example out of descriptors. Connections end and free some, so keep serving.
                log.warning("cannot accept a connection: %s", error)
                self._closing.wait(TICK_S)
                continue
            slot = _Slot(self._slots, sock, peer[0], self._clock.now())
            if not self._slots.admit(slot):
                self._warnings.log("refused a connection: too many others are being closed")
                sock.close()
                continue
            try:
                self._start(partial(self._serve, slot, str(Address(*peer[:2]))))
            except RuntimeError as error:  # the system has no thread left
                self._warnings.log(f"cannot serve a connection: {error}")
                self._slots.remove(slot)
                sock.close()

    def _maintain(self) -> None:
        while not self._closing.wait(TICK_S):
            self._transfers.expire()
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}

    def _serve(self, slot: _Slot, peer: str) -> None:
        channel: Channel | WorkerChannel | None = None
        try:
            set_options(slot.sock, None, self._options.buffer_bytes)
            channel = self._open_channel(slot)
            _ReceiverConnection(
                channel, slot, self._transfers, self._measure, self._options, self._clock
            ).run(self._closing)
        except ssl.SSLError as error:
            self._warnings.log(f"closed the connection of {peer}: {error}")
        except (ConnectionLost, OSError) as error:
            log.debug("connection of %s ended: %s", peer, error)
        except PrfaasError as error:
            self._warnings.log(f"closed the connection of {peer}: {error}")
        finally:
            self._slots.remove(slot)
            if channel is not None:
                channel.close()
            shut_down(slot.sock)
            slot.sock.close()

    def _open_channel(self, slot: _Slot) -> Channel | WorkerChannel:
        """Returns after the TLS handshake, if there is one."""
        seconds = slot.accepted_s + self._options.unproven_s - self._clock.now()
        worker = self.workers.take() if self.workers is not None else None
        if worker is not None and self.workers is not None:
            serve = Serve(
                side="receiver",
                tls=None if self._tls is None else "server",
                server_name="",
                handshake_s=max(0.0, seconds),
                silence_s=self._options.silence_s,
            )
            return WorkerChannel(self.workers, worker, slot.sock, serve, self._clock)
        if self._tls is not None:
            wrapped = slot.use_tls(self._tls())
            shake_hands(wrapped, TimeLimit(seconds, self._clock, self._closing.is_set))
        return Channel(slot.sock, self._clock, self._options.silence_s)


class _Warnings:
    """Log lines that any peer can cause, without a grant: at most one per second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = -math.inf
        self._left_out = 0

    def log(self, what: str) -> None:
        with self._lock:
            now = self._clock.now()
            if now < self._next_s:
                self._left_out += 1
                return
            self._next_s = now + 1.0
            left_out, self._left_out = self._left_out, 0
        log.warning("%s%s", what, f" ({left_out} similar lines left out)" if left_out else "")


class _Stage(enum.Enum):
    UNPROVEN = "unproven"
    MEASURING = "measuring"  # a path check, which needs no grant
    PROVEN = "proven"


class _Slot:
    """The place of one connection among those of a listener."""

    def __init__(self, slots: _Slots, sock: socket.socket, host: str, accepted_s: float) -> None:
        self._slots = slots
        self.sock = sock
        self.host = host
        self.accepted_s = accepted_s
        self.stage = _Stage.UNPROVEN
        self.leaving = False  # it was shut down to make room, and its thread is ending

    def move(self, stage: _Stage) -> None:
        """Raises PeerError when too many connections are in that stage, or when this one had to
        leave."""
        if self.stage is not stage:
            self._slots.move(self, stage)

    def use_tls(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """The handshake comes later: meanwhile the listener can already shut the socket down."""
        return self._slots.use_tls(self, context)


class _Slots:
    """Which connections may stay. Thread-safe."""

    def __init__(self, options: ListenerOptions) -> None:
        self._limits = {
            _Stage.UNPROVEN: options.max_unproven,
            _Stage.MEASURING: options.max_measuring,
            _Stage.PROVEN: options.max_connections,
        }
        self._lock = threading.Lock()
        self._slots: dict[_Slot, None] = {}  # the oldest first

    def __len__(self) -> int:
        with self._lock:
            return len(self._slots)

    def admit(self, slot: _Slot) -> bool:
        """Takes a new connection, for which an unproven one may have to leave. False when too many
        are leaving already."""
        limit = self._limits[_Stage.UNPROVEN]
        with self._lock:
            unproven = self._in(_Stage.UNPROVEN)
            if len(unproven) >= limit:
                if sum(one.leaving for one in self._slots) >= limit:
                    return False
                leaving = _least_welcome(unproven)
                leaving.leaving = True
                shut_down(leaving.sock)
            self._slots[slot] = None
            return True

    def move(self, slot: _Slot, stage: _Stage) -> None:
        with self._lock:
            if slot.leaving:
                raise ConnectionLost("the connection had to make room for another one")
            if len(self._in(stage)) >= self._limits[stage]:
                raise PeerError(f"{self._limits[stage]} connections are {stage.value} already")
            slot.stage = stage

    def use_tls(self, slot: _Slot, context: ssl.SSLContext) -> ssl.SSLSocket:
        with self._lock:
            slot.sock.setblocking(False)
            slot.sock = wrapped = context.wrap_socket(
                slot.sock, server_side=True, do_handshake_on_connect=False
            )
            return wrapped

    def remove(self, slot: _Slot) -> None:
        with self._lock:
            self._slots.pop(slot, None)

    def shut_all(self) -> None:
        with self._lock:
            for slot in self._slots:
                shut_down(slot.sock)

    def _in(self, stage: _Stage) -> list[_Slot]:
        return [slot for slot in self._slots if slot.stage is stage and not slot.leaving]


def _least_welcome(unproven: list[_Slot]) -> _Slot:
    """The oldest one of the host with the most of them: a host that opens many connections without
    a grant first loses its own."""
    numbers = Counter(slot.host for slot in unproven)
    most = max(numbers.values())
    return next(slot for slot in unproven if numbers[slot.host] == most)


class _MeasureBudget:
    """The bytes per minute that the listener accepts and discards for path checks."""

    def __init__(self, bytes_per_minute: int, clock: Clock) -> None:
        self._limit = bytes_per_minute
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s = clock.now()
        self._used = 0

    def take(self, nbytes: int) -> bool:
        with self._lock:
            now = self._clock.now()
            if now - self._since_s >= 60:
                self._since_s, self._used = now, 0
            self._used += nbytes
            return self._used <= self._limit


class _ReceiverConnection:
    """One connection: reads frames and answers each of them."""

    def __init__(
        self,
        channel: Channel | WorkerChannel,
        slot: _Slot,
        transfers: ReceiverTransfers,
        measure: _MeasureBudget,
        options: ListenerOptions,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._slot = slot
        self._transfers = transfers
        self._measure = measure
        self._options = options
        self._clock = clock
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch = memoryview(bytearray())
        self._greeted = False
        self._peer_reads_progress = False
        self._progress_s = 0.0  # when the last PROGRESS was sent
        self._ended_s: float | None = None  # when the transfer of the current frame had ended
        self._acks: list[int] = []  # sequences to acknowledge, all of one transfer
        self._acks_of = NO_TRANSFER
        self._acks_since_s = 0.0
        channel.until_s = slot.accepted_s + options.unproven_s

    def run(self, closing: threading.Event) -> None:
        """Runs until the peer disconnects or times out (ConnectionLost) or breaks the protocol
        (WireError)."""
        while not closing.is_set():
            if self._clock.now() >= self._channel.until_s:
                raise ConnectionLost("the peer showed no grant in time")
            # While frames keep arriving, acknowledgements are batched; otherwise they are sent at
            # once.
            if self._channel.receive_if_any(self._head, wait=not self._acks):
                self._handle_frame(parse_header(self._head))
            else:
                self._flush()

    def _handle_frame(self, header: Header) -> None:
        if header.kind is Kind.HELLO:
            self._handle_hello(header)
            return
        if not self._greeted:
            raise WireError(f"the peer sent {header.kind.name} before HELLO")
        if header.kind is Kind.MEASURE:
            self._handle_measure(header)
            return
        if header.kind not in _FROM_SENDERS:
            raise WireError(f"a sender must not send {header.kind.name}")
        found = self._transfers.find(header)
        if found is None:
            if self._slot.stage is not _Stage.PROVEN:
                raise WireError("no grant for this transfer")
            # For example a grant from before a restart. The sender's other transfers go on.
            found = _UNKNOWN
        if isinstance(found, Ended):
            # A late frame. It proves nothing: an old grant does not keep a connection open.
            self._discard(header.body_bytes)
            self._answer(Kind.ENDED, header, encode(found))
            return
        self._slot.move(_Stage.PROVEN)
        self._channel.until_s = self._clock.now() + self._options.idle_s
        if header.kind is Kind.DATA:
            self._handle_data(header, found)
            return
        body = self._receive_body(header)
        if header.kind is Kind.OPEN:
            self._handle_open(header, found, decode(body, Manifest))
        elif header.kind is Kind.PROBE:
            self._answer(Kind.ALIVE, header)
        else:
            result = Ended(False, f"aborted by the sender: {decode(body, Reason).reason}")
            self._transfers.end(found, result)
            self._answer(Kind.ENDED, header, encode(result))

    def _handle_hello(self, header: Header) -> None:
        if self._greeted:
            raise WireError("the peer sent HELLO twice")
        self._greeted = True
        self._peer_reads_progress = decode(self._receive_body(header), Hello).progress
        self._answer(Kind.WELCOME, header, encode(HELLO))

    def _handle_open(self, header: Header, transfer: ReceiverTransfer, manifest: Manifest) -> None:
        refusal = self._transfers.open(transfer, manifest)
        if refusal is not None:
            # A refused transfer ends at once, so that its reserved memory is free again.
            result = Ended(False, f"refused: {refusal}")
            self._transfers.end(transfer, result)
            self._answer(Kind.ENDED, header, encode(result))
        else:
            self._answer(Kind.OPENED, header)

    def _handle_data(self, header: Header, transfer: ReceiverTransfer) -> None:
        table = memoryview(bytearray(header.pieces * PIECE_BYTES))
        self._channel.receive([table], table.nbytes)
        pieces = parse_table(table, header)
        in_files = isinstance(self._channel, WorkerChannel) and transfer.on_file
        claims = self._transfers.claim(transfer, pieces, in_files=in_files)
        if claims is not None:
            self._receive_payload(header, transfer, table, pieces, claims)
            return
        if transfer.result is None:
            raise WireError("the peer sent data before OPEN")
        self._discard(header.body_bytes - table.nbytes)
        self._answer(Kind.ENDED, header, encode(transfer.result))

    def _receive_payload(
        self,
        header: Header,
        transfer: ReceiverTransfer,
        table: memoryview,
        pieces: list[SegmentPiece],
        claims: Claims,
    ) -> None:
        verified = False
        result = None
        began_s = self._clock.now()
        self._ended_s = None
        try:
            meanwhile = partial(self._report_progress, header, transfer)
            if isinstance(self._channel, WorkerChannel) and transfer.on_file:
                discarded = (part.nbytes for part in claims.files if part.fd == DISCARDED)
                self._transfers.count_duplicate(sum(discarded))
                verified = self._channel.receive_payload(claims.files, meanwhile)
            else:
                views = self._targets(pieces, claims)
                self._channel.receive(views, header.body_bytes - table.nbytes, meanwhile)
                verified = intact(self._head, header, table, views)
        finally:
            result = self._transfers.settle(transfer, claims, verified=verified)
        if result is not None:
            self._answer(Kind.ENDED, header, encode(result))
        elif not verified:
            self._answer(Kind.NACK, header, encode(Reason("checksum does not match")))
        elif claims.busy:
            self._answer(
                Kind.NACK, header, encode(Reason("another connection is writing these bytes"))
            )
        else:
            self._acknowledge(header, began_s)

    def _report_progress(self, header: Header, transfer: ReceiverTransfer, nbytes: int) -> None:
        """Reports to the sender how much of a slow frame has arrived. Where one frame takes
        seconds, whole frames are too coarse to measure a rate. Raises ConnectionLost when the
        transfer ended a while ago: its owner waits for the memory that this frame is written to."""
        self._flush()
        now = self._clock.now()
        if transfer.result is not None:
            if self._ended_s is None:
                self._ended_s = now
            elif now - self._ended_s >= self._options.silence_s:
                raise ConnectionLost("the transfer has ended, and its last frame is not complete")
        if self._peer_reads_progress and now - self._progress_s >= _PROGRESS_EVERY_S:
            self._progress_s = now
            self._answer(Kind.PROGRESS, header, encode_progress(nbytes))

    def _targets(self, pieces: list[SegmentPiece], claims: Claims) -> list[memoryview]:
        """The buffers for the payload: the owner's, or scratch for pieces that are not missing."""
        if len(claims.quanta) == len(pieces):
            return list(chain.from_iterable(filter(None, claims.targets)))
        duplicate_bytes = sum(
            piece.wire_bytes
            for piece, target in zip(pieces, claims.targets, strict=True)
            if target is None
        )
        self._transfers.count_duplicate(duplicate_bytes)
        scratch = self._scratch_of(duplicate_bytes)
        views: list[memoryview] = []
        at = 0
        for piece, target in zip(pieces, claims.targets, strict=True):
            if target is not None:
                views += target
            else:
                views.append(scratch[at : at + piece.wire_bytes])
                at += piece.wire_bytes
        return views

    def _handle_measure(self, header: Header) -> None:
        if self._slot.stage is _Stage.UNPROVEN:
            self._slot.move(_Stage.MEASURING)
            self._channel.until_s = self._slot.accepted_s + self._options.measure_s
        if not self._measure.take(HEADER_BYTES + header.body_bytes):
            raise WireError("the path check exceeds this listener's bytes per minute")
        began_s = self._clock.now()
        self._discard(header.body_bytes)
        self._acknowledge(header, began_s)

    def _receive_body(self, header: Header) -> bytes:
        body = bytearray(header.body_bytes)
        if body:
            self._channel.receive([memoryview(body)], len(body))
        if not intact(self._head, header, body):
            raise WireError(f"the checksum of a {header.kind.name} frame does not match")
        return bytes(body)

    def _discard(self, nbytes: int) -> None:
        if isinstance(self._channel, WorkerChannel):
            self._channel.discard(nbytes)
            return
        while nbytes:
            some = min(nbytes, DISCARD_BYTES)
            self._channel.receive([self._scratch_of(some)], some)
            nbytes -= some

    def _scratch_of(self, nbytes: int) -> memoryview:
        """`nbytes` is at most MAX_PAYLOAD_BYTES: `parse_header` has checked it."""
        if self._scratch.nbytes < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        return self._scratch[:nbytes]

    def _acknowledge(self, header: Header, began_s: float) -> None:
        """Batches acknowledgements only while that delays none of them: after a frame that took
        long to arrive, the next one probably takes long, too."""
        if self._acks and self._acks_of != header.transfer_id:
            self._flush()
        if not self._acks:
            self._acks_since_s = began_s
        self._acks.append(header.sequence)
        self._acks_of = header.transfer_id
        held_s = self._clock.now() - self._acks_since_s
        if held_s >= _ACK_DELAY_S or len(self._acks) >= MAX_ACKS:
            self._flush()

    def _flush(self) -> None:
        if self._acks:
            body = encode_sequences(self._acks)
            self._acks.clear()
            self._send(encode_message(Kind.ACK, body, transfer_id=self._acks_of))

    def _answer(self, kind: Kind, header: Header, body: bytes = b"") -> None:
        self._flush()
        frame = encode_message(kind, body, sequence=header.sequence, transfer_id=header.transfer_id)
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        self._channel.send([memoryview(frame)], len(frame))


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except ValueError as error:  # UnicodeError for a label that is too long, and zero bytes
        raise InputError(f"{host!r} is not a host: {error}", where="listen") from None
    # A name that has addresses of both families, such as localhost, means IPv4.
    only_v6 = all(family == socket.AF_INET6 for family, *_ in found)
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if only_v6 else socket.AF_INET,
        backlog=128,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
