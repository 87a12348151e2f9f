"""One transfer at its sender: what is ready, what is under way, what has arrived.

No sockets, no locks: the link calls it under its own lock. A piece is *pending* (ready, not sent),
*in flight* (sent, not acknowledged) or done. What a lost connection carried becomes pending again;
what was acknowledged is never sent twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from prfaas.transport.buffers import BufferSequence, FileRange, FileSlice
from prfaas.transport.messages import Manifest
from prfaas.transport.wire import MAX_PIECES, Codec, SegmentPiece

# Buffers per frame: below Linux' IOV_MAX of 1,024 with header and table in front.
MAX_VIEWS = 1_000


class OutgoingFrame(NamedTuple):
    sequence: int
    pieces: list[SegmentPiece]
    views: list[memoryview]
    ranges: list[FileRange]  # the same bytes on file, where all of them are a file's
    nbytes: int


class SenderTransfer:
    def __init__(
        self, transfer_id: bytes, auth: bytes, manifest: Manifest, priority: int, now: float
    ) -> None:
        self.transfer_id = transfer_id
        self.auth = auth
        self.manifest = manifest
        self.priority = priority
        self.total_bytes = manifest.total_bytes
        self.opening = False  # an OPEN is under way
        self.opened = False
        self.began_s = self.progress_s = self.probed_s = now
        self.senders = 0  # connections that are reading its buffers
        self.ended: str | None = None  # why it failed; "" once committed
        self.done: Future[None] = Future()
        self.acknowledged_bytes = 0
        self.pending_bytes = 0
        self.in_flight_bytes = 0
        self._index = {segment.name: i for i, segment in enumerate(manifest.segments)}
        self._views: dict[int, BufferSequence] = {}
        self._pending: deque[SegmentPiece] = deque()
        self._in_flight: dict[int, OutgoingFrame] = {}
        self._arriving: dict[int, int] = {}  # bytes that have arrived of frames in flight
        self._next_sequence = 1  # 0 is for frames without pieces

    @property
    def can_send(self) -> bool:
        return self.opened and self.ended is None and bool(self._pending)

    def ready(self, segments: Mapping[str, Sequence[memoryview | FileSlice]]) -> None:
        """These segments' bytes are final, and stay so until the transfer is done."""
        quantum, announced = self.manifest.quantum_bytes, self.manifest.segments
        pending, none = self._pending, int(Codec.NONE)
        for name, views in segments.items():
            index = self._index[name]
            nbytes = announced[index].nbytes
            assert index not in self._views, f"{name} was ready before"
            self._views[index] = BufferSequence(name, nbytes, views)
            if nbytes <= quantum:
                pending.append(SegmentPiece(index, none, 0, nbytes, nbytes))
            else:
                for offset in range(0, nbytes, quantum):
                    size = min(quantum, nbytes - offset)
                    pending.append(SegmentPiece(index, none, offset, size, size))
            self.pending_bytes += nbytes

    def next_frame(self, frame_bytes: int) -> OutgoingFrame:
        """Pieces of about `frame_bytes`, which are in flight from now on."""
        pieces: list[SegmentPiece] = []
        views: list[memoryview] = []
        ranges: list[FileRange] = []
        on_file = True
        nbytes = 0
        while self._pending and nbytes < frame_bytes and len(pieces) < MAX_PIECES:
            piece = self._pending[0]
            laid = self._views[piece.segment]
            found = laid.slices(piece.offset, piece.raw_bytes)
            if pieces and len(views) + len(found) > MAX_VIEWS:
                break
            self._pending.popleft()
            pieces.append(piece)
            views += found
            on_file = on_file and laid.on_file
            if on_file:
                laid.add_ranges(piece.offset, piece.raw_bytes, ranges)
            nbytes += piece.raw_bytes
        frame = OutgoingFrame(self._next_sequence, pieces, views, ranges if on_file else [], nbytes)
        self._next_sequence += 1
        self._in_flight[frame.sequence] = frame
        self.pending_bytes -= nbytes
        self.in_flight_bytes += nbytes
        return frame

    @property
    def outstanding_bytes(self) -> int:
        """Ready, and not known to have arrived."""
        return self.pending_bytes + self.in_flight_bytes - sum(self._arriving.values())

    def progressed(self, sequence: int, nbytes: int) -> int:
        """So much of a frame in flight has arrived; how many bytes more than known before."""
        frame = self._in_flight.get(sequence)
        if frame is None:
            return 0
        before = self._arriving.get(sequence, 0)
        self._arriving[sequence] = max(before, min(nbytes, frame.nbytes))
        return self._arriving[sequence] - before

    def arriving_bytes(self, sequence: int) -> int:
        """What `progressed` has said of a frame."""
        return self._arriving.get(sequence, 0)

    def acknowledged(self, sequence: int) -> int:
        """Bytes that have arrived with this frame; 0 for one that is not under way."""
        frame = self._in_flight.pop(sequence, None)
        self._arriving.pop(sequence, None)
        if frame is None:
            return 0
        self.in_flight_bytes -= frame.nbytes
        self.acknowledged_bytes += frame.nbytes
        return frame.nbytes

    def lost(self, sequence: int) -> None:
        """The frame did not arrive, or not intact: its pieces are the next to go."""
        frame = self._in_flight.pop(sequence, None)
        self._arriving.pop(sequence, None)
        if frame is not None:
            self.in_flight_bytes -= frame.nbytes
            self.pending_bytes += frame.nbytes
            self._pending.extendleft(reversed(frame.pieces))
