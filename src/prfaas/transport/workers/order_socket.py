"""The kvd's end of the socket for one connection of a worker: orders go out, reports come in."""

from __future__ import annotations

import math
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost, WireError
from prfaas.transport.channel import TICK_S
from prfaas.transport.workers.messages import (
    PACKET_BYTES,
    Head,
    Input,
    Lost,
    Order,
    Report,
    SendFrame,
    Sent,
    Working,
    encode,
    read_report,
)

_MAX_INPUTS = 64  # parts of what the peer has sent
_END_S = 5.0  # for the worker to report the end of a connection that was shut down
_TIMEVAL = struct.Struct("@ll")
T = TypeVar("T", bound=Report)


class OrderSocket:
    """Not thread-safe."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._sock = sock
        self._clock = clock
        self.until_s = math.inf  # a wait ends with ConnectionLost then
        self.input: deque[bytes] = deque()  # what the peer of a sender has sent
        self.head: memoryview | None = None  # of a frame that arrives: header and table
        self.unsent = 0  # frames that the worker was told to send and has not reported as sent
        self._packet = memoryview(bytearray(PACKET_BYTES))
        self._reports = select.poll()
        self._reports.register(sock, select.POLLIN)
        sock.setblocking(True)
        tick = _TIMEVAL.pack(int(TICK_S), int(TICK_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, order: Order) -> None:
        packet = encode(order)
        while True:
            try:
                self._sock.send(packet)
                return
            except BlockingIOError:
                # The worker may wait for this side to take its reports.
                self.next_report(0.0)
                self._check_time()
            except (OSError, ValueError):
                # The worker may have reported why it has ended.
                while self.next_report(0.0) is not None:
                    pass
                raise ConnectionLost("a worker process has ended a connection") from None

    def send_frame(self, order: SendFrame, meanwhile: Callable[[int], None]) -> None:
        """Returns when one frame at most waits to be sent or is being sent: a worker that has
        sent a frame begins the next one at once."""
        self.send(order)
        self.unsent += 1
        while self.unsent > 1:
            report = self.next_report(TICK_S)
            if isinstance(report, Working):
                meanwhile(report.nbytes)
            self._check_time()

    def expect(self, kind: type[T], meanwhile: Callable[[int], None] | None = None) -> T:
        """Waits for this report. Calls `meanwhile` when the worker reports that it takes long."""
        while True:
            report = self.next_report(TICK_S)
            if isinstance(report, kind):
                return report
            if isinstance(report, Working) and meanwhile is not None:
                meanwhile(report.nbytes)
            self._check_time()

    def next_report(self, timeout_s: float) -> Report | None:
        """Keeps what the peer has sent. Raises the error of a connection that has ended."""
        if not self._reports.poll(timeout_s * 1e3):
            return None
        try:
            nbytes = self._sock.recv_into(self._packet)
        except (OSError, ValueError):
            nbytes = 0
        if not nbytes:
            raise ConnectionLost("the worker process of this connection has ended")
        try:
            report = read_report(self._packet[:nbytes])
        except msgspec.MsgspecError as error:
            raise WireError(f"a worker process sent no report: {error}") from None
        if isinstance(report, Lost):
            raise report.error()
        if isinstance(report, Sent):
            self.unsent -= 1
        elif isinstance(report, Head):
            self.head = memoryview(report.data)
        elif isinstance(report, Input):
            self.input.append(report.data)
            if len(self.input) > _MAX_INPUTS:
                raise WireError("the peer sends responses faster than this side reads them")
        return report

    def close(self) -> bool:
        """Ends the worker's thread of a connection that was shut down. Returns False when the
        worker has not ended it in time: it may still use memory."""
        ended = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(_END_S)
            while self._sock.recv_into(self._packet):
                pass  # reports about the end
        except TimeoutError:
            ended = False
        except OSError:
            pass  # the worker has closed it
        self._sock.close()
        return ended

    def _check_time(self) -> None:
        if self._clock.now() >= self.until_s:
            raise ConnectionLost("the frame did not arrive in time")
