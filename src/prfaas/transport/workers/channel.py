"""A connection whose bytes a worker moves, used like a `Channel`.

The thread of a connection gives orders and waits for reports. It keeps its own descriptor of the
TCP socket: it shuts the connection down without the worker's help. Memory that the worker reads or
writes is not given back before the worker has ended the connection, or is dead.
"""

from __future__ import annotations

import math
import select
import socket
import struct
from collections.abc import Callable, Sequence

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost
from prfaas.transport.buffers import DISCARDED, FileRange
from prfaas.transport.channel import TICK_S, shut_down
from prfaas.transport.wire import HEADER_BYTES
from prfaas.transport.workers.messages import (
    MAX_RANGES,
    PART_BYTES,
    Body,
    Discard,
    Range,
    ReceiveBody,
    Received,
    ReceivePayload,
    SendBytes,
    SendFrame,
    Serve,
    Started,
)
from prfaas.transport.workers.order_socket import OrderSocket
from prfaas.transport.workers.pool import WorkerPool
from prfaas.transport.workers.process import WorkerProcess


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
        """`worker` is one that the pool has given. Returns when the TLS handshake, if any, is
        complete. Raises PeerError; the caller closes `sock` then, and otherwise `close` does."""
        self._pool = pool
        self._worker = worker
        self._sock = sock
        self._ended = False
        try:
            self._orders = OrderSocket(worker.serve(serve, sock, pool.credentials()), clock)
        except BaseException:
            worker.leave()
            raise
        self._poll = select.poll()
        self._poll.register(self._orders, select.POLLIN)
        self.until_s = clock.now() + serve.handshake_s + serve.silence_s
        try:
            self._orders.expect(Started)
        except BaseException:
            self._end()
            raise
        self.until_s = math.inf

    # As in `Channel` ------------------------------------------------------------------------------

    @property
    def until_s(self) -> float:
        """A frame that is not complete by then breaks the connection, even while bytes arrive."""
        return self._orders.until_s

    @until_s.setter
    def until_s(self, at_s: float) -> None:
        self._orders.until_s = at_s

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
        if self._orders.input:
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
        """Sends small frames. A payload that does not lie in files takes this way, too."""
        for view in views:
            for at in range(0, view.nbytes, PART_BYTES):
                self._orders.send(SendBytes(bytes(view[at : at + PART_BYTES])))
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
        or the kernel may read the files until the frame is answered, or until `close`. Returns when
        the frame before this one is sent."""
        order = SendFrame(bytes(head), self._ranges(ranges), checked)
        self._orders.send_frame(order, lambda _: meanwhile())

    def receive(
        self,
        views: list[memoryview],
        nbytes: int,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        """Fills the views with a table or a body. A payload that does not belong into files takes
        this way, too."""
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
        try:
            parts = self._ranges(targets)
            for at in range(0, len(parts), MAX_RANGES):
                some = parts[at : at + MAX_RANGES]
                self._orders.send(ReceivePayload(some, last=at + MAX_RANGES >= len(parts)))
            return self._orders.expect(Received, meanwhile).verified
        except BaseException:
            self._end()
            raise

    def discard(self, nbytes: int) -> None:
        """Drops the next bytes of a body. The worker may have sent a table of pieces already."""
        orders = self._orders
        if orders.head is not None:
            known = min(nbytes, orders.head.nbytes)
            orders.head = orders.head[known:] or None
            nbytes -= known
        if nbytes:
            orders.send(Discard(nbytes))
            orders.expect(Received)

    def receive_if_any(self, view: memoryview, *, wait: bool) -> bool:
        """Fills `view` with the next frame's header. Returns False when none has arrived (with
        `wait`: within a tick)."""
        orders = self._orders
        orders.next_report(TICK_S if wait else 0.0)
        if orders.head is None:
            return False
        assert view.nbytes == HEADER_BYTES
        view[:] = orders.head[:HEADER_BYTES]
        orders.head = orders.head[HEADER_BYTES:] or None  # what is left is the table
        return True

    def receive_available(self, limit: int = PART_BYTES) -> bytes:
        """What the peer has sent. Call this only after `wait` reported the socket."""
        if not self._orders.input:
            self._orders.next_report(0.0)
        return self._orders.input.popleft() if self._orders.input else b""

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

    def _next_part(self, most: int) -> memoryview:
        orders = self._orders
        if orders.head is None:
            orders.send(ReceiveBody(min(most, PART_BYTES)))
            return memoryview(orders.expect(Body).data)
        part, rest = orders.head[:most], orders.head[most:]
        orders.head = rest or None
        return part

    def _end(self) -> None:
        """Ends the connection, and returns when the worker no longer uses memory for it."""
        if self._ended:
            return
        self._ended = True
        shut_down(self._sock)
        if not self._orders.close():
            self._worker.kill()
        self._worker.leave()
        if not self._worker.alive:
            self._pool.report_lost()
