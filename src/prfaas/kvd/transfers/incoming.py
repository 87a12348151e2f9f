"""Incoming transfers: granted, received, committed, attached by an engine, released. An engine may
attach one transfer several times; each attachment is a lease on the same pages.

Runs on the event loop that owns the pool; the listener's threads only signal it. In every case the
pages of a transfer are released exactly once, and only after the last connection has stopped
writing to them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prfaas.cache.lease import Lease
from prfaas.clock import Clock
from prfaas.config.host import KvdTimeouts
from prfaas.contracts.kvd_api import OpenTransfer, TransferStatus
from prfaas.errors import InputError, TransferFailed
from prfaas.kvd.engine_socket.messages import LeaseTicket, units_of
from prfaas.kvd.store import Storage, Store
from prfaas.kvd.transfers.manifest import required_state
from prfaas.kvd.transfers.page_receiver import PageReceiver
from prfaas.kvd.transfers.states import IncomingStage, IncomingState
from prfaas.kvd.transfers.transfer_spans import record_transfer
from prfaas.tracing.context import TraceContext
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.spans import KVD_RECEIVE
from prfaas.transport.grants import is_transfer_id, new_grant
from prfaas.transport.listener import Listener
from prfaas.types import BlockHash, Form, Grant, NotNow, TransferId

log = logging.getLogger(__name__)

NO_ENGINE = NotNow("no engine has registered with this kvd yet", 1.0)
# Aborts of transfers that are not known here. An abort can overtake the open that it belongs to,
# but not by thousands of other aborts.
REMEMBERED_ABORTS = 4_096


@dataclass(slots=True)
class _IncomingTransfer:
    grant: Grant
    storage: Storage
    lease: Lease
    state: IncomingState
    request: OpenTransfer | None  # None after the end: it is as long as the prompt
    granted_s: float
    receiver: PageReceiver | None = None  # None: the pool already had every byte
    arrived: Callable[[], int] | None = None  # None: it needs no byte, or has ended
    arrived_bytes: int = 0  # when it ended
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended_s: float = math.inf
    engine: int | None = None  # the connection that has attached it first


class IncomingTransfers:
    def __init__(
        self,
        store: Store,
        listener: Listener,
        data_address: str,
        timeouts: KvdTimeouts,
        clock: Clock,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.data_address = data_address  # where senders connect to
        self._store = store
        self._listener = listener
        self._timeouts = timeouts
        self._clock = clock
        self._recorder = recorder or SpanRecorder("kvd", clock)
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[TransferId, _IncomingTransfer] = {}
        self._attached: dict[int, TransferId] = {}  # by lease
        # Ids that were aborted before they were opened, and when; oldest first.
        self._aborted: OrderedDict[TransferId, float] = OrderedDict()
        self._refusal: NotNow | None = None
        self.committed: Counter[Form] = Counter()  # transfers, also those that needed no byte

    def refuse_new(self, refusal: NotNow) -> None:
        """From now on nothing is granted. What has been granted goes on."""
        self._refusal = refusal

    async def open_prepared(
        self, request: OpenTransfer, trace: TraceContext | None = None
    ) -> Grant | NotNow:
        """As `open`; with an SSD tier the kvd first waits until a thread has made room and has
        read back what the transfer may skip."""
        if (grant := self._granted_before(request)) is not None:
            return grant
        if self._refusal is not None:
            return self._refusal
        wanted = _checkpoints(request)
        storage = self._store.storage_of(request.compat)
        async with self._store.prepared(
            storage, request.hashes, request.handoff_tokens, wanted, tenant=request.tenant
        ):
            return self.open(request, trace)

    def open(self, request: OpenTransfer, trace: TraceContext | None = None) -> Grant | NotNow:
        """Reserves everything that the hand-off needs, and pins what the sender may skip; or
        reserves nothing. The caller has checked the store's `differences`: here state of another
        engine is only not granted.

        An id that has a grant for an equal request gets the same grant: a proxy may repeat a POST.
        InputError when the id is not a UUID or belongs to another request, TransferFailed when the
        transfer with this id has ended, perhaps before it was opened.

        `trace`: the parent of the transfer's spans, here and at the sender."""
        if (grant := self._granted_before(request)) is not None:
            return grant
        if self._refusal is not None:
            return self._refusal
        storage = self._store.storage_of(request.compat)
        if storage is None:
            return NO_ENGINE
        # The pool sets no deadline: until the commit the listener reports when nothing writes to
        # the pages any more, and after it the state of the transfer has the deadline.
        lease = storage.pool.reserve(
            [BlockHash(name) for name in request.hashes],
            request.handoff_tokens,
            now=self._clock.now(),
            checkpoint_tokens=_checkpoints(request),
            tenant=request.tenant,
        )
        self._store.publish_changes()
        if isinstance(lease, NotNow):
            return lease
        grant = new_grant(
            self.data_address,
            max_bytes=lease.new_bytes,
            deadline_s=self._timeouts.grant_s,
            skip_tokens=lease.skip_tokens,
            checkpoint_tokens=[n for n in lease.checkpoint_tokens if n != lease.tokens],
            transfer_id=request.transfer_id,
            form=storage.form,
            traceparent=trace.traceparent if trace is not None else None,
            tenant=request.tenant,
        )
        state = IncomingState(self._timeouts.dispatch_s)
        granted_s = self._clock.now()
        transfer = _IncomingTransfer(grant, storage, lease, state, request, granted_s)
        self._transfers[grant.transfer_id] = transfer
        try:
            if lease.new_bytes:
                self._expect(transfer)
            else:
                self._ended(grant.transfer_id, None)  # the pool has every byte: nothing is sent
        except BaseException:
            del self._transfers[grant.transfer_id]
            storage.pool.release(lease.id, self._clock.now())
            self._store.publish_changes()
            raise
        return grant

    def status(self, transfer_id: TransferId) -> TransferStatus | None:
        """The status of a transfer. Reading it renews a committed transfer, because only gateways
        read it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return None
        state = transfer.state
        state.renew(self._clock.now())
        arrived = transfer.arrived_bytes if transfer.arrived is None else transfer.arrived()
        nbytes = transfer.grant.max_bytes
        return TransferStatus(transfer_id, state.stage.value, state.reason, nbytes, arrived)

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
        """Whether the abort has an effect. An attached transfer belongs to its engine. An id that
        is not known here is remembered for a while, so that an open that arrives after its abort
        reserves nothing."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return self._remember_abort(transfer_id)
        state = transfer.state
        if state.stage not in (IncomingStage.GRANTED, IncomingStage.COMMITTED):
            return False
        state.aborting = reason
        if state.stage is IncomingStage.GRANTED:
            self._listener.cancel(transfer_id, reason)  # which calls `_ended` later
        else:
            self._fail(transfer, reason)
        return True

    def attach(
        self,
        transfer_id: TransferId,
        storage: Storage | None = None,
        *,
        attachments: int = 1,
        engine: int | None = None,
    ) -> LeaseTicket:
        """From now on the pages belong to the engine's request. The first call declares how often
        the connection `engine` will attach the transfer; each call makes a lease of its own.
        TransferFailed when the transfer is unknown, not committed, failed, or already attached as
        often as declared, or by another connection. InputError when it is of the other form than
        the engine's `storage`: it can still be attached in its own form."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise TransferFailed(f"transfer {transfer_id} is not known here")
        if storage is not None and transfer.storage is not storage:
            form = transfer.storage.form
            raise InputError(
                f"transfer {transfer_id} is of the {form} form, and this connection of the "
                f"{storage.form} form",
                where="transfer_id",
                fix=f"attach it on the connection that has registered the {form} form",
            )
        is_first = transfer.state.stage is IncomingStage.COMMITTED
        if transfer.state.stage is IncomingStage.ATTACHED and transfer.engine != engine:
            raise TransferFailed("another engine has already attached the transfer")
        transfer.state.attach(self._clock.now(), attachments)
        transfer.engine = engine
        transfer.changed.set()
        lease, request = transfer.lease, transfer.request
        lease_id = lease.id if is_first else self._store.new_lease_id()
        self._attached[lease_id] = transfer_id
        return LeaseTicket(
            lease_id=lease_id,
            tokens=lease.tokens,
            match_tokens=lease.tokens,
            skip_tokens=dict(lease.skip_tokens),
            checkpoint_tokens=lease.checkpoint_tokens,
            readable=units_of(transfer.storage.pool.tables(lease.id).readable),
            writable=(),
            hashes=request.hashes if request is not None else (),
            tail=transfer.receiver.tail if transfer.receiver is not None else b"",
        )

    def release(self, lease_id: int, problem: str = "") -> bool:
        """The engine has finished reading. False when the lease is not an attached transfer.
        `problem`: why the engine could not use it, for the status. The pages are released with the
        last attachment."""
        transfer_id = self._attached.pop(lease_id, None)
        if transfer_id is None:
            return False
        transfer = self._transfers[transfer_id]
        if transfer.state.release(problem):
            self._free(transfer)
        return True

    def engine_exited(self, engine: int) -> None:
        """The connection attaches nothing any more. Its leases are released one by one."""
        for transfer in list(self._transfers.values()):
            if transfer.engine == engine and transfer.state.await_no_more():
                self._free(transfer)

    def keep_prefix(self, transfer_id: TransferId) -> None:
        """Ends a committed transfer that no engine will attach: its pages stay as a prefix."""
        self.release(self.attach(transfer_id).lease_id)

    def sweep(self) -> None:
        """Fails committed transfers that no gateway polls, ends the wait for attachments that do
        not come, and forgets old ended ones and old aborts."""
        now = self._clock.now()
        for transfer in list(self._transfers.values()):
            if transfer.state.expired(now):
                self._fail(transfer, "committed, but no gateway asked for it in time")
            elif transfer.state.lacks_attachments(now):
                if transfer.state.await_no_more():
                    self._free(transfer)
            elif now - transfer.ended_s >= self._timeouts.remember_s:
                del self._transfers[transfer.grant.transfer_id]
        while self._aborted:
            oldest, aborted_s = next(iter(self._aborted.items()))
            if now - aborted_s < self._timeouts.remember_s:
                break
            del self._aborted[oldest]

    def counts(self) -> dict[str, int]:
        counts = {stage.value: 0 for stage in IncomingStage}
        for transfer in self._transfers.values():
            counts[transfer.state.stage.value] += 1
        return counts

    def _granted_before(self, request: OpenTransfer) -> Grant | None:
        """The grant that the request's id already has. Raises as `open` does."""
        transfer_id = request.transfer_id
        if transfer_id is None:
            return None
        if not is_transfer_id(transfer_id):
            raise InputError(
                f"{transfer_id[:40]!r} is not a UUID in lower case with hyphens",
                where="transfer_id",
                fix="use a new UUID for each transfer",
            )
        if transfer_id in self._aborted:
            raise TransferFailed(
                f"transfer_id: {transfer_id} was aborted before it was opened; use a new UUID"
            )
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return None
        state = transfer.state
        open_stages = (IncomingStage.GRANTED, IncomingStage.COMMITTED)
        if state.stage not in open_stages or state.aborting is not None:
            raise TransferFailed(
                f"transfer_id: {transfer_id} is {state.stage.value} already; use a new UUID"
                if state.aborting is None
                else f"transfer_id: {transfer_id} was aborted; use a new UUID"
            )
        if request != transfer.request:
            raise InputError(
                f"transfer {transfer_id} was opened with another body",
                where="transfer_id",
                fix="use a new UUID for each transfer",
            )
        return transfer.grant

    def _remember_abort(self, transfer_id: TransferId) -> bool:
        if not is_transfer_id(transfer_id):
            return False  # no transfer can have this id
        self._aborted.setdefault(transfer_id, self._clock.now())
        if len(self._aborted) > REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)
        return True

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
        transfer.arrived = self._listener.expect(grant, transfer.receiver)

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
            self.committed[transfer.storage.form] += 1
            self._store.publish_changes()
            _record_receipt(self._recorder, transfer)
            log.info(
                "transfer %s committed in the %s form: %d tokens, at most %d bytes",
                transfer_id,
                transfer.storage.form,
                transfer.lease.tokens,
                transfer.grant.max_bytes,
            )
        else:
            _record_receipt(self._recorder, transfer)
            self._free(transfer)
        transfer.changed.set()

    def _fail(self, transfer: _IncomingTransfer, reason: str) -> None:
        was_received = transfer.state.stage is IncomingStage.COMMITTED
        transfer.state.fail(reason)
        transfer.changed.set()
        if not was_received:
            _record_receipt(self._recorder, transfer)
        log.info("transfer %s failed: %s", transfer.grant.transfer_id, transfer.state.reason)
        self._free(transfer)

    def _free(self, transfer: _IncomingTransfer) -> None:
        now = self._clock.now()
        transfer.ended_s = now
        # The status is kept for minutes; the page table and the hashes are not needed for it.
        if transfer.arrived is not None:
            transfer.arrived_bytes = transfer.arrived()
        transfer.receiver = transfer.request = transfer.arrived = None
        transfer.storage.pool.release(transfer.lease.id, now)
        self._store.publish_changes()


def _record_receipt(recorder: SpanRecorder, transfer: _IncomingTransfer) -> None:
    record_transfer(
        recorder,
        KVD_RECEIVE,
        transfer.grant,
        transfer.granted_s,
        nbytes=transfer.grant.max_bytes,
        form=transfer.storage.form,
        error=transfer.state.reason,
    )


def _checkpoints(request: OpenTransfer) -> tuple[int, ...]:
    return () if request.checkpoint_tokens is None else (request.checkpoint_tokens,)
