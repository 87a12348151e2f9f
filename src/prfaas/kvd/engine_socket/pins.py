"""Prefixes that engines read: pinned in memory until the engine releases them."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.cache.lease import LeaseId
from prfaas.clock import Clock
from prfaas.kvd.engine_socket.messages import LeaseTicket, units_of
from prfaas.kvd.store import Storage, Store
from prfaas.types import BlockHash, NotNow


class PinnedPrefixes:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def pin(self, storage: Storage, hashes: Sequence[bytes]) -> LeaseTicket | NotNow:
        names = [BlockHash(name) for name in hashes]
        lease = storage.pool.pin(names, now=self._clock.now())
        if isinstance(lease, NotNow):
            self._store.publish_changes()
            return lease
        try:
            self._store.publish_changes()
            return LeaseTicket(
                lease_id=lease.id,
                tokens=lease.tokens,
                match_tokens=lease.match.tokens,
                skip_tokens=dict(lease.skip_tokens),
                checkpoint_tokens=(),
                readable=units_of(storage.pool.tables(lease.id).readable),
                writable=(),
            )
        except BaseException:  # the engine gets no ticket, so it could never release the pin
            storage.pool.release(lease.id, self._clock.now())
            raise

    def release(self, lease_id: int) -> None:
        for storage in self._store.storages:  # the ids of two pools never meet
            storage.pool.release(LeaseId(lease_id), self._clock.now())
        self._store.publish_changes()
