"""A connection whose bytes a worker moves, used like a `Channel`.

The thread of a connection gives orders and waits for reports. It keeps its own descriptor of the
TCP socket: it shuts the connection down without the worker's help. Memory that the worker reads or
writes is not given back before the worker has reported the end, or is dead.
"""

from __future__ import annotations

import math
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost, WireError
from prfaas.transport.buffers import DISCARDED, FileRange
from prfaas.transport.channel import TICK_S, shut_down
from prfaas.transport.wire import HEADER_BYTES
from prfaas.transport.workers.messages import (
    MAX_RANGES,
    PACKET_BYTES,
    PART_BYTES,
    Body,
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
    read_report,
)
from prfaas.transport.workers.pool import WorkerPool
from prfaas.transport.workers.process import WorkerProcess

_END_S = 5.0  # for the worker to report the end of a connection that was shut down
_MAX_INPUTS = 64  # parts of PART_BYTES
_TIMEVAL = struct.Struct("@ll")
T = TypeVar("T", bound=Report)


class WorkerChannel:
    """Not thread-safe: one thread at a time sends and receives. Any thread may call `interrupt`."""

    def __init__(
        self,
        pool: WorkerPool,
        worker: WorkerProcess,
        sock: socket.socket,
        serve: Serve,
        clock: Clock,
    ) -> None:
        """Returns when the TLS handshake, if any, is complete. Raises PeerError; the caller closes
        `sock` then, and otherwise `close` does."""
        self._pool = pool
        self._worker = worker
        self._sock = sock
        self._clock = clock
        self.until_s = clock.now() + serve.handshake_s + serve.silence_s
        self._input: deque[bytes] = deque()  # what the peer of a sender has sent
        self._head: memoryview | None = None  # a frame that arrives: the rest of header and table
        self._ended = False
        self._orders = worker.serve(serve, sock, pool.credentials())
        self._orders.setblocking(True)
        tick = _TIMEVAL.pack(int(TICK_S), int(TICK_S % 1 * 1e6))
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        self._packet = memoryview(bytearray(PACKET_BYTES))
        self._reports = select.poll()
        self._reports.register(self._orders, select.POLLIN)
        self._poll = select.poll()
        self._poll.register(self._orders, select.POLLIN)
        try:
            self._expect(Started)
        except BaseException:
            self._end()
            raise
        self.until_s = math.inf

    # As in `Channel` ------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Of the socket that is readable when the peer has sent something."""
        return self._orders.fileno()

    def option(self, level: int, name: int, nbytes: int) -> bytes:
        try:
            return self._sock.getsockopt(level, name, nbytes)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the connection broke: {error}") from None

    def watch(self, other: socket.socket) -> None:
        self._poll.register(other, select.POLLIN)

    def wait(self, timeout_s: float) -> set[int]:
        if self._input or self._head is not None:
            return {self.fileno()}
        try:
            return {fd for fd, _ in self._poll.poll(timeout_s * 1e3)}
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"the connection was closed: {error}") from None

    @property
    def can_send_files(self) -> bool:
        """True, also with TLS: the worker reads them (`send_frame`)."""
        return True

    def send(
        self,
        views: list[memoryview],
        nbytes: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Sends small frames. The bytes of larger ones take the way through this process, too."""
        for view in views:
            for at in range(0, view.nbytes, PART_BYTES):
                self._order(SendBytes(bytes(view[at : at + PART_BYTES])))
                if meanwhile is not None:
                    meanwhile()

    def send_frame(
        self,
        head: bytearray,
        ranges: Sequence[FileRange],
        *,
        checked: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        """Sends a DATA frame whose payload lies in files. The worker sets the checksum. The worker
        or the kernel may read the files until the frame is answered, or until `close`."""
        parts = self._ranges(ranges)
        self._order(SendFrame(bytes(head), parts, checked))
        self._expect(Sent, lambda _: meanwhile())

    def receive(
        self,
        views: list[memoryview],
        nbytes: int,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        """Fills the views with a table or a body, or with a payload for memory that is not in a
        file: those bytes take the way through this process."""
        arrived = 0
        for view in views:
            at = 0
            while at < view.nbytes:
                part = self._next_part(view.nbytes - at)
                view[at : at + part.nbytes] = part
                at += part.nbytes
                arrived += part.nbytes
                if meanwhile is not None and arrived < nbytes:
                    meanwhile(arrived)

    def receive_payload(
        self, targets: Sequence[FileRange], meanwhile: Callable[[int], None]
    ) -> bool:
        """The rest of a DATA frame goes into files. Returns whether the frame's checksum matches.
        Also when it raises, the worker does not write to the files any more."""
        parts = self._ranges(targets)
        try:
            for at in range(0, len(parts), MAX_RANGES):
                some = parts[at : at + MAX_RANGES]
                self._order(ReceivePayload(some, last=at + MAX_RANGES >= len(parts)))
            return self._expect(Received, meanwhile).verified
        except BaseException:
            self._end()
            raise

    def receive_if_any(self, view: memoryview, *, wait: bool) -> bool:
        """Fills `view` with the next frame's header. Returns False when none has arrived (with
        `wait`: within a tick)."""
        assert view.nbytes == HEADER_BYTES
        if self._head is None and not self._read_report(TICK_S if wait else 0.0):
            return False
        return self._take_head(view)

    def receive_available(self, limit: int = PART_BYTES) -> bytes:
        """What the peer has sent. Call this only after `wait` reported the socket."""
        if not self._input:
            self._read_report(0.0)
        return self._input.popleft() if self._input else b""

    def interrupt(self) -> None:
        shut_down(self._sock)

    def close(self, *, discard_unsent: bool = False) -> None:
        """Returns when neither the worker nor, with `discard_unsent`, the kernel reads or writes
        memory for this connection."""
        try:
            if discard_unsent:
                at_once = struct.pack("@ii", 1, 0)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        except OSError:
            pass  # the connection is closed already
        self._end()
        self._sock.close()

    def _ranges(self, parts: Sequence[FileRange]) -> list[Range]:
        arenas = {
            fd: fd if fd == DISCARDED else self._worker.arena(fd)
            for fd in {part.fd for part in parts}
        }
        return [(arenas[part.fd], part.offset, part.nbytes) for part in parts]

    # Orders and reports ---------------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        packet = encode(order)
        while True:
            try:
                self._orders.send(packet)
                return
            except BlockingIOError:
                # The worker may wait for this side to take its reports.
                self._next_report(0.0)
                self._check_time()
            except (OSError, ValueError):
                raise self._loss() from None

    def _expect(self, kind: type[T], meanwhile: Callable[[int], None] | None = None) -> T:
        """Waits for this report. Calls `meanwhile` when the worker reports that it takes long."""
        while True:
            report = self._next_report(TICK_S)
            if isinstance(report, kind):
                return report
            if isinstance(report, Working) and meanwhile is not None:
                meanwhile(report.nbytes)
            self._check_time()

    def _read_report(self, timeout_s: float) -> bool:
        """Takes a report that nothing waits for; False when there is none."""
        return self._next_report(timeout_s) is not None

    def _next_report(self, timeout_s: float) -> Report | None:
        """Keeps what the peer has sent; raises the error of a connection that has ended."""
        if not self._reports.poll(timeout_s * 1e3):
            return None
        try:
            nbytes = self._orders.recv_into(self._packet)
        except (OSError, ValueError):
            raise self._loss() from None
        if not nbytes:
            raise self._loss()
        report: Report = read_report(self._packet[:nbytes])
        if isinstance(report, Lost):
            raise report.error()
        if isinstance(report, Input):
            self._input.append(report.data)
            if len(self._input) > _MAX_INPUTS:
                raise WireError("the peer sends responses faster than this side reads them")
        elif isinstance(report, Head):
            self._head = memoryview(report.data)
        return report

    def _next_part(self, most: int) -> memoryview:
        head = self._head
        if head is None:
            self._order(ReceiveBody(min(most, PART_BYTES)))
            return memoryview(self._expect(Body).data)
        part, rest = head[:most], head[most:]
        self._head = rest if rest.nbytes else None
        return part

    def _take_head(self, view: memoryview) -> bool:
        head = self._head
        if head is None:
            return False
        view[:] = head[:HEADER_BYTES]
        self._head = head[HEADER_BYTES:] if head.nbytes > HEADER_BYTES else None
        return True

    def _check_time(self) -> None:
        if self._clock.now() >= self.until_s:
            raise ConnectionLost("the frame did not arrive in time")

    def _loss(self) -> ConnectionLost:
        self._pool.report_lost()
        return ConnectionLost("the worker process of this connection has ended")

    def _end(self) -> None:
        """Ends the connection, and returns when the worker no longer uses memory for it."""
        if self._ended:
            return
        self._ended = True
        shut_down(self._sock)
        try:
            self._orders.shutdown(socket.SHUT_WR)
            self._orders.settimeout(_END_S)
            while self._orders.recv_into(self._packet):
                pass  # reports about the end
        except TimeoutError:
            self._worker.kill()
            self._pool.report_lost()
        except OSError:
            pass  # the worker has closed it
        self._orders.close()
        self._worker.leave()
