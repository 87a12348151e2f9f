"""The sending end: long-lived connections to one receiver, shared by all transfers to it.

Each connection has a thread that takes the next frame there is: striping follows from whoever is
free, so a slow connection slows only what it carries. Frames of a connection that breaks are
pending again at once, for any other; the broken one comes back after a growing pause. Connections
are made when there is work and closed when there has been none for a while.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import ConnectionLost, InputError, WireError
from prfaas.lateness import LateSince, never_late
from prfaas.transport.buffers import FileSlice
from prfaas.transport.channel import TICK_S, Channel, connect
from prfaas.transport.grants import transfer_key
from prfaas.transport.messages import (
    HELLO,
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
    Nothing,
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
    encode_data,
    encode_message,
    parse_progress,
    parse_sequences,
)
from prfaas.types import Grant, LinkStats

log = logging.getLogger(__name__)

HANDOFF, MIGRATION = 0, 1  # priorities: a request waits for the first, nobody for the second
_LONGEST_PAUSE_S = 5.0
_READY_AT_ONCE = 1_000  # segments taken in before connections may look again


@dataclass(frozen=True, slots=True)
class LinkOptions:
    connections: int = 4
    frame_bytes: int = 4 << 20  # at most; a connection that is slow sends smaller ones
    quantum_bytes: int = 1 << 20  # what is acknowledged, and sent again, as a whole
    checksums: bool = True  # of payloads; TLS authenticates every byte, and goes without
    rate_bps: float | None = None  # pacing; None: as fast as it goes
    in_flight_bytes: int = 256 << 20  # sent and not yet acknowledged
    connect_s: float = 5.0
    open_s: float = 10.0  # a transfer that the receiver has not opened by then has failed
    silence_s: float = 10.0  # a connection on which a frame is not answered by then is broken
    stall_s: float = 30.0  # a transfer of which nothing is acknowledged for so long has failed
    probe_s: float = 2.0  # how often a transfer with nothing to send says that it lives
    idle_s: float = 60.0  # a connection without work is closed after this
    congestion_control: str | None = None  # "bbr" where the kernel has it; None: its default
    buffer_bytes: int | None = None  # None: the kernel sizes socket buffers itself
    tls_name: str | None = None  # what the receiver's certificate must name; None: the address


class ConnectionBudget:
    """Connections that all links of a host may have beyond the first of each."""

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
    """Large frames cost less on a fast connection; on a slow one they hold up what is urgent, and
    what is acknowledged. A frame should take a few milliseconds."""

    _SHORT_S, _LONG_S = 5e-3, 25e-3

    def __init__(self, options: LinkOptions) -> None:
        self._most = min(options.frame_bytes, MAX_PAYLOAD_BYTES - options.quantum_bytes)
        self._least = min(options.quantum_bytes, self._most)
        self.nbytes = self._least

    def took(self, nbytes: int, seconds: float) -> None:
        if seconds > self._LONG_S:
            self.nbytes = max(self._least, self.nbytes // 2)
        elif seconds < self._SHORT_S and nbytes >= self.nbytes:
            self.nbytes = min(self._most, self.nbytes * 2)


class Transfer:
    """One granted transfer, for the owner of its bytes."""

    def __init__(self, link: TransferLink, outgoing: SenderTransfer) -> None:
        self._link = link
        self._outgoing = outgoing

    @property
    def done(self) -> Future[None]:
        """Set when the receiver has committed, TransferFailed otherwise; nothing reads the bytes
        any more then. From asyncio: `await asyncio.wrap_future(transfer.done)`."""
        return self._outgoing.done

    @property
    def opened(self) -> bool:
        """The receiver has accepted the manifest; bytes may flow."""
        return self._outgoing.opened

    @property
    def acknowledged_bytes(self) -> int:
        return self._outgoing.acknowledged_bytes

    def ready(self, name: str, *parts: memoryview | FileSlice) -> None:
        """A segment's bytes are final, and stay as they are until `done`. In any order. Bytes that
        are a file's (`FileSlice`: an arena's) leave without being copied on this side."""
        self.ready_all({name: parts})

    def ready_all(self, segments: Mapping[str, Sequence[memoryview | FileSlice]]) -> None:
        """Several at once, as when a chunk of many layers is done."""
        several = iter(segments.items())
        while some := dict(islice(several, _READY_AT_ONCE)):
            self._link.departures.ready(self._outgoing, some, self._link.clock.now())
            self._link.wake()

    def abort(self, reason: str) -> None:
        """Gives up, and tells the receiver. A no-op once done."""
        self._link.departures.abort(self._outgoing, reason)
        self._link.wake()


class TransferLink:
    def __init__(
        self,
        address: tuple[str, int],
        *,
        options: LinkOptions | None = None,
        tls: ssl.SSLContext | None = None,
        budget: ConnectionBudget | None = None,
        clock: Clock | None = None,
        late_since: LateSince = never_late,
    ) -> None:
        """`late_since`: how late this process was, so that its delays are not taken for the
        path's."""
        self.address = address
        self.options = options or LinkOptions()
        self.clock = clock or MonotonicClock()
        self._late_since = late_since
        self.closing = threading.Event()
        self.departures = SenderTransfers(
            in_flight_limit=self.options.in_flight_bytes,
            rate_bps=self.options.rate_bps,
            open_s=self.options.open_s,
            stall_s=self.options.stall_s,
            probe_s=self.options.probe_s,
        )
        self._tls = tls
        self.checksums = self.options.checksums and tls is None
        self._budget = budget or ConnectionBudget(self.options.connections - 1)
        self._meter = Meter(f"{address[0]}:{address[1]}", self.clock.now())
        self._lock = threading.Lock()  # of the two sets below
        self._connections: set[_SenderConnection] = set()
        self._threads: set[threading.Thread] = set()  # theirs, also while they end
        self._keeper = threading.Thread(target=self._keep, name="prfaas-link", daemon=True)
        self._keeper.start()

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
        """Begins a granted transfer of named segments; their bytes follow with `ready`. The
        receiver's owner is shown the label."""
        manifest = Manifest(
            self.options.quantum_bytes,
            tuple(ManifestSegment(name, nbytes) for name, nbytes in segments.items()),
            label,
        )
        if len(encode(manifest)) > MAX_MANIFEST_BYTES:
            raise InputError(f"{len(segments)} segments are more than one transfer can list")
        if manifest.total_bytes > grant.max_bytes:
            raise InputError(
                f"{manifest.total_bytes} bytes, granted are {grant.max_bytes}",
                fix="open the transfer for as many tokens as it will carry",
            )
        if self.closing.is_set():
            raise InputError("this link is closed")
        outgoing = SenderTransfer(
            transfer_key(grant.transfer_id),
            auth_of(grant.token),
            manifest,
            priority,
            self.clock.now(),
        )
        self.departures.add(outgoing)
        self._staff()
        self.wake()
        return Transfer(self, outgoing)

    def pace(self, rate_bps: float | None) -> None:
        """Changes the rate for what has not been sent yet."""
        self.departures.pace(rate_bps)

    def stats(self) -> LinkStats:
        """What has happened since the last call."""
        now = self.clock.now()
        backlog = self.departures.backlog(now, self._late_since)
        with self._lock:
            channels = [c.channel for c in self._connections if c.channel is not None]
        return self._meter.report(
            now,
            channels,
            delivered=backlog.delivered,
            backlog_bytes=backlog.pending_bytes + backlog.in_flight_bytes,
            in_flight_bytes=backlog.in_flight_bytes,
            late_since=self._late_since,
        )

    def wake(self) -> None:
        """Some connection that has nothing to do looks again."""
        with self._lock:
            for connection in self._connections:
                if connection.idle:
                    connection.poke()
                    return

    def close(self) -> None:
        """Fails what is under way and waits for every thread. Idempotent."""
        self.closing.set()
        self._keeper.join(timeout=2 * TICK_S + 1)  # it makes connections: none come after it
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.hang_up()
        for thread in threads:
            thread.join(timeout=self.options.connect_s + self.options.silence_s)
        self.departures.fail_all("link closed")

    def connect(self) -> Channel:
        sock = connect(
            self.address,
            timeout_s=self.options.connect_s,
            tls=self._tls,
            tls_name=self.options.tls_name,
            congestion_control=self.options.congestion_control,
            buffer_bytes=self.options.buffer_bytes,
        )
        return Channel(sock, self.clock, self.options.silence_s)

    def leave(self, connection: _SenderConnection) -> None:
        """A connection's thread ends."""
        with self._lock:
            self._connections.discard(connection)
        if connection.extra:
            self._budget.give_back()

    def _staff(self) -> None:
        """As many connections as wanted, within the budget; the first is always allowed."""
        with self._lock:
            while len(self._connections) < self.options.connections:
                extra = bool(self._connections)
                if extra and not self._budget.take():
                    return
                connection = _SenderConnection(self, extra)
                self._connections.add(connection)
                self._threads.add(connection.thread)
                connection.thread.start()

    def _keep(self) -> None:
        while not self.closing.wait(TICK_S):
            self.departures.fail_stalled(self.clock.now())
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
            if self.departures.busy:
                self._staff()


