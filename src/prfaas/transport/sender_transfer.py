"""One transfer at its sender: which pieces are ready, in flight or acknowledged.

No sockets and no locks: `SenderTransfers` and `ResponseHandler` call it under their lock. A piece
is *pending* (ready, not sent), *in flight* (sent, not acknowledged) or done. The pieces that a lost
connection carried become pending again. The sender never sends an acknowledged piece again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from prfaas.errors import InputError
from prfaas.transport.buffers import (
    BufferSequence,
    FileRange,
    FileSlice,
    add_ranges,
    check_buffers,
    slices_of,
)
from prfaas.transport.messages import Manifest
from prfaas.transport.wire import MAX_PIECES, Codec, SegmentPiece

# Buffers per frame. With the header and the table this stays below Linux's IOV_MAX of 1,024.
MAX_VIEWS = 1_000


# A named tuple's own constructor takes three times as long, for tens of thousands of segments.
_piece: Callable[[tuple[int, ...]], SegmentPiece] = partial(tuple.__new__, SegmentPiece)


class SenderFrame(NamedTuple):
    sequence: int
    pieces: list[SegmentPiece]
    buffers: list[BufferSequence | FileSlice]  # of each piece's segment
    ranges: list[FileRange]  # the same bytes in files; empty unless all bytes lie in files
    nbytes: int

    def views(self) -> list[memoryview]:
        """The payload. Made when it is needed: a worker process reads the ranges instead."""
        found: list[memoryview] = []
        for (_, _, offset, raw_bytes, _), buffers in zip(self.pieces, self.buffers, strict=True):
            found += slices_of(buffers, offset, raw_bytes)
        return found


class SenderTransfer:
    def __init__(
        self, transfer_id: bytes, auth: bytes, manifest: Manifest, priority: int, now: float
    ) -> None:
        self.transfer_id = transfer_id
        self.auth = auth
        self.manifest = manifest
        self.priority = priority
        self.total_bytes = manifest.total_bytes
        self.opening = False  # an OPEN was sent and not answered
        self.opened = False
        self.lost_probes = 0  # since the latest answer: the receiver may not know the grant
        self.began_s = self.progress_s = self.probed_s = now
        self.readers = 0  # connections that read its buffers, and frames that the kernel reads
        self.ended: str | None = None  # why it failed; "" after a commit
        self.done: Future[None] = Future()
        self.acknowledged_bytes = 0
        self.pending_bytes = 0
        self.in_flight_bytes = 0
        self._index = {segment.name: i for i, segment in enumerate(manifest.segments)}
        self._views: dict[int, BufferSequence | FileSlice] = {}
        self._pending: deque[SegmentPiece] = deque()
        self._in_flight: dict[int, SenderFrame] = {}
        self._arriving: dict[int, int] = {}  # sequence of a frame in flight -> bytes that arrived
        self._most_arrived_bytes = 0  # the most that has ever arrived, whole frames and parts
        self._next_sequence = 1  # frames without pieces have sequence 0

    @property
    def can_send(self) -> bool:
        return self.opened and self.ended is None and bool(self._pending)

    def mark_ready(self, segments: Mapping[str, Sequence[memoryview | FileSlice]]) -> None:
        """The bytes of these segments are final and do not change until the transfer is done.
        Raises InputError, and changes nothing, when one of them is not what was announced."""
        quantum, announced = self.manifest.quantum_bytes, self.manifest.segments
        none = int(Codec.NONE)
        given: dict[int, BufferSequence | FileSlice] = {}
        pieces: list[SegmentPiece] = []
        total = 0
        for name, views in segments.items():
            index = self._index.get(name)
            if index is None:
                raise InputError("the transfer has no such segment", where=name)
            if index in self._views:
                raise InputError("the segment was marked ready twice", where=name)
            nbytes = announced[index].nbytes
            given[index] = check_buffers(name, nbytes, views)
            total += nbytes
            if nbytes <= quantum:
                pieces.append(_piece((index, none, 0, nbytes, nbytes)))
            else:
                for offset in range(0, nbytes, quantum):
                    size = min(quantum, nbytes - offset)
                    pieces.append(_piece((index, none, offset, size, size)))
        self._views.update(given)
        self._pending.extend(pieces)
        self.pending_bytes += total

    def next_frame(self, frame_bytes: int) -> SenderFrame:
        """Takes pending pieces of about `frame_bytes`; they are in flight from now on."""
        pieces: list[SegmentPiece] = []
        sources: list[BufferSequence | FileSlice] = []
        ranges: list[FileRange] = []
        on_file = True
        nbytes = views = 0
        pending, known = self._pending, self._views
        while pending and nbytes < frame_bytes and len(pieces) < MAX_PIECES:
            piece = pending[0]
            segment, _, offset, raw_bytes, _ = piece
            buffers = known[segment]
            if isinstance(buffers, BufferSequence):
                views += buffers.count(offset, raw_bytes)
                on_file = on_file and buffers.on_file
            else:
                views += 1
            if pieces and views > MAX_VIEWS:
                break
            pending.popleft()
            pieces.append(piece)
            sources.append(buffers)
            if on_file:
                add_ranges(buffers, offset, raw_bytes, ranges)
            nbytes += raw_bytes
        if not on_file:
            ranges = []
        frame = SenderFrame(self._next_sequence, pieces, sources, ranges, nbytes)
        self._next_sequence += 1
        self._in_flight[frame.sequence] = frame
        self.pending_bytes -= nbytes
        self.in_flight_bytes += nbytes
        return frame

    @property
    def outstanding_bytes(self) -> int:
        """Bytes that are ready and not known to have arrived."""
        return self.pending_bytes + self.in_flight_bytes - sum(self._arriving.values())

    def record_progress(self, sequence: int, nbytes: int) -> int:
        """`nbytes` of a frame in flight have arrived. Returns how many of them are new."""
        frame = self._in_flight.get(sequence)
        if frame is None:
            return 0
        before = self._arriving.get(sequence, 0)
        self._arriving[sequence] = max(before, min(nbytes, frame.nbytes))
        return self._arriving[sequence] - before

    def record_advance(self) -> bool:
        """Whether more has arrived than at any call before. On a connection that damages every
        frame, parts of the same frames arrive again and again, which is no progress."""
        arrived = self.acknowledged_bytes + sum(self._arriving.values())
        further = arrived > self._most_arrived_bytes
        self._most_arrived_bytes = max(arrived, self._most_arrived_bytes)
        return further

    def partly_arrived_bytes(self, sequence: int) -> int:
        """The bytes that `record_progress` has counted of a frame in flight."""
        return self._arriving.get(sequence, 0)

    def acknowledge(self, sequence: int) -> int:
        """The frame arrived intact. Returns its bytes, or 0 for a frame that is not in flight."""
        frame = self._in_flight.pop(sequence, None)
        self._arriving.pop(sequence, None)
        if frame is None:
            return 0
        self.in_flight_bytes -= frame.nbytes
        self.acknowledged_bytes += frame.nbytes
        return frame.nbytes

    def acknowledge_all(self) -> int:
        """The receiver has committed, so everything arrived. Returns the bytes that were in flight.
        Acknowledgements of single frames may still come, on other connections: they find nothing in
        flight and count nothing twice."""
        nbytes = self.in_flight_bytes
        self._in_flight.clear()
        self._arriving.clear()
        self._pending.clear()
        self.in_flight_bytes = self.pending_bytes = 0
        self.acknowledged_bytes = self.total_bytes
        return nbytes

    def mark_lost(self, sequence: int) -> None:
        """The frame did not arrive intact. Its pieces are the next ones to send."""
        frame = self._in_flight.pop(sequence, None)
        self._arriving.pop(sequence, None)
        if frame is not None:
            self.in_flight_bytes -= frame.nbytes
            self.pending_bytes += frame.nbytes
            self._pending.extendleft(reversed(frame.pieces))
