"""All transfers of one receiver: granted, open, ended and remembered. Thread-safe, no sockets.

The receiver remembers an ended transfer for twice the grant's deadline. It can then answer a late
or repeated frame with the result, instead of rejecting the peer as unauthorized. The owner of the
memory is notified once, without the lock, and only when no connection writes to its buffers.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.clock import Clock
from prfaas.errors import InputError
from prfaas.transport.grants import transfer_key
from prfaas.transport.messages import Ended, Manifest
from prfaas.transport.receiver_transfer import BufferOwner, Claims, ReceiverTransfer, TransferState
from prfaas.transport.wire import Header, SegmentPiece, auth_of
from prfaas.types import Grant, TransferId

log = logging.getLogger(__name__)

MAX_REMEMBERED = 65_536  # ended transfers; beyond this number the oldest is forgotten


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    granted: int  # transfers that have not ended
    remembered: int
    received_bytes: int
    duplicate_bytes: int  # arrived again after they were verified, and were discarded
    committed: int
    aborted: int


class _EndedTransfer(NamedTuple):
    auth: bytes
    result: Ended
    until_s: float


class ReceiverTransfers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: dict[bytes, ReceiverTransfer] = {}
        self._remembered: dict[bytes, _EndedTransfer] = {}
        self._received_bytes = self._duplicate_bytes = self._committed = self._aborted = 0

    def expect(self, grant: Grant, owner: BufferOwner) -> Callable[[], int]:
        """Returns a function that says how many bytes of the transfer have arrived so far."""
        key = transfer_key(grant.transfer_id)
        with self._lock:
            if key in self._transfers or key in self._remembered:
                raise InputError(f"transfer {grant.transfer_id} was announced before")
            now = self._clock.now()
            made = ReceiverTransfer(grant, auth_of(grant.token), owner, now)
            self._transfers[key] = made
        return lambda: made.received_bytes

    def cancel(self, transfer_id: TransferId, reason: str) -> None:
        with self._lock:
            transfer = self._transfers.get(transfer_key(transfer_id))
        if transfer is not None:
            self.end(transfer, Ended(False, reason))

    def find(self, header: Header) -> ReceiverTransfer | Ended | None:
        """Returns the transfer that a frame belongs to, or how that transfer ended, or None when
        the frame shows no valid grant. A valid frame renews the grant's deadline."""
        with self._lock:
            transfer = self._transfers.get(header.transfer_id)
            if transfer is not None and hmac.compare_digest(transfer.auth, header.auth):
                transfer.renew(self._clock.now())
                return transfer.result or transfer
            ended = self._remembered.get(header.transfer_id)
            if ended is not None and hmac.compare_digest(ended.auth, header.auth):
                return ended.result
            return None

    def open(self, transfer: ReceiverTransfer, manifest: Manifest) -> str | None:
        """Opens the transfer; returns the reason when it is refused. Idempotent for an equal
        manifest."""
        with self._lock:
            refusal = transfer.check_manifest(manifest)
            if refusal is not None or transfer.state is not TransferState.EXPECTED:
                return refusal
        try:
            # Without the lock: this is the owner's code.
            buffers = transfer.owner.buffers(manifest)
            if isinstance(buffers, str):
                return buffers
            with self._lock:
                if transfer.state is TransferState.EXPECTED:
                    transfer.open(manifest, buffers)
        except Exception:
            # The owner's mistake ends this transfer, not the others of the connection.
            log.exception("transfer %s: the owner's buffers", transfer.grant.transfer_id)
            return "the receiver has no valid buffers for this manifest"
        return None

    def claim(
        self, transfer: ReceiverTransfer, pieces: Sequence[SegmentPiece], *, in_files: bool = False
    ) -> Claims | None:
        """Claims the missing pieces; the caller must `settle` the claims. Returns None when the
        transfer is not open."""
        with self._lock:
            if transfer.state is not TransferState.OPEN:
                return None
            return transfer.claim(pieces, in_files=in_files)

    def settle(self, transfer: ReceiverTransfer, claims: Claims, *, verified: bool) -> Ended | None:
        """The caller no longer writes to the transfer's buffers. Returns the result if the transfer
        has ended."""
        with self._lock:
            before = transfer.received_bytes
            if transfer.settle(claims, verified=verified):
                transfer.end(Ended(True))
            self._received_bytes += transfer.received_bytes - before
            result = transfer.result
        self._notify_owner(transfer)
        return result

    def count_duplicate(self, nbytes: int) -> None:
        with self._lock:
            self._duplicate_bytes += nbytes

    def end(self, transfer: ReceiverTransfer, result: Ended) -> None:
        with self._lock:
            transfer.end(result)
        self._notify_owner(transfer)

    def expire(self) -> None:
        """Ends expired transfers and forgets old results. The listener calls this regularly."""
        now = self._clock.now()
        with self._lock:
            expired = [t for t in self._transfers.values() if now >= t.expires_s]
            for key in [k for k, ended in self._remembered.items() if now >= ended.until_s]:
                del self._remembered[key]
        for transfer in expired:
            self.end(transfer, Ended(False, "grant expired: no frame arrived in time"))

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

    def _notify_owner(self, transfer: ReceiverTransfer) -> None:
        """Notifies the owner if the transfer has ended and no connection writes to its buffers."""
        with self._lock:
            if not transfer.take_owner_notice():
                return
            result = transfer.result
            assert result is not None
            key = transfer_key(transfer.grant.transfer_id)
            del self._transfers[key]
            until = self._clock.now() + 2 * transfer.grant.deadline_s
            self._remembered[key] = _EndedTransfer(transfer.auth, result, until)
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._committed += result.committed
            self._aborted += not result.committed
        try:
            if result.committed:
                transfer.owner.committed()
            else:
                transfer.owner.ended(result.reason)
        except Exception:
            # The calling thread serves other transfers, too.
            log.exception("transfer %s: the owner's notice", transfer.grant.transfer_id)