class _SenderConnection:
    """One connection and its thread: sends what there is, reads the answers."""

    def __init__(self, link: TransferLink, extra: bool) -> None:
        self._link = link
        self._departures = link.departures
        self.extra = extra
        self.idle = False
        self.channel: Channel | None = None
        self._sent: dict[tuple[bytes, int, Kind], Work] = {}  # not answered yet
        # Sent from a file and not answered: the kernel may still read those pages.
        self._in_kernel: set[tuple[bytes, int]] = set()
        self._asked_s: dict[tuple[bytes, Kind], float] = {}  # messages of no size, not answered yet
        self._decoder = Decoder()
        self._heard_s = 0.0
        self._frame_size = FrameSize(link.options)
        self._poked, self._poke = socket.socketpair()
        self._poked.setblocking(False)
        self._poke.setblocking(False)
        self.thread = threading.Thread(target=self._run, name="prfaas-connection", daemon=True)

    def poke(self) -> None:
        try:
            self._poke.send(b"\0")
        except OSError:
            pass  # poked already, or closed

    def hang_up(self) -> None:
        self.poke()
        channel = self.channel
        if channel is not None:
            channel.close(forget=True)

    def _run(self) -> None:
        failures = 0
        try:
            while not self._link.closing.is_set():
                try:
                    self.channel = channel = self._link.connect()
                    self._greet(channel)
                    failures = 0
                    self._serve(channel)
                    return
                except (ConnectionLost, WireError) as error:
                    failures += 1
                    self._departures.trouble(str(error))
                    log.debug("connection to %s: %s", self._link.address, error)
                finally:
                    self._drop_channel()
                if not self._departures.busy:
                    return
                # Half at random: connections that broke together do not come back together.
                pause_s = min(0.05 * 2 ** min(failures, 10), _LONGEST_PAUSE_S)
                self._link.closing.wait(pause_s * (0.5 + random.random() / 2))
        finally:
            self._link.leave(self)
            self._poked.close()
            self._poke.close()

    def _greet(self, channel: Channel) -> None:
        hello = encode_message(Kind.HELLO, encode(HELLO))
        channel.send([memoryview(hello)], len(hello))
        decoder = Decoder()
        deadline_s = self._link.clock.now() + self._link.options.connect_s
        while True:
            left_s = deadline_s - self._link.clock.now()
            if left_s <= 0:
                raise ConnectionLost("connected, but the other side does not answer HELLO")
            if channel.wait(left_s):
                for frame in decoder.feed(channel.receive_available()):
                    if frame.header.kind is not Kind.WELCOME:
                        raise WireError(f"a {frame.header.kind.name} in answer to HELLO")
                    decode(frame.body, Hello)
                    return

    def _serve(self, channel: Channel) -> None:
        """Until there has been no work for a while, or ConnectionLost, or WireError."""
        clock, options = self._link.clock, self._link.options
        channel.watch(self._poked)
        self._decoder = Decoder()
        self._heard_s = worked_s = clock.now()
        while not self._link.closing.is_set():
            now = clock.now()
            self.idle = True  # before looking: work that comes after the look then pokes us
            work = self._departures.take(now, self._frame_size.nbytes)
            if isinstance(work, Nothing):
                readable = channel.wait(min(work.wait_s, TICK_S))
                self.idle = False
                if now - worked_s >= options.idle_s and not self._sent:
                    if not self._departures.busy:
                        return
                    worked_s = now
            else:
                self.idle = False
                worked_s = now
                self._send(channel, work)
                self._link.wake()  # there may be more than one connection can carry
                readable = channel.wait(0)
            if self._poked.fileno() in readable:
                self._swallow_pokes()
            if channel.fileno() in readable:
                self._hear(channel)
            elif not self._sent:
                self._heard_s = now
            elif now - self._heard_s >= options.silence_s:
                raise ConnectionLost(f"no answer for {options.silence_s:g} s")

    def _hear(self, channel: Channel) -> None:
        for frame in self._decoder.feed(channel.receive_available()):
            self._answered(frame)
        self._heard_s = self._link.clock.now()

    def _send(self, channel: Channel, work: Work) -> None:
        transfer = work.transfer

        def hear_meanwhile() -> None:
            # A frame that leaves slowly is answered while it leaves: the receiver says how much of
            # it, and of those before it, has arrived.
            if channel.fileno() in channel.wait(0):
                self._hear(channel)

        def send(kind: Kind, body: bytes = b"") -> None:
            whole = encode_message(kind, body, transfer_id=transfer.transfer_id, auth=transfer.auth)
            channel.send([memoryview(whole)], len(whole))

        by_file = False
        try:
            match work:
                case SendFrame(_, frame):
                    self._sent[transfer.transfer_id, frame.sequence, Kind.ACK] = work
                    head = encode_data(
                        frame.pieces,
                        frame.views,
                        sequence=frame.sequence,
                        transfer_id=transfer.transfer_id,
                        auth=transfer.auth,
                        checked=self._link.checksums,
                    )
                    by_file = bool(frame.ranges) and channel.can_send_files
                    began_s = self._link.clock.now()
                    if by_file:
                        self._in_kernel.add((transfer.transfer_id, frame.sequence))
                        channel.send_files(memoryview(head), frame.ranges, hear_meanwhile)
                    else:
                        views = [memoryview(head), *frame.views]
                        channel.send(views, len(head) + frame.nbytes, hear_meanwhile)
                    self._frame_size.took(frame.nbytes, self._link.clock.now() - began_s)
                case SendOpen():
                    self._sent[transfer.transfer_id, 0, Kind.OPENED] = work
                    self._asked_s[transfer.transfer_id, Kind.OPENED] = self._link.clock.now()
                    send(Kind.OPEN, encode(transfer.manifest))
                case SendProbe():
                    self._sent[transfer.transfer_id, 0, Kind.ALIVE] = work
                    self._asked_s[transfer.transfer_id, Kind.ALIVE] = self._link.clock.now()
                    send(Kind.PROBE)
                case SendAbort(_, reason):
                    send(Kind.ABORT, encode(Reason(reason[:1000])))
        finally:
            if not by_file:
                self._departures.left(transfer)

    def _answered(self, frame: Frame) -> None:
        header, now = frame.header, self._link.clock.now()
        transfer_id = header.transfer_id
        if header.kind is Kind.ACK:
            for sequence in parse_sequences(frame.body):
                if self._settle(transfer_id, sequence, Kind.ACK) is not None:
                    self._departures.acknowledged(transfer_id, sequence, now)
        elif header.kind is Kind.PROGRESS:
            nbytes = parse_progress(frame.body)
            if (transfer_id, header.sequence, Kind.ACK) in self._sent:
                self._departures.progressed(transfer_id, header.sequence, nbytes, now)
        elif header.kind is Kind.NACK:
            work = self._settle(transfer_id, header.sequence, Kind.ACK)
            if work is not None:
                self._departures.lost(work)
        elif header.kind is Kind.ENDED:
            # Of this frame; the transfer's others on this connection are answered one by one.
            for expected in (Kind.ACK, Kind.OPENED, Kind.ALIVE):
                self._settle(transfer_id, header.sequence, expected)
            self._departures.ended(transfer_id, decode(frame.body, Ended), now)
        elif self._settle(transfer_id, header.sequence, header.kind) is None:
            pass  # of a transfer that has ended meanwhile
        else:
            self._departures.answered(now - self._asked_s.pop((transfer_id, header.kind), now), now)
            if header.kind is Kind.OPENED:
                self._departures.opened(transfer_id, now)
            elif header.kind is Kind.ALIVE:
                self._departures.alive(transfer_id, now)

    def _settle(self, transfer_id: bytes, sequence: int, expected: Kind) -> Work | None:
        """What was answered; the kernel holds its bytes no more."""
        work = self._sent.pop((transfer_id, sequence, expected), None)
        if work is not None and (transfer_id, sequence) in self._in_kernel:
            self._in_kernel.remove((transfer_id, sequence))
            self._departures.left(work.transfer)
        return work

    def _drop_channel(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close(forget=bool(self._in_kernel))
        lost, self._sent = self._sent, {}
        self._asked_s.clear()
        for work in lost.values():
            self._departures.lost(work)
        for (transfer_id, sequence, kind), work in lost.items():
            if kind is Kind.ACK and (transfer_id, sequence) in self._in_kernel:
                self._departures.left(work.transfer)
        self._in_kernel.clear()
        if lost:
            self._link.wake()

    def _swallow_pokes(self) -> None:
        try:
            self._poked.recv(4096)
        except BlockingIOError:
            pass
