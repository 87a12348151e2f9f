"""All transfers of one receiver: granted, open, ended and remembered. Thread-safe, no sockets.

Ended transfers are remembered for twice their lease, so that a late or repeated frame is answered
with how it ended instead of being taken for an intruder's. Owners are told outside the lock, once,
and only when nobody writes to their buffers any more.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.errors import InputError
from prfaas.transport.grants import transfer_key
from prfaas.transport.messages import Ended, Manifest
from prfaas.transport.receiver_transfer import BufferOwner, Claims, ReceiverTransfer, TransferState
from prfaas.transport.wire import Header, SegmentPiece, auth_of
from prfaas.types import Grant, TransferId


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    granted: int  # transfers that have not ended
    remembered: int
    received_bytes: int
    duplicate_bytes: int  # came again after they were verified; drained to scratch
    committed: int
    aborted: int


class _Memory(NamedTuple):
    auth: bytes
    result: Ended
    until_s: float


class ReceiverTransfers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: dict[bytes, ReceiverTransfer] = {}
        self._remembered: dict[bytes, _Memory] = {}
        self._received_bytes = self._duplicate_bytes = self._committed = self._aborted = 0

    def expect(self, grant: Grant, receiver: BufferOwner) -> None:
        key = transfer_key(grant.transfer_id)
        with self._lock:
            if key in self._transfers or key in self._remembered:
                raise InputError(f"transfer {grant.transfer_id} was granted before")
            now = self._clock.now()
            self._transfers[key] = ReceiverTransfer(grant, auth_of(grant.token), receiver, now)

    def cancel(self, transfer_id: TransferId, reason: str) -> None:
        with self._lock:
            transfer = self._transfers.get(transfer_key(transfer_id))
        if transfer is not None:
            self.end(transfer, Ended(False, reason))

    def find(self, header: Header) -> ReceiverTransfer | Ended | None:
        """The transfer a frame belongs to, how it ended, or None: it has no business here. A
        valid frame renews the lease."""
        with self._lock:
            transfer = self._transfers.get(header.transfer_id)
            if transfer is not None and hmac.compare_digest(transfer.auth, header.auth):
                transfer.renew(self._clock.now())
                return transfer.result or transfer
            memory = self._remembered.get(header.transfer_id)
            if memory is not None and hmac.compare_digest(memory.auth, header.auth):
                return memory.result
            return None

    def open(self, transfer: ReceiverTransfer, manifest: Manifest) -> str | None:
        """Why not, if not. Idempotent for the same manifest."""
        with self._lock:
            refusal = transfer.check_manifest(manifest)
            if refusal is not None or transfer.state is not TransferState.EXPECTED:
                return refusal
        buffers = transfer.receiver.buffers(manifest)  # outside the lock: it is the owner's code
        if isinstance(buffers, str):
            return buffers
        with self._lock:
            if transfer.state is TransferState.EXPECTED:
                transfer.open(manifest, buffers)
        return None

    def claim(self, transfer: ReceiverTransfer, pieces: Sequence[SegmentPiece]) -> Claims | None:
        """None where the transfer is not open (any more). Else the caller must `settle`."""
        with self._lock:
            return transfer.claim(pieces) if transfer.state is TransferState.OPEN else None

    def settle(self, transfer: ReceiverTransfer, claims: Claims, *, verified: bool) -> Ended | None:
        """The caller has left the transfer's buffers. How it ended, if it has."""
        with self._lock:
            before = transfer.received_bytes
            if transfer.settle(claims, verified=verified):
                transfer.end(Ended(True))
            self._received_bytes += transfer.received_bytes - before
            result = transfer.result
        self._tell_owner(transfer)
        return result

    def drained(self, nbytes: int) -> None:
        with self._lock:
            self._duplicate_bytes += nbytes

    def end(self, transfer: ReceiverTransfer, result: Ended) -> None:
        with self._lock:
            transfer.end(result)
        self._tell_owner(transfer)

    def tidy(self) -> None:
        """Ends what nobody renews, forgets what is long over. To be called every now and then."""
        now = self._clock.now()
        with self._lock:
            expired = [t for t in self._transfers.values() if now >= t.expires_s]
            for key in [k for k, memory in self._remembered.items() if now >= memory.until_s]:
                del self._remembered[key]
        for transfer in expired:
            self.end(transfer, Ended(False, "lease expired: no frame came in time"))

    def end_all(self, reason: str) -> None:
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            self.end(transfer, Ended(False, reason))

    def stats(self) -> ReceiverStats:
        with self._lock:
            return ReceiverStats(
                granted=len(self._transfers),
                remembered=len(self._remembered),
                received_bytes=self._received_bytes,
                duplicate_bytes=self._duplicate_bytes,
                committed=self._committed,
                aborted=self._aborted,
            )

    def _tell_owner(self, transfer: ReceiverTransfer) -> None:
        """Called by whoever may have been the last to leave."""
        with self._lock:
            if not transfer.may_tell_owner():
                return
            result = transfer.result
            assert result is not None
            key = transfer_key(transfer.grant.transfer_id)
            del self._transfers[key]
            until = self._clock.now() + 2 * transfer.grant.deadline_s
            self._remembered[key] = _Memory(transfer.auth, result, until)
            self._committed += result.committed
            self._aborted += not result.committed
        if result.committed:
            transfer.receiver.committed()
        else:
            transfer.receiver.ended(result.reason)
