"""One transfer at its receiver: which bytes are in place, how many connections write, how it ended.

No sockets and no locks: `ReceiverTransfers` calls it under its lock. Each quantum of each segment
is MISSING, CLAIMED (one connection is writing it) or VERIFIED. A connection never writes to a range
that another connection writes or that is verified: it discards such bytes into a scratch buffer.
The owner gets its buffers back only when the last writer has finished.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from prfaas.errors import WireError
from prfaas.transport.buffers import (
    DISCARDED,
    BufferSequence,
    FileRange,
    FileSlice,
    add_ranges,
    check_buffers,
    is_on_file,
    slices_of,
)
from prfaas.transport.messages import Ended, Manifest
from prfaas.transport.wire import SegmentPiece
from prfaas.types import Grant

MISSING, CLAIMED, VERIFIED = 0, 1, 2


class BufferOwner(Protocol):
    """The owner of the memory that a transfer writes to. The listener's threads call it and hold
    no lock during the call. Its methods must not block for long."""

    def buffers(self, manifest: Manifest) -> Sequence[Sequence[memoryview | FileSlice]] | str:
        """Returns, for each segment, writable byte views of exactly the segment's size in total; or
        the reason for refusing the transfer. A worker process writes to the files of `FileSlice`s
        without the help of this process."""

    def committed(self) -> None:
        """Every byte of every segment is in place and verified. No connection writes any more."""

    def ended(self, reason: str) -> None:
        """The transfer ended without a commit. No connection writes any more."""


class TransferState(enum.Enum):
    EXPECTED = "expected"  # granted, no manifest yet
    OPEN = "open"
    ENDED = "ended"


class Claims(NamedTuple):
    """What `ReceiverTransfer.claim` decided about the pieces of a frame."""

    quanta: list[int]  # quanta that this frame writes
    nbytes: int  # size of those quanta
    targets: list[list[memoryview] | None]  # per piece: where to write; None: discard
    files: list[FileRange]  # the same in files, instead of `targets`; see `DISCARDED`
    busy: bool  # another connection is writing some piece: the sender must resend this frame


class ReceiverTransfer:
    def __init__(self, grant: Grant, auth: bytes, owner: BufferOwner, now: float) -> None:
        self.grant = grant
        self.auth = auth
        self.owner = owner
        self.state = TransferState.EXPECTED
        self.result: Ended | None = None
        self.writers = 0  # connections that write to this transfer's buffers
        self._owner_notified = False
        self.expires_s = now + grant.deadline_s
        self.manifest: Manifest | None = None
        self.received_bytes = 0  # verified
        self._buffers: Sequence[BufferSequence | FileSlice] = ()
        self.on_file = False  # all bytes lie in files
        self._first_quantum: list[int] = []
        self._states = bytearray()
        self._missing = 0

    def renew(self, now: float) -> None:
        """A frame of this transfer arrived."""
        self.expires_s = now + self.grant.deadline_s

    def check_manifest(self, manifest: Manifest) -> str | None:
        """Returns why the grant does not cover this manifest, or None when it does."""
        if self.manifest is not None:
            same = manifest == self.manifest
            return None if same else "the transfer was opened with another manifest"
        total = manifest.total_bytes
        if total > self.grant.max_bytes:
            return f"the transfer has {total} bytes, but the grant allows {self.grant.max_bytes}"
        if len({segment.name for segment in manifest.segments}) != len(manifest.segments):
            return "segment names are not unique"
        return None

    def open(self, manifest: Manifest, buffers: Sequence[Sequence[memoryview | FileSlice]]) -> None:
        """Raises an error, and changes nothing, when the buffers do not fit the manifest."""
        placed = [
            check_buffers(segment.name, segment.nbytes, views)
            for segment, views in zip(manifest.segments, buffers, strict=True)
        ]
        self.manifest, self._buffers = manifest, placed
        self.on_file = all(map(is_on_file, placed))
        quantum = manifest.quantum_bytes
        counts = [-(-segment.nbytes // quantum) for segment in manifest.segments]
        self._first_quantum = list(accumulate(counts, initial=0))
        self._missing = self._first_quantum[-1]
        self._states = bytearray(self._missing)
        self.state = TransferState.OPEN

    def claim(self, pieces: Sequence[SegmentPiece], *, in_files: bool = False) -> Claims:
        """Claims the missing pieces for the caller, which must `settle` them. With `in_files` the
        claims have `files` instead of `targets`; the transfer must be `on_file` then."""
        assert self.manifest is not None
        quantum_bytes, segments = self.manifest.quantum_bytes, self.manifest.segments
        states, first_quantum = self._states, self._first_quantum
        quanta: list[int] = []
        claimed_bytes = 0
        targets: list[list[memoryview] | None] = []
        files: list[FileRange] = []
        busy = False
        try:
            for segment, _, offset, raw_bytes, _ in pieces:
                if segment >= len(segments):
                    raise WireError(
                        f"segment index {segment}, but the manifest has {len(segments)} segments"
                    )
                nbytes = segments[segment].nbytes
                if offset % quantum_bytes or offset >= nbytes:
                    raise WireError(f"invalid offset {offset} in a segment of {nbytes} bytes")
                if raw_bytes != min(quantum_bytes, nbytes - offset):
                    raise WireError(f"invalid piece of {raw_bytes} bytes at offset {offset}")
                quantum = first_quantum[segment] + offset // quantum_bytes
                state = states[quantum]
                if state == MISSING:
                    states[quantum] = CLAIMED
                    quanta.append(quantum)
                    claimed_bytes += raw_bytes
                    if in_files:
                        add_ranges(self._buffers[segment], offset, raw_bytes, files)
                    else:
                        targets.append(slices_of(self._buffers[segment], offset, raw_bytes))
                else:
                    busy = busy or state == CLAIMED
                    if in_files:
                        files.append(FileRange(DISCARDED, 0, raw_bytes))
                    else:
                        targets.append(None)
        except WireError:
            self._release(quanta)
            raise
        self.writers += 1
        return Claims(quanta, claimed_bytes, targets, files, busy)

    def settle(self, claims: Claims, *, verified: bool) -> bool:
        """The caller no longer writes to the buffers. Returns whether the transfer is complete."""
        self.writers -= 1
        if not verified or self.state is not TransferState.OPEN:
            self._release(claims.quanta)
            return False
        for quantum in claims.quanta:
            self._states[quantum] = VERIFIED
        self.received_bytes += claims.nbytes
        self._missing -= len(claims.quanta)
        return self._missing == 0

    def end(self, result: Ended) -> None:
        """Ends the transfer. Idempotent: the first result counts."""
        if self.state is not TransferState.ENDED:
            self.state = TransferState.ENDED
            self.result = result

    def take_owner_notice(self) -> bool:
        """Returns True once: when the transfer has ended and the last writer has finished."""
        if self.state is TransferState.ENDED and self.writers == 0 and not self._owner_notified:
            self._owner_notified = True
            self._buffers = ()
            return True
        return False

    def _release(self, quanta: Sequence[int]) -> None:
        for quantum in quanta:
            self._states[quantum] = MISSING
