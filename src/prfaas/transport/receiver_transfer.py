"""One transfer at its receiver: which bytes are in place, who is writing, when it ends.

No sockets, no locks: the listener calls it under its own lock. Each quantum of each segment is
MISSING, CLAIMED (one connection is writing it) or VERIFIED. Nobody writes to a range that another
connection writes or that is verified: such bytes are drained to scratch. The owner gets its buffers
back only when the last writer has left.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from prfaas.errors import WireError
from prfaas.transport.buffers import BufferSequence
from prfaas.transport.messages import Ended, Manifest
from prfaas.transport.wire import SegmentPiece
from prfaas.types import Grant

MISSING, CLAIMED, VERIFIED = 0, 1, 2


class BufferOwner(Protocol):
    """The owner of the memory a transfer lands in. Called from the listener's threads, never
    while a lock is held; must not block for long."""

    def buffers(self, manifest: Manifest) -> Sequence[Sequence[memoryview]] | str:
        """For each segment, writable views of bytes that together hold exactly its bytes; or why
        not."""

    def committed(self) -> None:
        """Every byte of every segment is in place and verified; nobody writes any more."""

    def ended(self, reason: str) -> None:
        """The transfer is over without a commit; nobody writes any more."""


class TransferState(enum.Enum):
    EXPECTED = "expected"  # granted, no manifest yet
    OPEN = "open"
    ENDED = "ended"


class Claims(NamedTuple):
    """What a frame's pieces turned out to be."""

    mine: list[int]  # quanta that this frame writes
    nbytes: int  # of them
    targets: list[list[memoryview] | None]  # per piece: where to write, None: drain to scratch
    busy: bool  # some piece is being written by another connection: this frame must come again


class ReceiverTransfer:
    def __init__(self, grant: Grant, auth: bytes, receiver: BufferOwner, now: float) -> None:
        self.grant = grant
        self.auth = auth
        self.receiver = receiver
        self.state = TransferState.EXPECTED
        self.result: Ended | None = None
        self.writers = 0  # connections inside this transfer's buffers
        self.told_owner = False
        self.expires_s = now + grant.deadline_s
        self.manifest: Manifest | None = None
        self.received_bytes = 0  # verified
        self._buffers: Sequence[BufferSequence] = ()
        self._first_quantum: list[int] = []
        self._states = bytearray()
        self._missing = 0

    def renew(self, now: float) -> None:
        """A frame of this transfer has come."""
        self.expires_s = now + self.grant.deadline_s

    def check_manifest(self, manifest: Manifest) -> str | None:
        """Why this manifest is not within the grant, if it is not."""
        if self.manifest is not None:
            same = manifest == self.manifest
            return None if same else "another manifest than the one it was opened with"
        total = manifest.total_bytes
        if total > self.grant.max_bytes:
            return f"{total} bytes, granted are {self.grant.max_bytes}"
        if len({segment.name for segment in manifest.segments}) != len(manifest.segments):
            return "segment names repeat"
        return None

    def open(self, manifest: Manifest, buffers: Sequence[Sequence[memoryview]]) -> None:
        self.manifest = manifest
        self._buffers = [
            BufferSequence(segment.name, segment.nbytes, views)
            for segment, views in zip(manifest.segments, buffers, strict=True)
        ]
        quantum = manifest.quantum_bytes
        counts = [-(-segment.nbytes // quantum) for segment in manifest.segments]
        self._first_quantum = list(accumulate(counts, initial=0))
        self._missing = self._first_quantum[-1]
        self._states = bytearray(self._missing)
        self.state = TransferState.OPEN

    def claim(self, pieces: Sequence[SegmentPiece]) -> Claims:
        """Takes what is missing for the caller to write. The caller must `settle`."""
        assert self.manifest is not None
        quantum_bytes, segments = self.manifest.quantum_bytes, self.manifest.segments
        states, first_quantum = self._states, self._first_quantum
        mine: list[int] = []
        claimed_bytes = 0
        targets: list[list[memoryview] | None] = []
        busy = False
        try:
            for segment, _, offset, raw_bytes, _ in pieces:
                if segment >= len(segments):
                    raise WireError(f"segment {segment} of {len(segments)}")
                nbytes = segments[segment].nbytes
                if offset % quantum_bytes or offset >= nbytes:
                    raise WireError(f"offset {offset} of a segment of {nbytes} bytes")
                if raw_bytes != min(quantum_bytes, nbytes - offset):
                    raise WireError(f"a piece of {raw_bytes} bytes at {offset}")
                quantum = first_quantum[segment] + offset // quantum_bytes
                state = states[quantum]
                if state == MISSING:
                    states[quantum] = CLAIMED
                    mine.append(quantum)
                    claimed_bytes += raw_bytes
                    targets.append(self._buffers[segment].slices(offset, raw_bytes))
                else:
                    busy = busy or state == CLAIMED
                    targets.append(None)
        except WireError:
            self._release(mine)
            raise
        self.writers += 1
        return Claims(mine, claimed_bytes, targets, busy)

    def settle(self, claims: Claims, *, verified: bool) -> bool:
        """The caller has left the buffers. True when this completed the transfer."""
        self.writers -= 1
        if not verified or self.state is not TransferState.OPEN:
            self._release(claims.mine)
            return False
        for quantum in claims.mine:
            self._states[quantum] = VERIFIED
        self.received_bytes += claims.nbytes
        self._missing -= len(claims.mine)
        return self._missing == 0

    def end(self, result: Ended) -> None:
        """Idempotent: the first end counts."""
        if self.state is not TransferState.ENDED:
            self.state = TransferState.ENDED
            self.result = result

    def may_tell_owner(self) -> bool:
        """True once, when the transfer has ended and the last writer is gone."""
        if self.state is TransferState.ENDED and self.writers == 0 and not self.told_owner:
            self.told_owner = True
            self._buffers = ()
            return True
        return False

    def _release(self, quanta: Sequence[int]) -> None:
        for quantum in quanta:
            self._states[quantum] = MISSING
