"""The state that `SenderTransfers` and `ResponseHandler` share: the transfers of one link and their
byte counters, under one lock. No sockets.
"""

from __future__ import annotations

import threading
from collections import deque

from prfaas.errors import InputError, TransferFailed
from prfaas.transport.delivery import Delivery
from prfaas.transport.sender_transfer import SenderTransfer


class SenderState:
    """Every method and field requires that the caller holds `lock`."""

    __slots__ = ("delivery", "in_flight_bytes", "lock", "transfers", "turns")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.transfers: dict[bytes, SenderTransfer] = {}
        self.turns: dict[int, deque[SenderTransfer]] = {}  # per priority, in round-robin order
        self.in_flight_bytes = 0
        self.delivery = Delivery()

    def add(self, transfer: SenderTransfer) -> None:
        if transfer.transfer_id in self.transfers:
            raise InputError(
                "the grant is in use already", where="grant", fix="request another one"
            )
        self.transfers[transfer.transfer_id] = transfer
        self.turns.setdefault(transfer.priority, deque()).append(transfer)

    def has(self, transfer: SenderTransfer) -> bool:
        """Whether this transfer has not been removed yet. Its id may be in use again: a grant that
        is shown a second time makes another transfer."""
        return self.transfers.get(transfer.transfer_id) is transfer

    def outstanding_bytes(self) -> int:
        return sum(t.outstanding_bytes for t in self.transfers.values() if t.ended is None)

    def end(self, transfer: SenderTransfer, why: str) -> SenderTransfer | None:
        """Marks a transfer as ended; the first reason counts. Then the same as `finish`."""
        if transfer.ended is None:
            transfer.ended = why
        return self.finish(transfer)

    def finish(self, transfer: SenderTransfer) -> SenderTransfer | None:
        """Removes a transfer that has ended and whose buffers no connection reads. Returns it, so
        that the caller passes it to `set_done` after it has released the lock."""
        if transfer.ended is None or transfer.readers:
            return None
        if not self.has(transfer):
            return None
        del self.transfers[transfer.transfer_id]
        self.turns[transfer.priority].remove(transfer)
        self.in_flight_bytes -= transfer.in_flight_bytes
        return transfer


def set_done(transfer: SenderTransfer | None) -> None:
    """Call this without the lock: a Future runs its callbacks in the calling thread."""
    if transfer is None:
        return
    if transfer.ended:
        transfer.done.set_exception(TransferFailed(transfer.ended))
    else:
        transfer.done.set_result(None)
