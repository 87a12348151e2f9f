"""Prefixes that engines read: held in memory until they let go."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.cache.lease import LeaseId
from prfaas.clock import Clock
from prfaas.kvd.engine_socket.messages import Ticket, units_of
from prfaas.kvd.store import Store
from prfaas.kvd.transfers.incoming import UNREGISTERED, patient
from prfaas.types import BlockHash, NotNow


class Pins:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def pin(self, hashes: Sequence[bytes]) -> Ticket | NotNow:
        shelf = self._store.shelf
        if shelf is None:
            return UNREGISTERED
        names = [BlockHash(name) for name in hashes]
        lease = shelf.pool.pin(names, now=self._clock.now())
        self._store.changed()
        if isinstance(lease, NotNow):
            return patient(lease)
        return Ticket(
            lease_id=lease.id,
            tokens=lease.tokens,
            match_tokens=lease.match.tokens,
            skip_tokens=dict(lease.skip_tokens),
            checkpoint_tokens=(),
            readable=units_of(shelf.pool.tables(lease.id).readable),
            writable=(),
        )

    def release(self, lease_id: int) -> None:
        if self._store.shelf is not None:
            self._store.shelf.pool.release(LeaseId(lease_id), self._clock.now())
            self._store.changed()
