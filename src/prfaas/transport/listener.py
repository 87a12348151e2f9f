"""The receiving end: one fixed port, a thread per connection, bytes straight into owners' buffers.

`expect` must announce a grant before the listener accepts any frame of its transfer. The listener
closes the connection of a peer without a valid grant and does not answer it. A slow or hostile peer
costs a thread and a scratch buffer, within `max_connections`. Such a peer holds no lock, and the
pieces that it claimed are free again when its connection times out.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import ConnectionLost, WireError
from prfaas.transport.channel import TICK_S, Channel, set_options
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
from prfaas.types import Grant, TransferId

log = logging.getLogger(__name__)

_ACK_DELAY_S = 5e-3
_PROGRESS_EVERY_S = 0.1  # for a frame that takes longer than a tick to arrive


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    max_connections: int = 256
    silence_s: float = 10.0  # timeout of a peer in the middle of a frame
    unproven_s: float = 10.0  # a connection that has shown no grant is closed after this time
    idle_s: float = 600.0  # a connection with a grant is closed after this time without a frame
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
        clock: Clock | None = None,
    ) -> None:
        self._options = options or ListenerOptions()
        self._tls = tls
        self._clock = clock or MonotonicClock()
        self._transfers = ReceiverTransfers(self._clock)
        self._measure = _MeasureBudget(self._options.measure_bytes_per_minute, self._clock)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the two sets below
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._server = socket.create_server((host, port), backlog=128)
        self._server.settimeout(TICK_S)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._start(self._accept)
        self._start(self._maintain)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, grant: Grant, owner: BufferOwner) -> None:
        """Announces a grant: its transfer may begin from now until the grant's deadline."""
        self._transfers.expect(grant, owner)

    def cancel(self, transfer_id: TransferId, reason: str) -> None:
        """Ends a transfer from this side; does nothing when it has ended already. The owner's
        `ended` is called when no connection writes to its buffers, perhaps before this returns."""
        self._transfers.cancel(transfer_id, reason)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._sockets)

    def stats(self) -> ReceiverStats:
        return self._transfers.stats()

    def close(self) -> None:
        """Ends every transfer and waits for every thread. Idempotent."""
        self._closing.set()
        self._server.close()
        stuck = False
        while not stuck:  # a connection may arrive while the first threads are joined
            with self._lock:
                sockets = list(self._sockets)
                threads = [t for t in self._threads if t.is_alive()]
                threads = [t for t in threads if t is not threading.current_thread()]
            if not threads:
                break
            for sock in sockets:
                _disconnect(sock)
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
            with self._lock:
                admitted = len(self._sockets) < self._options.max_connections
                if admitted:
                    self._sockets.add(sock)
            if not admitted:
                log.warning("refused a connection from %s: %d are open", peer, len(self._sockets))
                sock.close()
                continue
            self._start(partial(self._serve, sock, f"{peer[0]}:{peer[1]}"))

    def _maintain(self) -> None:
        while not self._closing.wait(TICK_S):
            self._transfers.expire()
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            set_options(sock, None, self._options.buffer_bytes)
            if self._tls is not None:
                sock = self._handshake(sock, self._tls())
            channel = Channel(sock, self._clock, self._options.silence_s)
            _ReceiverConnection(
                channel, self._transfers, self._measure, self._options, self._clock
            ).run(self._closing)
        except (WireError, ssl.SSLError) as error:
            log.warning("closed the connection of %s: %s", peer, error)
        except (ConnectionLost, OSError) as error:
            log.debug("connection of %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._sockets.discard(sock)
            _disconnect(sock)

    def _handshake(self, sock: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        sock.settimeout(self._options.unproven_s)
        wrapped = tls.wrap_socket(sock, server_side=True)
        with self._lock:
            self._sockets.discard(sock)
            self._sockets.add(wrapped)
        return wrapped


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
        channel: Channel,
        transfers: ReceiverTransfers,
        measure: _MeasureBudget,
        options: ListenerOptions,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._transfers = transfers
        self._measure = measure
        self._options = options
        self._clock = clock
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch = memoryview(bytearray())
        self._greeted = False
        self._peer_reads_progress = False
        self._progress_s = 0.0  # when the last PROGRESS was sent
        self._proven = False
        self._acks: list[int] = []  # sequences to acknowledge, all of one transfer
        self._acks_of = NO_TRANSFER
        self._acks_since_s = 0.0

    def run(self, closing: threading.Event) -> None:
        """Runs until the peer disconnects or times out (ConnectionLost) or breaks the protocol
        (WireError)."""
        quiet_since = self._clock.now()
        while not closing.is_set():
            # While frames keep arriving, acknowledgements are batched; otherwise they are sent at
            # once.
            if not self._channel.receive_if_any(self._head, wait=not self._acks):
                self._flush()
                limit = self._options.idle_s if self._proven else self._options.unproven_s
                if self._clock.now() - quiet_since >= limit:
                    raise ConnectionLost(f"the peer sent no frame for {limit:g} s")
                continue
            if self._proven:
                quiet_since = self._clock.now()
            self._handle_frame(parse_header(self._head))

    def _handle_frame(self, header: Header) -> None:
        if not self._greeted and header.kind is not Kind.HELLO:
            raise WireError(f"the peer sent {header.kind.name} before HELLO")
        if header.kind is Kind.DATA:
            self._handle_data(header)
            return
        if header.kind is Kind.MEASURE:
            self._handle_measure(header)
            return
        body = self._receive_body(header)
        if header.kind is Kind.HELLO:
            self._peer_reads_progress = decode(body, Hello).progress
            self._greeted = True
            self._answer(Kind.WELCOME, header, encode(HELLO))
            return
        found = self._transfers.find(header)
        if found is None:
            raise WireError("no grant for this transfer")
        self._proven = True
        if isinstance(found, Ended):
            self._answer(Kind.ENDED, header, encode(found))
        elif header.kind is Kind.OPEN:
            self._handle_open(header, found, decode(body, Manifest))
        elif header.kind is Kind.PROBE:
            self._answer(Kind.ALIVE, header)
        elif header.kind is Kind.ABORT:
            result = Ended(False, f"aborted by the sender: {decode(body, Reason).reason}")
            self._transfers.end(found, result)
            self._answer(Kind.ENDED, header, encode(result))
        else:
            raise WireError(f"a sender must not send {header.kind.name}")

    def _handle_open(self, header: Header, transfer: ReceiverTransfer, manifest: Manifest) -> None:
        refusal = self._transfers.open(transfer, manifest)
        if refusal is not None:
            # A refused transfer ends at once, so that its reserved memory is free again.
            result = Ended(False, f"refused: {refusal}")
            self._transfers.end(transfer, result)
            self._answer(Kind.ENDED, header, encode(result))
        else:
            self._answer(Kind.OPENED, header)

    def _handle_data(self, header: Header) -> None:
        table = memoryview(bytearray(header.pieces * PIECE_BYTES))
        self._channel.receive([table], table.nbytes)
        pieces = parse_table(table, header)
        found = self._transfers.find(header)
        if found is None:
            raise WireError("no grant for this transfer's data")
        self._proven = True
        claims = None if isinstance(found, Ended) else self._transfers.claim(found, pieces)
        if isinstance(found, Ended) or claims is None:
            self._discard(sum(piece.wire_bytes for piece in pieces))
            if isinstance(found, ReceiverTransfer) and found.result is None:
                raise WireError("the peer sent data before OPEN")
            ended = found.result if isinstance(found, ReceiverTransfer) else found
            assert ended is not None
            self._answer(Kind.ENDED, header, encode(ended))
            return
        self._receive_payload(header, found, table, pieces, claims)

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
        try:
            views = self._targets(pieces, claims)
            self._channel.receive(
                views, header.body_bytes - table.nbytes, partial(self._report_progress, header)
            )
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

    def _report_progress(self, header: Header, nbytes: int) -> None:
        """Reports to the sender how much of a slow frame has arrived. Where one frame takes
        seconds, whole frames are too coarse to measure a rate."""
        self._flush()
        now = self._clock.now()
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
        if not self._measure.take(header.body_bytes):
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
        if nbytes:
            self._channel.receive([self._scratch_of(nbytes)], nbytes)

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


def _disconnect(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the connection is closed already
    sock.close()
