"""One connection of a path check to a listener: HELLO, pings, and as many bytes as possible.

The listener discards MEASURE frames, within a limit of bytes per minute, so a probe needs no grant
and the listener stores nothing.
"""

from __future__ import annotations

import os
import socket
import ssl
import statistics
import threading
from collections import deque
from dataclasses import dataclass

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost, WireError
from prfaas.transport.channel import Channel, connect
from prfaas.transport.messages import HELLO, Hello, decode, encode
from prfaas.transport.wire import Decoder, Frame, Kind, encode_message, parse_sequences

TIMEOUT_S = 5.0  # for each answer of the listener
_SMALLEST_FRAME, _LARGEST_FRAME = 64 << 10, 1 << 20
_FRAMES_PER_GROWTH = 16
# What may be in flight grows with the bytes delivered, as TCP's own window does. More at once would
# only fill the buffers of a slow path, and its acknowledgements would come after the measurement.
_FIRST_IN_FLIGHT_BYTES, _MOST_IN_FLIGHT_BYTES = 1 << 20, 64 << 20
_PING_COUNT = 5
_IP_MTU, _IPV6_MTU = 14, 24  # socket options of Linux: the path MTU of a connected socket


class Allowance:
    """The bytes that the probes of one process may still send together. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one connection delivered, and when the listener acknowledged it. Times are those of the
    monotonic clock, which all processes of a host share."""

    began_s: float
    nbytes: int  # acknowledged
    last_s: float  # when the last acknowledgement came
    # The rate counts from here: the first acknowledgement after the warm-up, or the first one.
    base_bytes: int
    base_s: float
    warmed_up: bool  # whether an acknowledgement came after the warm-up


class Frames:
    """MEASURE frames of every size that a probe sends. Random bytes, since a tunnel may compress
    others. All connections of a process share one set."""

    def __init__(self) -> None:
        body = os.urandom(_LARGEST_FRAME)
        self._frames: dict[int, bytes] = {}
        size = _SMALLEST_FRAME
        while size <= _LARGEST_FRAME:
            self._frames[size] = encode_message(Kind.MEASURE, body[:size])
            size *= 2

    def after(self, acknowledged_bytes: int) -> bytes:
        """The next frame. It grows with the bytes delivered, because large frames cost less, but on
        a slow path a single large one would take longer than the whole measurement."""
        fitting = [size for size in self._frames if size * _FRAMES_PER_GROWTH <= acknowledged_bytes]
        return self._frames[max(fitting, default=_SMALLEST_FRAME)]


class _Tally:
    """Counts what one connection has sent and what the listener has acknowledged, in order."""

    def __init__(self, began_s: float, warm_up_s: float) -> None:
        self.began_s = began_s
        self.in_flight = 0
        self.acknowledged = 0
        self._sent: deque[int] = deque()
        self._warm_s = began_s + warm_up_s
        self._warmed_up = False
        self._base = (0, began_s)
        self._last_s = began_s

    def may_send(self, nbytes: int) -> bool:
        most = min(_FIRST_IN_FLIGHT_BYTES + self.acknowledged, _MOST_IN_FLIGHT_BYTES)
        return self.in_flight + nbytes <= most

    def add(self, nbytes: int) -> None:
        self._sent.append(nbytes)
        self.in_flight += nbytes

    def acknowledge(self, frames: int, now: float) -> None:
        if frames > len(self._sent):
            raise WireError("the receiver acknowledged frames that were not sent")
        nbytes = sum(self._sent.popleft() for _ in range(frames))
        self.in_flight -= nbytes
        is_first = self.acknowledged == 0
        self.acknowledged += nbytes
        self._last_s = now
        if is_first or (not self._warmed_up and now >= self._warm_s):
            self._base = (self.acknowledged, now)
        self._warmed_up = now >= self._warm_s

    def delivery(self) -> Delivery:
        return Delivery(self.began_s, self.acknowledged, self._last_s, *self._base, self._warmed_up)


class Probe:
    """Not thread-safe: one thread at a time uses a probe."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None, clock: Clock) -> None:
        sock = connect(address, timeout_s=TIMEOUT_S, tls=tls)
        self.cipher = None
        if isinstance(sock, ssl.SSLSocket):
            self.cipher = f"{sock.version()} {(sock.cipher() or ('unknown',))[0]}"
        self.path_mtu_bytes = _path_mtu(sock)
        self.channel = Channel(sock, clock, TIMEOUT_S)
        self._clock = clock
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # Unsent bytes of a measurement that is over would only delay the next one.
        self.channel.close(discard_unsent=True)

    def handshake(self) -> str:
        """Sends HELLO. Returns the receiver's software version."""
        self._send(encode_message(Kind.HELLO, encode(HELLO)))
        frame = self._receive()
        if frame.header.kind is not Kind.WELCOME:
            raise WireError(f"the receiver answered HELLO with {frame.header.kind.name}")
        return decode(frame.body, Hello).software

    def round_trip_s(self) -> float:
        """The median round trip through the network and both programs, as for a grant or an ACK."""
        times = []
        for _ in range(_PING_COUNT):
            started = self._clock.now()
            self.ping()
            times.append(self._clock.now() - started)
        return statistics.median(times)

    def ping(self) -> None:
        self._send(encode_message(Kind.MEASURE))
        self._receive()

    def send_for(
        self, seconds: float, warm_up_s: float, allowance: Allowance, frames: Frames
    ) -> Delivery:
        """Sends as fast as possible until the time is over or the allowance is used up. Counts the
        bytes that are acknowledged within the time, which includes the warm-up."""
        tally = _Tally(self._clock.now(), warm_up_s)
        until_s = tally.began_s + seconds
        self.channel.until_s = until_s + TIMEOUT_S  # also for a frame that is being sent then
        allowed = True
        while self._clock.now() < until_s:
            frame = frames.after(tally.acknowledged)
            if allowed and tally.may_send(len(frame)):
                allowed = allowance.take(len(frame))
                if allowed:
                    self._send(frame)
                    tally.add(len(frame))
                    if not self._frames and not self.channel.wait(0):
                        continue
            if not tally.in_flight:
                break  # the allowance is used up, and everything has arrived
            self._receive_acknowledgements(tally, until_s)
        return tally.delivery()

    def _receive_acknowledgements(self, tally: _Tally, until_s: float) -> None:
        """Waits for one, and takes all that have arrived: a frame may be acknowledged together with
        others or not, and those that are left would be counted late."""
        while True:
            acknowledged = len(parse_sequences(self._receive().body))
            now = self._clock.now()
            if now <= until_s:
                tally.acknowledge(acknowledged, now)
            if not tally.in_flight or (not self._frames and not self.channel.wait(0)):
                return

    def _send(self, frame: bytes) -> None:
        self.channel.send([memoryview(frame)], len(frame))

    def _receive(self) -> Frame:
        until = self._clock.now() + TIMEOUT_S
        while not self._frames:
            left_s = until - self._clock.now()
            if left_s <= 0:
                raise ConnectionLost(f"the receiver did not answer within {TIMEOUT_S:g} s")
            if self.channel.wait(left_s):
                self._frames += self._decoder.feed(self.channel.receive_available())
        return self._frames.pop(0)


def _path_mtu(sock: socket.socket) -> int | None:
    try:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None  # not Linux
