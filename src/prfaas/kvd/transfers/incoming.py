"""Incoming transfers: granted, landing, committed, attached by an engine, released.

Runs on the loop that owns the pool; the listener's threads only signal it. Whatever happens, the
pages of a transfer go back once, and only when nobody writes to them any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from functools import partial

import msgspec

from prfaas.cache.lease import Lease
from prfaas.clock import Clock
from prfaas.errors import TransferFailed
from prfaas.kvd.engine_socket.messages import Ticket, units_of
from prfaas.kvd.store import Shelf, Store
from prfaas.kvd.transfers.landing import Landing
from prfaas.kvd.transfers.manifest import owed
from prfaas.kvd.transfers.states import IncomingLife, Stage
from prfaas.transport.grants import new_grant
from prfaas.transport.listener import Listener
from prfaas.types import BlockHash, Compat, Grant, NotNow, OpenTransfer, TransferId

log = logging.getLogger(__name__)

UNREGISTERED = NotNow("no engine has registered with this kvd yet", 1.0)
LONGEST_RETRY_S = 3600.0


@dataclass(frozen=True, slots=True)
class TransferOptions:
    grant_s: float = 60.0  # without a frame, a grant ends after this
    dispatch_s: float = 30.0  # without a poll, a committed transfer ends after this
    remember_s: float = 120.0  # how one has ended is known for so long


class TransferStatus(msgspec.Struct, frozen=True):
    transfer_id: TransferId
    state: str  # a `Stage`, or of a transfer that leaves here: sending, sent, failed
    reason: str
    nbytes: int


@dataclass(slots=True)
class _Arrival:
    grant: Grant
    shelf: Shelf
    lease: Lease
    life: IncomingLife
    hashes: tuple[bytes, ...]  # of the prompt's whole blocks
    landing: Landing | None = None  # None: nothing has to come
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended_s: float = math.inf


class IncomingTransfers:
    def __init__(
        self,
        store: Store,
        listener: Listener,
        data_address: str,
        options: TransferOptions,
        clock: Clock,
    ) -> None:
        self._store = store
        self._listener = listener
        self._data_address = data_address
        self._options = options
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._arrivals: dict[TransferId, _Arrival] = {}
        self._attached: dict[int, TransferId] = {}  # by lease

    def differences(self, compat: Compat) -> tuple[str, ...]:
        """Why state of such an engine is of no use here."""
        shelf = self._store.shelf
        return () if shelf is None else shelf.compat.differences(compat)

    def open(self, asked: OpenTransfer) -> Grant | NotNow:
        """Reserves everything the hand-off needs, and pins what it lets the sender skip; or
        nothing. The caller has looked at `differences`."""
        shelf = self._store.shelf
        if shelf is None:
            return UNREGISTERED
        promised = () if asked.checkpoint_tokens is None else (asked.checkpoint_tokens,)
        hashes = [BlockHash(name) for name in asked.hashes]
        # No deadline of the pool's: until the commit the listener knows when nobody writes any
        # more, afterwards the transfer's own life does.
        lease = shelf.pool.reserve(
            hashes,
            asked.handoff_tokens,
            now=self._clock.now(),
            checkpoint_tokens=promised,
        )
        self._store.changed()
        if isinstance(lease, NotNow):
            return patient(lease)
        grant = new_grant(
            self._data_address,
            max_bytes=lease.new_bytes,
            deadline_s=self._options.grant_s,
            skip_tokens=lease.skip_tokens,
            checkpoint_tokens=[n for n in lease.checkpoint_tokens if n != lease.tokens],
        )
        life = IncomingLife(self._options.dispatch_s)
        arrival = _Arrival(grant, shelf, lease, life, asked.hashes)
        self._arrivals[grant.transfer_id] = arrival
        if lease.new_bytes:
            self._expect(arrival)
        else:
            self._over(grant.transfer_id, None)  # everything is here: nothing has to come
        return grant

    def status(self, transfer_id: TransferId) -> TransferStatus | None:
        """How it stands. Asking renews a committed transfer: only gateways ask."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is None:
            return None
        arrival.life.polled(self._clock.now())
        life = arrival.life
        return TransferStatus(transfer_id, life.stage.value, life.reason, arrival.grant.max_bytes)

    async def wait(self, transfer_id: TransferId, wait_s: float) -> TransferStatus | None:
        """`status`, once it is more than granted, or after `wait_s`."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is not None and arrival.life.stage is Stage.GRANTED:
            try:
                async with asyncio.timeout(wait_s):
                    await arrival.changed.wait()
            except TimeoutError:
                pass
        return self.status(transfer_id)

    def abort(self, transfer_id: TransferId, reason: str) -> bool:
        """Whether there was something to abort. An attached transfer is its engine's."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is None or arrival.life.stage not in (Stage.GRANTED, Stage.COMMITTED):
            return False
        arrival.life.aborting = reason
        if arrival.life.stage is Stage.GRANTED:
            self._listener.cancel(transfer_id, reason)  # `_over` follows
        else:
            self._fail(arrival, reason)
        return True

    def attach(self, transfer_id: TransferId) -> Ticket:
        """The engine's request owns it from now on; TransferFailed when there is nothing."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is None:
            raise TransferFailed(f"transfer {transfer_id} is not known here")
        arrival.life.attach()
        arrival.changed.set()
        lease = arrival.lease
        self._attached[lease.id] = transfer_id
        return Ticket(
            lease_id=lease.id,
            tokens=lease.tokens,
            match_tokens=lease.tokens,
            skip_tokens=dict(lease.skip_tokens),
            checkpoint_tokens=lease.checkpoint_tokens,
            readable=units_of(arrival.shelf.pool.tables(lease.id).readable),
            writable=(),
            hashes=arrival.hashes,
            tail=arrival.landing.tail if arrival.landing is not None else b"",
        )

    def release(self, lease_id: int) -> bool:
        """The engine reads it no more. False when it is not an attached transfer."""
        transfer_id = self._attached.pop(lease_id, None)
        if transfer_id is None:
            return False
        arrival = self._arrivals[transfer_id]
        arrival.life.release()
        self._free(arrival)
        return True

    def take_prefix(self, transfer_id: TransferId) -> None:
        """Committed for the pool alone: its pages stay as prefix, nobody attaches."""
        self.release(self.attach(transfer_id).lease_id)

    def sweep(self) -> None:
        now = self._clock.now()
        for arrival in list(self._arrivals.values()):
            if arrival.life.expired(now):
                self._fail(arrival, "committed, but no gateway asked for it in time")
            elif now - arrival.ended_s >= self._options.remember_s:
                del self._arrivals[arrival.grant.transfer_id]

    def counts(self) -> dict[str, int]:
        counts = {stage.value: 0 for stage in Stage}
        for arrival in self._arrivals.values():
            counts[arrival.life.stage.value] += 1
        return counts

    def _expect(self, arrival: _Arrival) -> None:
        lease, shelf, grant = arrival.lease, arrival.shelf, arrival.grant
        wanted = owed(
            shelf.spec,
            lease.tokens,
            skip_tokens=lease.skip_tokens,
            lengths=(*lease.checkpoint_tokens, lease.tokens),
            whole=shelf.whole,
        )
        over = partial(self._signal, grant.transfer_id)
        table = shelf.pool.tables(lease.id).writable
        arrival.landing = Landing(shelf, table, wanted, over)
        self._listener.expect(grant, arrival.landing)

    def _signal(self, transfer_id: TransferId, reason: str | None) -> None:
        """From a thread of the listener's."""
        self._loop.call_soon_threadsafe(self._over, transfer_id, reason)

    def _over(self, transfer_id: TransferId, reason: str | None) -> None:
        arrival = self._arrivals[transfer_id]
        now = self._clock.now()
        if reason is not None:
            self._fail(arrival, reason)
        elif arrival.life.committed(now):
            arrival.shelf.pool.commit(arrival.lease.id, now)
            self._store.changed()
            log.info(
                "transfer %s committed: %d tokens, at most %d bytes",
                transfer_id,
                arrival.lease.tokens,
                arrival.grant.max_bytes,
            )
        else:
            self._free(arrival)
        arrival.changed.set()

    def _fail(self, arrival: _Arrival, reason: str) -> None:
        arrival.life.failed(reason)
        arrival.changed.set()
        log.info("transfer %s failed: %s", arrival.grant.transfer_id, arrival.life.reason)
        self._free(arrival)

    def _free(self, arrival: _Arrival) -> None:
        now = self._clock.now()
        arrival.ended_s = now
        # It is remembered for minutes, for its state: not with every page and name it had.
        arrival.landing, arrival.hashes = None, ()
        arrival.shelf.pool.release(arrival.lease.id, now)
        self._store.changed()


def patient(refusal: NotNow) -> NotNow:
    """A lease without a deadline says nothing about when it ends."""
    if refusal.retry_after_s <= LONGEST_RETRY_S:
        return refusal
    return NotNow(refusal.reason, UNREGISTERED.retry_after_s)
