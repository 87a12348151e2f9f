"""Incoming transfers: granted, received, committed, attached by an engine, released.

Runs on the event loop that owns the pool; the listener's threads only signal it. In every case the
pages of a transfer are released exactly once, and only after the last connection has stopped
writing to them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from functools import partial

from prfaas.cache.lease import Lease
from prfaas.clock import Clock
from prfaas.config.host import KvdTimeouts
from prfaas.contracts.kvd_api import OpenTransfer, TransferStatus
from prfaas.errors import TransferFailed
from prfaas.kvd.engine_socket.messages import LeaseTicket, units_of
from prfaas.kvd.store import Storage, Store
from prfaas.kvd.transfers.manifest import required_state
from prfaas.kvd.transfers.page_receiver import PageReceiver
from prfaas.kvd.transfers.states import IncomingStage, IncomingState
from prfaas.transport.grants import new_grant
from prfaas.transport.listener import Listener
from prfaas.types import BlockHash, Compat, Grant, NotNow, TransferId

log = logging.getLogger(__name__)

NO_ENGINE = NotNow("no engine has registered with this kvd yet", 1.0)
LONGEST_RETRY_S = 3600.0


@dataclass(slots=True)
class _IncomingTransfer:
    grant: Grant
    storage: Storage
    lease: Lease
    state: IncomingState
    hashes: tuple[bytes, ...]  # of the prompt's whole blocks
    receiver: PageReceiver | None = None  # None: the pool already had every byte
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended_s: float = math.inf


class IncomingTransfers:
    def __init__(
        self,
        store: Store,
        listener: Listener,
        data_address: str,
        timeouts: KvdTimeouts,
        clock: Clock,
    ) -> None:
        self.data_address = data_address  # where senders connect to
        self._store = store
        self._listener = listener
        self._timeouts = timeouts
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[TransferId, _IncomingTransfer] = {}
        self._attached: dict[int, TransferId] = {}  # by lease

    def differences(self, compat: Compat) -> tuple[str, ...]:
        """The fields in which the state of such an engine differs from the state kept here."""
        storage = self._store.storage
        return () if storage is None else storage.compat.differences(compat)

    def open(self, request: OpenTransfer) -> Grant | NotNow:
        """Reserves everything that the hand-off needs, and pins what the sender may skip; or
        reserves nothing. The caller has checked `differences`."""
        storage = self._store.storage
        if storage is None:
            return NO_ENGINE
        wanted = () if request.checkpoint_tokens is None else (request.checkpoint_tokens,)
        hashes = [BlockHash(name) for name in request.hashes]
        # The pool sets no deadline: until the commit the listener reports when nothing writes to
        # the pages any more, and after it the state of the transfer has the deadline.
        lease = storage.pool.reserve(
            hashes,
            request.handoff_tokens,
            now=self._clock.now(),
            checkpoint_tokens=wanted,
        )
        self._store.publish_changes()
        if isinstance(lease, NotNow):
            return bound_retry(lease)
        grant = new_grant(
            self.data_address,
            max_bytes=lease.new_bytes,
            deadline_s=self._timeouts.grant_s,
            skip_tokens=lease.skip_tokens,
            checkpoint_tokens=[n for n in lease.checkpoint_tokens if n != lease.tokens],
        )
        state = IncomingState(self._timeouts.dispatch_s)
        transfer = _IncomingTransfer(grant, storage, lease, state, request.hashes)
        self._transfers[grant.transfer_id] = transfer
        if lease.new_bytes:
            self._expect(transfer)
        else:
            self._ended(grant.transfer_id, None)  # the pool has every byte: nothing is sent
        return grant

    def status(self, transfer_id: TransferId) -> TransferStatus | None:
        """The status of a transfer. Reading it renews a committed transfer, because only gateways
        read it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return None
        state = transfer.state
        state.renew(self._clock.now())
        nbytes = transfer.grant.max_bytes
        return TransferStatus(transfer_id, state.stage.value, state.reason, nbytes)

    async def wait(self, transfer_id: TransferId, wait_s: float) -> TransferStatus | None:
        """The status once the transfer has left GRANTED, or after `wait_s`."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.state.stage is IncomingStage.GRANTED:
            try:
                async with asyncio.timeout(wait_s):
                    await transfer.changed.wait()
            except TimeoutError:
                pass
        return self.status(transfer_id)

    def abort(self, transfer_id: TransferId, reason: str) -> bool:
        """Whether there was a transfer to abort. An attached transfer belongs to its engine."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        state = transfer.state
        if state.stage not in (IncomingStage.GRANTED, IncomingStage.COMMITTED):
            return False
        state.aborting = reason
        if state.stage is IncomingStage.GRANTED:
            self._listener.cancel(transfer_id, reason)  # which calls `_ended` later
        else:
            self._fail(transfer, reason)
        return True

    def attach(self, transfer_id: TransferId) -> LeaseTicket:
        """From now on the lease belongs to the engine's request. TransferFailed when the transfer
        is unknown, not committed, failed, or already attached."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise TransferFailed(f"transfer {transfer_id} is not known here")
        transfer.state.attach()
        transfer.changed.set()
        lease = transfer.lease
        self._attached[lease.id] = transfer_id
        return LeaseTicket(
            lease_id=lease.id,
            tokens=lease.tokens,
            match_tokens=lease.tokens,
            skip_tokens=dict(lease.skip_tokens),
            checkpoint_tokens=lease.checkpoint_tokens,
            readable=units_of(transfer.storage.pool.tables(lease.id).readable),
            writable=(),
            hashes=transfer.hashes,
            tail=transfer.receiver.tail if transfer.receiver is not None else b"",
        )

    def release(self, lease_id: int, problem: str = "") -> bool:
        """The engine has finished reading. False when the lease is not an attached transfer.
        `problem`: why the engine could not use it, for the status."""
        transfer_id = self._attached.pop(lease_id, None)
        if transfer_id is None:
            return False
        transfer = self._transfers[transfer_id]
        transfer.state.release(problem)
        self._free(transfer)
        return True

    def keep_prefix(self, transfer_id: TransferId) -> None:
        """Ends a committed transfer that no engine will attach: its pages stay as a prefix."""
        self.release(self.attach(transfer_id).lease_id)

    def sweep(self) -> None:
        """Fails committed transfers that no gateway polls, and forgets old ended ones."""
        now = self._clock.now()
        for transfer in list(self._transfers.values()):
            if transfer.state.expired(now):
                self._fail(transfer, "committed, but no gateway asked for it in time")
            elif now - transfer.ended_s >= self._timeouts.remember_s:
                del self._transfers[transfer.grant.transfer_id]

    def counts(self) -> dict[str, int]:
        counts = {stage.value: 0 for stage in IncomingStage}
        for transfer in self._transfers.values():
            counts[transfer.state.stage.value] += 1
        return counts

    def _expect(self, transfer: _IncomingTransfer) -> None:
        lease, storage, grant = transfer.lease, transfer.storage, transfer.grant
        required = required_state(
            storage.spec,
            lease.tokens,
            skip_tokens=lease.skip_tokens,
            lengths=(*lease.checkpoint_tokens, lease.tokens),
            whole=storage.whole,
        )
        on_end = partial(self._signal_end, grant.transfer_id)
        table = storage.pool.tables(lease.id).writable
        transfer.receiver = PageReceiver(storage, table, required, on_end)
        self._listener.expect(grant, transfer.receiver)

    def _signal_end(self, transfer_id: TransferId, reason: str | None) -> None:
        """Called from a thread of the listener."""
        self._loop.call_soon_threadsafe(self._ended, transfer_id, reason)

    def _ended(self, transfer_id: TransferId, reason: str | None) -> None:
        transfer = self._transfers[transfer_id]
        now = self._clock.now()
        if reason is not None:
            self._fail(transfer, reason)
        elif transfer.state.commit(now):
            transfer.storage.pool.commit(transfer.lease.id, now)
            self._store.publish_changes()
            log.info(
                "transfer %s committed: %d tokens, at most %d bytes",
                transfer_id,
                transfer.lease.tokens,
                transfer.grant.max_bytes,
            )
        else:
            self._free(transfer)
        transfer.changed.set()

    def _fail(self, transfer: _IncomingTransfer, reason: str) -> None:
        transfer.state.fail(reason)
        transfer.changed.set()
        log.info("transfer %s failed: %s", transfer.grant.transfer_id, transfer.state.reason)
        self._free(transfer)

    def _free(self, transfer: _IncomingTransfer) -> None:
        now = self._clock.now()
        transfer.ended_s = now
        # The status is kept for minutes; the page table and the hashes are not needed for it.
        transfer.receiver, transfer.hashes = None, ()
        transfer.storage.pool.release(transfer.lease.id, now)
        self._store.publish_changes()


def bound_retry(refusal: NotNow) -> NotNow:
    """The refusal with a finite retry time: leases without a deadline do not determine one."""
    if refusal.retry_after_s <= LONGEST_RETRY_S:
        return refusal
    return NotNow(refusal.reason, NO_ENGINE.retry_after_s)
