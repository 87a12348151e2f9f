"""One connection of a path check to a listener: HELLO, pings, and as many bytes as possible.

It is a connection of the transport (`TransferLink.connect`), in this process or with a worker. The
listener discards MEASURE frames, within a limit of bytes per minute, so a probe needs no grant and
the listener stores nothing.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.errors import ConnectionLost, WireError
from prfaas.transport.buffers import FileRange
from prfaas.transport.channel import Channel
from prfaas.transport.link import send_frame
from prfaas.transport.messages import HELLO, Hello, decode, encode
from prfaas.transport.wire import (
    HEADER_BYTES,
    Decoder,
    Frame,
    Kind,
    encode_message,
    parse_sequences,
)
from prfaas.transport.workers.channel import WorkerChannel

TIMEOUT_S = 5.0  # for each answer of the listener
_SMALLEST_FRAME, _LARGEST_FRAME = 64 << 10, 4 << 20
_FRAMES_PER_GROWTH = 16
# What may be in flight grows with the bytes delivered, as TCP's own window does. More at once would
# only fill the buffers of a slow path, and its acknowledgements would come after the measurement.
_FIRST_IN_FLIGHT_BYTES, _MOST_IN_FLIGHT_BYTES = 1 << 20, 64 << 20
_PING_COUNT = 5


class Allowance:
    """The bytes that the probes of one measurement may still send together. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True


@dataclass(slots=True)
class Delivery:
    """What one connection has sent, and what the listener has acknowledged, in order."""

    began_s: float
    nbytes: int  # acknowledged
    last_s: float  # when the last acknowledgement came
    # The rate counts from here: the first acknowledgement after the warm-up, or the first one.
    base_bytes: int
    base_s: float
    warmed_up: bool  # whether an acknowledgement came after the warm-up
    warm_s: float = 0.0  # the end of the warm-up
    in_flight: int = 0  # bytes
    _sent: deque[int] = field(default_factory=deque)

    def may_send(self, nbytes: int) -> bool:
        most = min(_FIRST_IN_FLIGHT_BYTES + self.nbytes, _MOST_IN_FLIGHT_BYTES)
        return self.in_flight + nbytes <= most

    def add(self, nbytes: int) -> None:
        self._sent.append(nbytes)
        self.in_flight += nbytes

    def acknowledge(self, frames: int, now: float) -> None:
        if frames > len(self._sent):
            raise WireError("the receiver acknowledged frames that were not sent")
        is_first = self.nbytes == 0
        nbytes = sum(self._sent.popleft() for _ in range(frames))
        self.in_flight -= nbytes
        self.nbytes += nbytes
        self.last_s = now
        if is_first or (not self.warmed_up and now >= self.warm_s):
            self.base_bytes, self.base_s = self.nbytes, now
        self.warmed_up = now >= self.warm_s


class MeasureFrame(NamedTuple):
    head: bytes
    payload: FileRange
    view: memoryview  # the payload's bytes

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.payload.nbytes


class Frames:
    """MEASURE frames of every size that a probe sends. Their bytes lie in a file, as KV does, and
    are random, since a tunnel may compress others. All connections share one set."""

    def __init__(self) -> None:
        body = os.urandom(_LARGEST_FRAME)
        self._file = os.memfd_create("prfaas-doctor", os.MFD_CLOEXEC)
        os.write(self._file, body)
        view = memoryview(body)
        self._frames: dict[int, MeasureFrame] = {}
        size = _SMALLEST_FRAME
        while size <= _LARGEST_FRAME:
            head = encode_message(Kind.MEASURE, body[:size])[:HEADER_BYTES]
            self._frames[size] = MeasureFrame(head, FileRange(self._file, 0, size), view[:size])
            size *= 2

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def after(self, acknowledged_bytes: int) -> MeasureFrame:
        """The next frame. It grows with the bytes delivered, because large frames cost less, but on
        a slow path a single large one would take longer than the whole measurement."""
        fitting = [size for size in self._frames if size * _FRAMES_PER_GROWTH <= acknowledged_bytes]
        return self._frames[max(fitting, default=_SMALLEST_FRAME)]


class Probe:
    """Not thread-safe: one thread at a time uses a probe."""

    def __init__(self, channel: Channel | WorkerChannel, clock: Clock) -> None:
        self.channel = channel
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
        self,
        seconds: float,
        warm_up_s: float,
        allowance: Allowance,
        frames: Frames,
        *,
        checked: bool,
    ) -> Delivery:
        """Sends as fast as possible until the time is over or the allowance is used up. Counts the
        bytes that are acknowledged within the time, which includes the warm-up. `checked`: every
        frame's checksum is computed anew, as that of KV is."""
        heard_s = now = self._clock.now()
        delivery = Delivery(now, 0, now, 0, now, False, warm_s=now + warm_up_s)
        until_s = now + seconds
        self.channel.until_s = until_s + TIMEOUT_S  # also for a frame that is being sent then

        def count_arrived(wait_s: float = 0.0) -> None:
            """Counts the acknowledgements that have come; those that are left would count late."""
            nonlocal heard_s
            while self.channel.wait(wait_s):
                wait_s = 0.0
                for frame in self._decoder.feed(self.channel.receive_available()):
                    heard_s = self._clock.now()
                    if heard_s <= until_s:
                        delivery.acknowledge(len(parse_sequences(frame.body)), heard_s)

        while now < until_s:
            frame = frames.after(delivery.nbytes)
            if delivery.may_send(frame.nbytes) and allowance.take(frame.nbytes):
                delivery.add(frame.nbytes)
                self._send_frame(frame, checked, count_arrived)
                count_arrived()
            elif not delivery.in_flight:
                break  # the allowance is used up, and everything has arrived
            elif now >= heard_s + TIMEOUT_S:
                raise ConnectionLost(f"the receiver did not answer within {TIMEOUT_S:g} s")
            else:
                count_arrived(min(until_s, heard_s + TIMEOUT_S) - now)
            now = self._clock.now()
        return delivery

    def _send_frame(
        self, frame: MeasureFrame, checked: bool, meanwhile: Callable[[], None]
    ) -> None:
        send_frame(
            self.channel,
            bytearray(frame.head),
            [frame.payload],
            lambda: [frame.view],
            frame.payload.nbytes,
            checked=checked,
            meanwhile=meanwhile,
        )

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
