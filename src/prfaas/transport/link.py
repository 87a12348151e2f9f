"""The sending end: long-lived connections to one receiver, shared by all transfers to it.

Each connection has a thread that takes the next pending frame as soon as the connection is free. A
slow connection therefore delays only the frames that it carries. When a connection breaks, its
frames become pending again at once and any other connection may send them; the broken connection
reconnects with backoff. The link opens connections when there is work and closes them when they
have been idle for a while. A link whose receiver does not answer tries with one connection only. A
link without transfers makes no attempt to connect, and soon has neither connections nor threads.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address
from prfaas.config.host import KvdSection
from prfaas.errors import (
    ConnectionLost,
    InputError,
    PeerError,
    PrfaasError,
    TransferFailed,
    WireError,
)
from prfaas.lateness import LateSince, never_late
from prfaas.transport.buffers import FileRange, FileSlice
from prfaas.transport.channel import TICK_S, Channel, connect
from prfaas.transport.grants import transfer_key
from prfaas.transport.messages import (
    HELLO,
    MAX_LABEL_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_SEGMENTS,
    Ended,
    Hello,
    Manifest,
    ManifestSegment,
    Reason,
    decode,
    encode,
)
from prfaas.transport.meter import Meter
from prfaas.transport.sender import (
    NoWork,
    SendAbort,
    SenderTransfers,
    SendFrame,
    SendOpen,
    SendProbe,
    Work,
)
from prfaas.transport.sender_transfer import SenderTransfer
from prfaas.transport.wire import (
    MAX_MANIFEST_BYTES,
    MAX_PAYLOAD_BYTES,
    Decoder,
    Frame,
    Kind,
    auth_of,
    encode_data_head,
    encode_message,
    parse_progress,
    parse_sequences,
    seal,
)
from prfaas.transport.workers.channel import WorkerChannel
from prfaas.transport.workers.messages import Serve
from prfaas.transport.workers.pool import WorkerPool
from prfaas.types import Grant, LinkStats

log = logging.getLogger(__name__)

HANDOFF, PREFIX_COPY = 0, 1  # priorities: a request waits for a hand-off, not for a copy
_MAX_BACKOFF_S = 5.0
_READY_AT_ONCE = 1_000  # segments added before the connections may take work again
_DEFAULTS = KvdSection()


@dataclass(frozen=True, slots=True)
class LinkOptions:
    connections: int = 4
    frame_bytes: int = 7 << 20  # maximum; a slow connection sends smaller frames
    quantum_bytes: int = 1 << 20  # the unit of acknowledgement and of resending
    checksums: bool = True  # of payloads; TLS links omit them, since TLS authenticates every byte
    rate_bps: float | None = None  # pacing; None: unlimited
    in_flight_bytes: int = 256 << 20  # sent and not yet acknowledged; on a slow link fewer
    connect_s: float = _DEFAULTS.timeouts.connect_s
    open_s: float = 10.0  # a transfer that the receiver has not opened by then fails
    # A connection that leaves a frame unanswered for this long is broken.
    silence_s: float = _DEFAULTS.timeouts.connection_silence_s
    stall_s: float = (
        _DEFAULTS.timeouts.transfer_stall_s
    )  # a transfer without an acknowledgement for this long fails
    probe_s: float = 2.0  # how often a transfer with nothing to send renews its grant
    # An ABORT that could not be sent for this long is dropped: the receiver frees its memory when
    # the grant expires.
    abort_s: float = 10.0
    idle_s: float = 60.0  # a connection is closed after this time without work
    congestion_control: str | None = None  # "bbr" where the kernel has it; None: its default
    buffer_bytes: int | None = None  # None: the kernel sizes socket buffers itself
    tls_name: str | None = None  # name in the receiver's certificate; None: the address
    send_files: bool = True  # with `sendfile`; False on hosts where a copy costs less (host_speed)


class ConnectionBudget:
    """The number of connections that all links of a host may open beyond the first of each link."""

    def __init__(self, extra: int) -> None:
        self._free = extra
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            if self._free <= 0:
                return False
            self._free -= 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._free += 1


class FrameSize:
    """The frame size of one connection. Large frames cost less on a fast connection. On a slow one
    they delay urgent frames and acknowledgements. A frame should take a few milliseconds."""

    _SHORT_S, _LONG_S = 5e-3, 25e-3

    def __init__(self, options: LinkOptions) -> None:
        self._most = min(options.frame_bytes, MAX_PAYLOAD_BYTES - options.quantum_bytes)
        self._least = min(options.quantum_bytes, self._most)
        self.nbytes = self._least

    def record(self, nbytes: int, seconds: float) -> None:
        if seconds > self._LONG_S:
            self.nbytes = max(self._least, self.nbytes // 2)
        elif seconds < self._SHORT_S and nbytes >= self.nbytes:
            self.nbytes = min(self._most, self.nbytes * 2)


class Transfer:
    """One granted transfer, for the owner of its bytes."""

    def __init__(self, link: TransferLink, transfer: SenderTransfer) -> None:
        self._link = link
        self._transfer = transfer

    @property
    def done(self) -> Future[None]:
        """Has a result when the receiver has committed, and raises TransferFailed otherwise. From
        then on nothing reads the transfer's buffers. From asyncio:
        `await asyncio.wrap_future(transfer.done)`."""
        return self._transfer.done

    @property
    def opened(self) -> bool:
        """The receiver has accepted the manifest and takes bytes."""
        return self._transfer.opened

    @property
    def acknowledged_bytes(self) -> int:
        return self._transfer.acknowledged_bytes

    def ready(self, name: str, *parts: memoryview | FileSlice) -> None:
        """A segment's bytes are final and do not change until `done`. Segments may become ready in
        any order. The kernel sends bytes that lie in a file (`FileSlice`: an arena's) without a
        copy on this host."""
        self.ready_all({name: parts})

    def ready_all(self, segments: Mapping[str, Sequence[memoryview | FileSlice]]) -> None:
        """Marks several segments as ready, as when a chunk of many layers is done."""
        remaining = iter(segments.items())
        while some := dict(islice(remaining, _READY_AT_ONCE)):
            self._link.transfers.mark_ready(self._transfer, some, self._link.clock.now())
            self._link.wake()

    def abort(self, reason: str) -> None:
        """Ends the transfer and informs the receiver. Does nothing after `done`."""
        self._link.transfers.abort(self._transfer, reason, self._link.clock.now())
        self._link.wake()


class TransferLink:
    def __init__(
        self,
        address: tuple[str, int],
        *,
        options: LinkOptions | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        budget: ConnectionBudget | None = None,
        workers: WorkerPool | None = None,
        clock: Clock | None = None,
        late_since: LateSince = never_late,
    ) -> None:
        """`tls` returns the context of the next handshake: new certificates count for connections
        that are opened later. With `workers`, these processes move the bytes, and make the
        handshakes with their own credentials. `late_since` returns how late this process was. The
        link subtracts that from its report about the path."""
        self.address = address
        self.options = options or LinkOptions()
        self.clock = clock or MonotonicClock()
        self._late_since = late_since
        self.closing = threading.Event()
        self.transfers = SenderTransfers(
            in_flight_limit=self.options.in_flight_bytes,
            rate_bps=self.options.rate_bps,
            open_s=self.options.open_s,
            stall_s=self.options.stall_s,
            probe_s=self.options.probe_s,
            abort_s=self.options.abort_s,
        )
        self._tls = tls
        self._workers = workers
        self.checksums = self.options.checksums and tls is None
        self._budget = budget or ConnectionBudget(self.options.connections - 1)
        self._meter = Meter(str(Address(*address)), self.clock.now())
        self._lock = threading.Lock()  # guards everything below
        self._connections: set[_SenderConnection] = set()
        self._threads: set[threading.Thread] = set()  # including those that are ending
        self._maintained = False  # a thread runs `_maintain`: only while there is work
        self._answers = True  # False: the latest attempt failed, and no connection is established

    def __enter__(self) -> TransferLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(
        self,
        grant: Grant,
        segments: Mapping[str, int],
        *,
        priority: int = HANDOFF,
        label: bytes = b"",
    ) -> Transfer:
        """Begins a granted transfer of named segments; `ready` then supplies their bytes. The label
        is passed to the owner of the receiving memory. Raises InputError, and changes nothing, when
        the transfer is under way already or the link is closed."""
        _check_segments(segments, label)
        manifest = Manifest(
            self.options.quantum_bytes,
            tuple(ManifestSegment(name, nbytes) for name, nbytes in segments.items()),
            label,
        )
        if len(encode(manifest)) > MAX_MANIFEST_BYTES:
            raise InputError(f"{len(segments)} segments do not fit into one manifest")
        if manifest.total_bytes > grant.max_bytes:
            raise InputError(
                f"the transfer has {manifest.total_bytes} bytes, "
                f"but the grant allows {grant.max_bytes}",
                fix="request a grant for as many tokens as the transfer carries",
            )
        transfer = SenderTransfer(
            transfer_key(grant.transfer_id),
            auth_of(grant.token),
            manifest,
            priority,
            self.clock.now(),
        )
        self.transfers.add(transfer)
        try:
            self._start_maintainer()
        except RuntimeError as error:  # the system has no thread left
            self.transfers.remove(transfer, str(error))
            raise TransferFailed(f"cannot start a thread: {error}") from None
        self.add_connections()
        self.wake()
        return Transfer(self, transfer)

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way, or an abort waits to be sent."""
        return self.transfers.busy

    def set_rate(self, rate_bps: float | None) -> None:
        """Changes the pacing rate of frames that have not been sent yet."""
        self.transfers.set_rate(rate_bps)

    def stats(self) -> LinkStats:
        """The link's report for the time since the last call."""
        now = self.clock.now()
        backlog = self.transfers.backlog(now, self._late_since)
        with self._lock:
            channels = [c.channel for c in self._connections if c.channel is not None]
        return self._meter.report(
            now,
            channels,
            delivery=backlog.delivery,
            backlog_bytes=backlog.pending_bytes + backlog.in_flight_bytes,
            in_flight_bytes=backlog.in_flight_bytes,
            late_since=self._late_since,
        )

    def wake(self) -> None:
        """Wakes one idle connection, if there is one, so that it takes work."""
        with self._lock:
            for connection in self._connections:
                if connection.idle:
                    connection.wake()
                    return

    def close_if_idle(self) -> bool:
        """Closes a link without transfers; it does not wait for the threads, which end soon.
        Returns False, and changes nothing, when there is a transfer."""
        if not self.transfers.close_if_idle():
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Fails unfinished transfers, without waiting for the threads, which end soon."""
        self.closing.set()
        self.transfers.close("link closed")
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.disconnect()

    def close(self) -> None:
        """Fails unfinished transfers and waits for every thread. Idempotent."""
        self.stop()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout=self.options.connect_s + self.options.silence_s)

    @property
    def ended(self) -> bool:
        """Whether the link is closed and its threads have ended."""
        with self._lock:
            alive = any(thread.is_alive() for thread in self._threads)
        return self.closing.is_set() and not alive

    def connect(self, abandoned: Callable[[], bool]) -> Channel | WorkerChannel:
        worker = self._workers.take() if self._workers is not None else None
        try:
            tls = self._tls if worker is None else None
            sock = _connect(self.address, self.options, tls, abandoned)
        except BaseException:
            if worker is not None:
                worker.leave()
            raise
        if worker is None or self._workers is None:
            options = self.options
            return Channel(sock, self.clock, options.silence_s, send_files=options.send_files)
        serve = Serve(
            side="sender",
            tls=None if self._tls is None else "client",
            server_name=self.options.tls_name or self.address[0],
            handshake_s=self.options.connect_s,
            silence_s=self.options.silence_s,
            send_files=self.options.send_files,
        )
        try:
            return WorkerChannel(self._workers, worker, sock, serve, self.clock)
        except PeerError as error:
            sock.close()
            raise ConnectionLost(f"{Address(*self.address)}: {error}") from None

    def mark_established(self, connection: _SenderConnection) -> None:
        """The receiver has answered on this connection."""
        with self._lock:
            connection.established = True
            self._answers = True
        self.add_connections()

    def mark_failed(self) -> bool:
        """An attempt to connect has failed. Returns whether another connection is established."""
        with self._lock:
            self._answers = any(connection.established for connection in self._connections)
            return self._answers

    def remove(self, connection: _SenderConnection) -> None:
        """Called when a connection's thread ends."""
        with self._lock:
            self._connections.discard(connection)
        if connection.extra:
            self._budget.give_back()

    def add_connections(self) -> None:
        """Opens connections up to the configured number, within the budget. The budget does not
        limit the first one. While the receiver does not answer, there is only the first one."""
        with self._lock:
            while len(self._connections) < self.options.connections:
                if self.closing.is_set():
                    return
                extra = bool(self._connections)
                if extra and not (self._answers and self._budget.take()):
                    return
                try:
                    connection = _SenderConnection(self, extra)
                except OSError as error:  # out of descriptors: the maintainer tries again
                    self._give_up(extra, str(error))
                    return
                try:
                    connection.thread.start()
                except RuntimeError as error:  # out of threads
                    connection.close_wakeups()
                    self._give_up(extra, str(error))
                    return
                self._connections.add(connection)
                self._threads.add(connection.thread)

    def _give_up(self, extra: bool, why: str) -> None:
        if extra:
            self._budget.give_back()
        self.transfers.record_error(f"cannot open a connection: {why}")

    def _start_maintainer(self) -> None:
        with self._lock:
            if not self._maintained and not self.closing.is_set():
                thread = threading.Thread(target=self._maintain, name="prfaas-link", daemon=True)
                thread.start()
                self._threads.add(thread)
                self._maintained = True

    def _maintain(self) -> None:
        """Runs until there is neither work nor a connection."""
        while True:
            self.closing.wait(TICK_S)
            self.transfers.fail_stalled(self.clock.now())
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                # Under the lock: a transfer that is added after this check finds no maintainer and
                # starts another one.
                busy = self.transfers.busy
                if self.closing.is_set() or not (busy or self._connections):
                    self._maintained = False
                    return
            if busy:
                self.add_connections()


def _check_segments(segments: Mapping[str, int], label: bytes) -> None:
    """Raises InputError for what a receiver would refuse as a broken manifest."""
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        raise InputError(
            f"the transfer has {len(segments)} segments", fix=f"give 1 to {MAX_SEGMENTS}"
        )
    for name, nbytes in segments.items():
        if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
            raise InputError(
                f"a segment's name has {len(name)} characters",
                fix=f"give 1 to {MAX_NAME_CHARACTERS}",
            )
        if nbytes < 1:
            raise InputError(f"the segment has {nbytes} bytes", where=name, fix="leave it out")
    if len(label) > MAX_LABEL_BYTES:
        raise InputError(
            f"the label has {len(label)} bytes", where="label", fix=f"give up to {MAX_LABEL_BYTES}"
        )


def _connect(
    address: tuple[str, int],
    options: LinkOptions,
    tls: Callable[[], ssl.SSLContext] | None,
    abandoned: Callable[[], bool],
) -> socket.socket:
    try:
        context = None if tls is None else tls()
    except (PrfaasError, OSError) as error:
        raise ConnectionLost(f"{Address(*address)}: TLS: {error}") from None
    return connect(
        address,
        timeout_s=options.connect_s,
        tls=context,
        tls_name=options.tls_name,
        congestion_control=options.congestion_control,
        buffer_bytes=options.buffer_bytes,
        abandoned=abandoned,
    )


def send_frame(
    channel: Channel | WorkerChannel,
    head: bytearray,
    ranges: list[FileRange],
    views: Callable[[], list[memoryview]],
    nbytes: int,
    *,
    checked: bool,
    meanwhile: Callable[[], None],
) -> None:
    """Sends a frame: `head`, which gets its checksum, and `nbytes` of payload, which lie in files
    (`ranges`) or, where these are empty, only in `views`."""
    if isinstance(channel, WorkerChannel) and ranges:
        channel.send_frame(head, ranges, checked=checked, meanwhile=meanwhile)
        return
    payload = views()
    if checked:
        seal(head, payload)
    if isinstance(channel, Channel) and ranges and channel.can_send_files:
        channel.send_files(memoryview(head), ranges, meanwhile)
    else:
        channel.send([memoryview(head), *payload], len(head) + nbytes, meanwhile)


class _SenderConnection:
    """One connection and its thread: it sends pending work and reads the responses."""

    def __init__(self, link: TransferLink, extra: bool) -> None:
        self._link = link
        self._transfers = link.transfers
        self._responses = link.transfers.responses
        self.extra = extra
        self.idle = False
        self.established = False  # the receiver has answered
        self.channel: Channel | WorkerChannel | None = None
        self._sent: dict[tuple[bytes, int, Kind], Work] = {}  # not answered yet
        # Frames sent from a file and not answered: the kernel, or a worker process, may still read
        # those pages.
        self._in_kernel: set[tuple[bytes, int]] = set()
        # Transfers that have ended and have frames in `_sent`: when this was first seen.
        self._ended_s: dict[bytes, float] = {}
        self._checked_s = 0.0
        # When the unanswered OPEN and PROBE messages were sent.
        self._sent_s: dict[tuple[bytes, Kind], float] = {}
        self._decoder = Decoder()
        self._received_s = 0.0
        self._frame_size = FrameSize(link.options)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self.thread = threading.Thread(target=self._run, name="prfaas-connection", daemon=True)

    def wake(self) -> None:
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            pass  # it is awake already, or closed

    def disconnect(self) -> None:
        """Makes the thread end soon. Any thread may call it."""
        self.wake()
        channel = self.channel
        if channel is not None:
            channel.interrupt()

    def close_wakeups(self) -> None:
        self._wake_receiver.close()
        self._wake_sender.close()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._abandoned():
                answered = False
                try:
                    self.channel = channel = self._link.connect(self._abandoned)
                    self._handshake(channel)
                    failures, answered = 0, True
                    self._link.mark_established(self)
                    self._serve(channel)
                    return
                except (ConnectionLost, WireError) as error:
                    failures += 1
                    self._transfers.record_error(str(error))
                    log.debug("connection to %s: %s", Address(*self._link.address), error)
                finally:
                    self.established = False
                    self._drop_channel()
                if self._abandoned():
                    return
                if not answered and not self._link.mark_failed() and self.extra:
                    return  # the first connection keeps trying; this one's budget serves others
                self._back_off(failures)
        finally:
            self._link.remove(self)
            self.close_wakeups()

    def _abandoned(self) -> bool:
        """Whether nothing needs this connection any more."""
        return self._link.closing.is_set() or not self._transfers.busy

    def _back_off(self, failures: int) -> None:
        # Half of the backoff is random: connections that broke together do not reconnect together.
        backoff_s = min(0.05 * 2 ** min(failures, 10), _MAX_BACKOFF_S)
        left_s = backoff_s * (0.5 + random.random() / 2)
        while left_s > 0 and not self._abandoned():
            self._link.closing.wait(min(left_s, TICK_S))
            left_s -= TICK_S

    def _handshake(self, channel: Channel | WorkerChannel) -> None:
        hello = encode_message(Kind.HELLO, encode(HELLO))
        channel.send([memoryview(hello)], len(hello))
        decoder = Decoder()
        deadline_s = self._link.clock.now() + self._link.options.connect_s
        while True:
            left_s = deadline_s - self._link.clock.now()
            if left_s <= 0:
                raise ConnectionLost("connected, but the peer does not answer HELLO")
            if self._abandoned():
                raise ConnectionLost("the connection is no longer needed")
            if channel.wait(min(left_s, TICK_S)):
                for frame in decoder.feed(channel.receive_available()):
                    if frame.header.kind is not Kind.WELCOME:
                        raise WireError(f"the peer answered HELLO with {frame.header.kind.name}")
                    decode(frame.body, Hello)
                    return

    def _serve(self, channel: Channel | WorkerChannel) -> None:
        """Sends and receives until the connection has been idle for a while. Raises ConnectionLost
        or WireError."""
        clock, options = self._link.clock, self._link.options
        channel.watch(self._wake_receiver)
        self._decoder = Decoder()
        self._received_s = worked_s = clock.now()
        proof = self._transfers.take_proof(worked_s)
        if proof is not None:
            self._send(channel, proof)
        elif not self._transfers.busy:
            return
        del proof  # it would keep its transfer for as long as the connection
        while not self._link.closing.is_set():
            now = clock.now()
            self.idle = True  # before `take`: work that arrives after `take` then wakes this thread
            work = self._transfers.take(now, self._frame_size.nbytes)
            if isinstance(work, NoWork):
                readable = channel.wait(min(work.wait_s, TICK_S))
                self.idle = False
                if now - worked_s >= options.idle_s and not self._sent:
                    if not self._transfers.busy:
                        return
                    worked_s = now
            else:
                self.idle = False
                worked_s = now
                self._send(channel, work)
                self._link.wake()  # there may be more work than one connection can carry
                readable = channel.wait(0)
            if self._wake_receiver.fileno() in readable:
                self._clear_wakeups()
            if channel.fileno() in readable:
                self._receive_responses(channel)
            self._check_ended(now)
            if not self._sent:
                self._received_s = now
            elif now - self._received_s >= options.silence_s:
                raise ConnectionLost(f"the peer did not answer for {options.silence_s:g} s")

    def _receive_responses(self, channel: Channel | WorkerChannel) -> None:
        data = channel.receive_available()
        if data:  # a worker reports about itself, too
            for frame in self._decoder.feed(data):
                self._handle_response(frame)
            self._received_s = self._link.clock.now()

    def _send(self, channel: Channel | WorkerChannel, work: Work) -> None:
        transfer = work.transfer

        def receive_meanwhile() -> None:
            # The receiver answers a slow frame while it is being sent: it reports how much of this
            # frame and of earlier ones has arrived.
            if channel.fileno() in channel.wait(0):
                self._receive_responses(channel)
            self._check_ended(self._link.clock.now())

        def send(kind: Kind, body: bytes = b"") -> None:
            whole = encode_message(kind, body, transfer_id=transfer.transfer_id, auth=transfer.auth)
            channel.send([memoryview(whole)], len(whole))

        by_file = False
        try:
            match work:
                case SendFrame(_, frame):
                    self._sent[transfer.transfer_id, frame.sequence, Kind.ACK] = work
                    by_file = bool(frame.ranges) and channel.can_send_files
                    if by_file:
                        self._in_kernel.add((transfer.transfer_id, frame.sequence))
                    began_s = self._link.clock.now()
                    self._send_frame(channel, work, receive_meanwhile)
                    self._frame_size.record(frame.nbytes, self._link.clock.now() - began_s)
                case SendOpen():
                    self._sent[transfer.transfer_id, 0, Kind.OPENED] = work
                    self._sent_s[transfer.transfer_id, Kind.OPENED] = self._link.clock.now()
                    send(Kind.OPEN, encode(transfer.manifest))
                case SendProbe():
                    self._sent[transfer.transfer_id, 0, Kind.ALIVE] = work
                    self._sent_s[transfer.transfer_id, Kind.ALIVE] = self._link.clock.now()
                    send(Kind.PROBE)
                case SendAbort(_, reason):
                    send(Kind.ABORT, encode(Reason(reason[:1000])))
        finally:
            if not by_file:
                self._transfers.release(transfer)

    def _send_frame(
        self, channel: Channel | WorkerChannel, work: SendFrame, meanwhile: Callable[[], None]
    ) -> None:
        transfer, frame, checked = work.transfer, work.frame, self._link.checksums
        head = encode_data_head(
            frame.pieces,
            sequence=frame.sequence,
            transfer_id=transfer.transfer_id,
            auth=transfer.auth,
            checked=checked,
        )
        send_frame(
            channel,
            head,
            frame.ranges,
            frame.views,
            frame.nbytes,
            checked=checked,
            meanwhile=meanwhile,
        )

    def _handle_response(self, frame: Frame) -> None:
        header, now = frame.header, self._link.clock.now()
        transfer_id = header.transfer_id
        if header.kind is Kind.ACK:
            for sequence in parse_sequences(frame.body):
                if self._settle(transfer_id, sequence, Kind.ACK) is not None:
                    self._responses.on_acknowledged(transfer_id, sequence, now)
        elif header.kind is Kind.PROGRESS:
            nbytes = parse_progress(frame.body)
            if (transfer_id, header.sequence, Kind.ACK) in self._sent:
                self._responses.on_progress(transfer_id, header.sequence, nbytes, now)
        elif header.kind is Kind.NACK:
            work = self._settle(transfer_id, header.sequence, Kind.ACK)
            if work is not None:
                self._transfers.mark_lost(work)
        elif header.kind is Kind.ENDED:
            # ENDED answers this frame; the transfer's other frames are answered one by one.
            for expected in (Kind.ACK, Kind.OPENED, Kind.ALIVE):
                self._settle(transfer_id, header.sequence, expected)
            self._responses.on_ended(transfer_id, decode(frame.body, Ended), now)
        elif self._settle(transfer_id, header.sequence, header.kind) is None:
            pass  # the transfer has ended in the meantime
        else:
            round_trip_s = now - self._sent_s.pop((transfer_id, header.kind), now)
            self._responses.on_round_trip(round_trip_s, now)
            if header.kind is Kind.OPENED:
                self._responses.on_opened(transfer_id, now)
            elif header.kind is Kind.ALIVE:
                self._responses.on_alive(transfer_id, now)

    def _check_ended(self, now: float) -> None:
        """Raises ConnectionLost when a transfer has ended and its frames on this connection stay
        unanswered: its owner waits for the memory that they are sent from. A peer that answers
        other frames, or that accepts a frame byte by byte, is not silent."""
        if now - self._checked_s < TICK_S:
            return
        self._checked_s = now
        ended = {
            w.transfer.transfer_id for w in self._sent.values() if w.transfer.ended is not None
        }
        self._ended_s = {one: self._ended_s.get(one, now) for one in ended}
        silence_s = self._link.options.silence_s
        if any(now - since_s >= silence_s for since_s in self._ended_s.values()):
            raise ConnectionLost(f"frames of an ended transfer: no answer for {silence_s:g} s")

    def _settle(self, transfer_id: bytes, sequence: int, expected: Kind) -> Work | None:
        """Returns the answered work, if any. The kernel no longer reads the bytes of that work."""
        work = self._sent.pop((transfer_id, sequence, expected), None)
        if work is not None and (transfer_id, sequence) in self._in_kernel:
            self._in_kernel.remove((transfer_id, sequence))
            self._transfers.release(work.transfer)
        return work

    def _drop_channel(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close(discard_unsent=bool(self._in_kernel))
        lost, self._sent = self._sent, {}
        self._sent_s.clear()
        for work in lost.values():
            self._transfers.mark_lost(work)
        for (transfer_id, sequence, kind), work in lost.items():
            if kind is Kind.ACK and (transfer_id, sequence) in self._in_kernel:
                self._transfers.release(work.transfer)
        self._in_kernel.clear()
        if lost:
            self._link.wake()

    def _clear_wakeups(self) -> None:
        try:
            self._wake_receiver.recv(4096)
        except BlockingIOError:
            pass
