"""Leases that engines fill, and the transfers that read them at the same time.

Runs on the event loop that owns the pool. A segment that is ready and that the receiver lacks is
handed to the link at once, straight from the arena's pages; what the pool already had is sent
before the engine computes anything. Pages are released when the engine has finished and the link
no longer reads them, also when a call fails half-way. A grant is for one transfer: one that comes
again is refused, and harms neither the transfer under way nor any lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from prfaas.cache.lease import Lease
from prfaas.cache.storage.places import LeaseTables, segment_ranges
from prfaas.clock import Clock
from prfaas.contracts.kvd_api import TransferStatus
from prfaas.errors import InputError, TransferFailed
from prfaas.kvd.engine_socket.messages import Begin, LeaseTicket, TransferEnded, units_of
from prfaas.kvd.store import Storage, Store
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.manifest import (
    Coverage,
    GroupLayer,
    PlannedSegment,
    plan_segments,
    required_state,
)
from prfaas.kvd.transfers.states import OutgoingState
from prfaas.kvd.transfers.transfer_spans import record_transfer
from prfaas.kvspec import Segment, SegmentShare, segment_bytes
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.spans import KVD_SEND
from prfaas.transport.buffers import FileSlice
from prfaas.transport.grants import transfer_key
from prfaas.transport.link import HANDOFF, PREFIX_COPY, Transfer
from prfaas.types import BlockHash, Grant, NotNow, TransferId

log = logging.getLogger(__name__)
REMEMBERED_TRANSFERS = 1_024


class SegmentSender:
    """Hands the segments of one transfer to its link: those that were found in the pool at once,
    the others when the engine has written them."""

    def __init__(
        self,
        storage: Storage,
        tables: LeaseTables,
        planned: Sequence[PlannedSegment],
        transfer: Transfer,
    ) -> None:
        self.transfer = transfer
        self._storage = storage
        self._tables = tables
        self._waiting: dict[GroupLayer, list[Segment]] = {}
        for plan in planned:
            if not plan.found:
                where = (plan.segment.group, plan.segment.layer)
                self._waiting.setdefault(where, []).append(plan.segment)
        found = [plan.segment for plan in planned if plan.found]
        transfer.ready_all({s.name: self._slices(s, found=True) for s in found})

    def send_covered(self, changed: Iterable[GroupLayer], coverage: Coverage) -> None:
        """Sends the segments of these layers that have become complete."""
        complete: list[Segment] = []
        for where in changed:
            waiting: list[Segment] = []
            for segment in self._waiting.get(where, ()):
                (complete if coverage.has(segment) else waiting).append(segment)
            self._waiting[where] = waiting
        if complete:
            self.transfer.ready_all({s.name: self._slices(s, found=False) for s in complete})

    def unsent(self) -> Segment | None:
        """A segment that has not become complete yet, or None."""
        return next((segment for waiting in self._waiting.values() for segment in waiting), None)

    def _slices(self, segment: Segment, *, found: bool) -> list[FileSlice]:
        storage = self._storage
        arena = storage.arena
        table = self._tables.readable if found else self._tables.writable
        ranges = segment_ranges(storage.spec, storage.block_tokens, arena, segment, table.get)
        return [FileSlice(arena.view(start, stop), storage.fd, start) for start, stop in ranges]


@dataclass(slots=True)
class _OutgoingLease:
    storage: Storage
    lease: Lease
    state: OutgoingState
    grant: Grant | None
    notify: Callable[[TransferEnded], None]
    began_s: float
    pushed: tuple[BlockHash, ...] = ()  # the prefix, when another kvd pulls it
    nbytes: int = 0  # of the transfer
    transfer: Transfer | None = None  # while the link may read the pages
    sender: SegmentSender | None = None  # of that transfer
    coverage: Coverage = field(init=False)


class OutgoingTransfers:
    def __init__(
        self, store: Store, links: Links, clock: Clock, recorder: SpanRecorder | None = None
    ) -> None:
        self._store = store
        self._links = links
        self._clock = clock
        self._recorder = recorder or SpanRecorder("kvd", clock)
        self._loop = asyncio.get_running_loop()
        self._leases: dict[int, _OutgoingLease] = {}
        # By the id's bytes: an id may be written in several ways.
        self._sending: dict[bytes, _OutgoingLease] = {}
        self._ended: dict[bytes, TransferStatus] = {}  # oldest first

    # For engines ----------------------------------------------------------------------------------

    def begin(
        self, storage: Storage, request: Begin, notify: Callable[[TransferEnded], None]
    ) -> LeaseTicket | NotNow:
        """Reserves pages for a prefill, and starts the transfer when the request has a grant.
        `notify` is called when that transfer has ended. Whatever is raised, nothing stays
        reserved."""
        began_s = self._clock.now()
        grant = request.grant
        if grant is not None:
            if request.answer_from is not None:
                raise InputError(
                    "an answer is not sent", where="answer_from", fix="leave out the grant"
                )
            self._check_unused(grant)
            check_grant(storage, grant, request.tokens)
        lease = self._reserve(storage, request)
        if isinstance(lease, NotNow):
            self._store.publish_changes()
            return lease
        state = OutgoingState(sending=grant is not None)
        outgoing = self._leases[lease.id] = _OutgoingLease(
            storage, lease, state, grant, notify, began_s
        )
        try:
            self._store.publish_changes()
            tables = storage.pool.tables(lease.id)
            lengths = {*lease.checkpoint_tokens} | (
                {lease.tokens} if lease.tokens > lease.match.tokens else set()
            )
            required = required_state(
                storage.spec,
                lease.tokens,
                skip_tokens=lease.skip_tokens,
                lengths=lengths,
                whole=storage.whole,
            )
            outgoing.coverage = Coverage(storage.spec, required)
            if grant is not None:
                self._start_transfer(outgoing, tables, grant, HANDOFF, request.tail)
            return LeaseTicket(
                lease_id=lease.id,
                tokens=lease.tokens,
                match_tokens=lease.match.tokens,
                skip_tokens=dict(lease.skip_tokens),
                checkpoint_tokens=lease.checkpoint_tokens,
                readable=units_of(tables.readable),
                writable=units_of(tables.writable),
                sending=grant is not None,
            )
        except BaseException:
            self._discard(outgoing)
            raise

    def ready(self, lease_id: int, shares: Sequence[SegmentShare]) -> None:
        """The engine has written these segments, or these heads of them: what the receiver lacks of
        the segments that are complete is sent. Raises InputError, and counts none of them as ready,
        when one of them is invalid."""
        outgoing = self._leases.get(lease_id)
        if outgoing is None:
            return  # aborted in the meantime
        # Checked first: a segment that counts as ready is sent, also when another one is invalid.
        coverage = outgoing.coverage
        coverage.check(shares)
        changed: dict[GroupLayer, None] = {}
        for segment, heads in shares:
            if coverage.add(segment, heads):
                changed[segment.group, segment.layer] = None
        if outgoing.sender is not None:
            outgoing.sender.send_covered(changed, coverage)

    def commit(self, lease_id: int) -> None:
        """Keeps what was written as a prefix. When a required segment is missing, the lease is
        aborted and InputError is raised: state that is not complete is never kept."""
        outgoing = self._leases.get(lease_id)
        if outgoing is None or not outgoing.state.writing:
            raise TransferFailed(f"lease {lease_id} has ended")
        missing = outgoing.coverage.missing()
        if missing is not None:
            self.abort(lease_id, f"committed without {missing.name}")
            raise InputError(
                f"segment {missing.name} is not ready",
                fix="commit after every required segment is ready",
            )
        outgoing.state.commit_write()
        if outgoing.sender is not None and (unsent := outgoing.sender.unsent()) is not None:
            # Nothing writes it any more. The transfer would wait for it, and renew its grant.
            outgoing.sender.transfer.abort(f"committed without {unsent.name}")
        try:
            kept = outgoing.storage.pool.commit(outgoing.lease.id, self._clock.now())
            self._store.publish_changes()
        finally:
            self._release_if_free(outgoing)
        if not kept:
            raise TransferFailed("the pool has lost the prefix of this answer; it was not kept")

    def abort(self, lease_id: int, reason: str) -> None:
        """The engine no longer writes to the lease. Without effect when it has ended."""
        outgoing = self._leases.get(lease_id)
        if outgoing is None or not outgoing.state.writing:
            return
        if outgoing.state.abort_write() and outgoing.sender is not None:
            outgoing.sender.transfer.abort(reason)
        self._release_if_free(outgoing)

    def abort_transfer(self, lease_id: int, reason: str) -> None:
        """The transfer cannot be completed; the engine may still write to the lease."""
        outgoing = self._leases.get(lease_id)
        if outgoing is not None and outgoing.sender is not None:
            outgoing.sender.transfer.abort(reason)

    # For other kvds -------------------------------------------------------------------------------

    def push(self, storage: Storage, grant: Grant, hashes: Sequence[BlockHash]) -> NotNow | None:
        """Sends a prefix of the pool to the kvd that made the grant, after all hand-offs. A push
        that comes again while it is being sent pins nothing. Whatever is raised, nothing stays
        pinned."""
        began_s = self._clock.now()
        tokens = len(hashes) * storage.block_tokens
        running = self._sending.get(transfer_key(grant.transfer_id))
        if running is not None and (running.grant, running.pushed) == (grant, tuple(hashes)):
            return None
        self._check_unused(grant)
        check_grant(storage, grant, tokens)
        lease = storage.pool.pin(hashes, now=self._clock.now())
        if isinstance(lease, NotNow):
            self._store.publish_changes()
            return lease
        state = OutgoingState(sending=True)
        state.commit_write()
        outgoing = self._leases[lease.id] = _OutgoingLease(
            storage, lease, state, grant, lambda _: None, began_s, tuple(hashes)
        )
        try:
            self._store.publish_changes()
            required = required_state(storage.spec, tokens, skip_tokens={}, lengths=())
            outgoing.coverage = Coverage(storage.spec, required)
            if lease.tokens != tokens:
                raise TransferFailed(
                    f"the pull needs {tokens} tokens, this kvd has {lease.tokens} of them"
                )
            tables = storage.pool.tables(lease.id)
            self._start_transfer(outgoing, tables, grant, PREFIX_COPY, b"")
        except BaseException:
            self._discard(outgoing)
            raise
        return None

    def status(self, transfer_id: TransferId) -> TransferStatus | None:
        try:
            key = transfer_key(transfer_id)
        except InputError:
            return None
        sending = self._sending.get(key)
        if sending is not None:
            return TransferStatus(transfer_id, "sending", "", sending.nbytes)
        return self._ended.get(key)

    def counts(self) -> dict[str, int]:
        writing = sum(1 for outgoing in self._leases.values() if not outgoing.state.free)
        return {"writing": writing, "sending": len(self._sending)}

    # Inside ---------------------------------------------------------------------------------------

    def _check_unused(self, grant: Grant) -> None:
        """TransferFailed when the grant's transfer is under way, or has ended here."""
        key = transfer_key(grant.transfer_id)
        if key in self._sending:
            raise TransferFailed(
                f"transfer {grant.transfer_id} is being sent already: a grant is for one transfer"
            )
        ended = self._ended.get(key)
        if ended is not None:
            how = f"{ended.state}: {ended.reason}" if ended.reason else ended.state
            raise TransferFailed(f"transfer {grant.transfer_id} has ended ({how})")

    def _reserve(self, storage: Storage, request: Begin) -> Lease | NotNow:
        """The lease includes the checkpoints of the grant where the prefill computes them."""
        hashes = [BlockHash(name) for name in request.hashes]
        tenant = owner_of(request)
        if request.answer_from is not None:
            answer = storage.pool.reserve_answer(
                hashes,
                request.tokens,
                first_token=request.answer_from,
                now=self._clock.now(),
                tenant=tenant,
            )
            self._store.spill_ahead(storage)
            return answer
        promised = request.grant.checkpoint_tokens if request.grant is not None else ()

        def reserve(checkpoints: tuple[int, ...] | None) -> Lease | NotNow:
            now = self._clock.now()
            return storage.pool.reserve(
                hashes, request.tokens, now=now, checkpoint_tokens=checkpoints, tenant=tenant
            )

        if request.checkpoint_tokens is not None:
            return reserve((*request.checkpoint_tokens, *promised))
        lease = reserve(None)
        if isinstance(lease, NotNow):
            return lease
        more = {n for n in promised if n > lease.match.tokens} - {*lease.checkpoint_tokens}
        if not more:
            return lease
        storage.pool.release(lease.id, self._clock.now())
        return reserve((*lease.checkpoint_tokens, *more))

    def _start_transfer(
        self,
        outgoing: _OutgoingLease,
        tables: LeaseTables,
        grant: Grant,
        priority: int,
        tail: bytes,
    ) -> None:
        storage, lease = outgoing.storage, outgoing.lease
        key = transfer_key(grant.transfer_id)
        if not grant.max_bytes:  # the receiver has every byte
            self._sending[key] = outgoing
            # On the next turn of the loop: the caller first returns the ticket.
            self._loop.call_soon(self._transfer_ended, outgoing, "")
            return
        planned = plan_segments(
            storage.spec,
            storage.block_tokens,
            lease.tokens,
            skip_tokens=grant.skip_tokens,
            lengths=(*grant.checkpoint_tokens, lease.tokens),
            match_tokens=lease.match.tokens,
            found_tokens=lease.skip_tokens,
            whole=storage.whole,
        )
        if not planned:  # a manifest without segments breaks the connection for all transfers
            raise InputError(
                f"nothing of {lease.tokens} tokens is left to send, but max_bytes is "
                f"{grant.max_bytes}",
                where="grant",
                fix="send the grant as the receiver made it",
            )
        sizes = {p.segment.name: segment_bytes(storage.spec, p.segment) for p in planned}
        link = self._links.to(grant.data_address)
        transfer = link.open(grant, sizes, priority=priority, label=tail)
        outgoing.nbytes = sum(sizes.values())
        outgoing.transfer = transfer
        self._sending[key] = outgoing
        transfer.done.add_done_callback(partial(self._signal_end, outgoing))
        outgoing.sender = SegmentSender(storage, tables, planned, transfer)

    def _signal_end(self, outgoing: _OutgoingLease, done: Future[None]) -> None:
        """Called from a thread of the link."""
        error = done.exception()
        reason = "" if error is None else str(error) or "the transfer failed"
        self._loop.call_soon_threadsafe(self._transfer_ended, outgoing, reason)

    def _transfer_ended(self, outgoing: _OutgoingLease, reason: str) -> None:
        assert outgoing.grant is not None
        transfer_id, nbytes = outgoing.grant.transfer_id, outgoing.nbytes
        outgoing.state.end_send(reason)
        # The transfer's future keeps its callback, which keeps the lease: with this cycle, the
        # manifest and the segments of each transfer would wait for the garbage collector.
        outgoing.transfer = outgoing.sender = None
        state = "failed" if reason else "sent"
        key = transfer_key(transfer_id)
        self._sending.pop(key, None)
        self._ended[key] = TransferStatus(transfer_id, state, reason, nbytes)
        if len(self._ended) > REMEMBERED_TRANSFERS:
            del self._ended[next(iter(self._ended))]
        record_transfer(
            self._recorder,
            KVD_SEND,
            outgoing.grant,
            outgoing.began_s,
            nbytes=nbytes,
            form=outgoing.storage.form,
            error=reason,
        )
        log.info("transfer %s %s: %d bytes %s", transfer_id, state, nbytes, reason)
        try:
            outgoing.notify(TransferEnded(outgoing.lease.id, reason))
        finally:
            self._release_if_free(outgoing)

    def _discard(self, outgoing: _OutgoingLease) -> None:
        """The lease, or its transfer, could not be started. Pages that the link may read are
        released when it has let go of them."""
        if outgoing.transfer is None:
            self._release(outgoing)
            return
        if outgoing.state.writing:
            outgoing.state.abort_write()
        outgoing.transfer.abort("the transfer could not be started")

    def _release_if_free(self, outgoing: _OutgoingLease) -> None:
        if outgoing.state.free:
            self._release(outgoing)

    def _release(self, outgoing: _OutgoingLease) -> None:
        if self._leases.pop(outgoing.lease.id, None) is not None:
            outgoing.storage.pool.release(outgoing.lease.id, self._clock.now())
            self._store.publish_changes()


def owner_of(request: Begin) -> str:
    """The tag of the tenant for whom an engine computes."""
    return request.grant.tenant if request.grant is not None else request.tenant


def check_grant(storage: Storage, grant: Grant, tokens: int) -> None:
    """InputError when no receiver of this model can have made the grant. A grant comes from another
    host: without this check a number in it could keep the event loop busy for hours."""
    if grant.form != storage.form:
        raise InputError(
            f"the receiver takes the {grant.form} form, and this pool has the {storage.form} form",
            where="grant",
            fix=f"send it from the connection that has registered the {grant.form} form",
        )
    names = {group.name for group in storage.spec.groups}
    for name, skip in grant.skip_tokens.items():
        if name not in names or not 0 <= skip <= tokens:
            raise InputError(
                f"skip_tokens has {skip} tokens of group {name!r}, the prompt has {tokens}",
                where="grant",
                fix="send the grant as the receiver made it",
            )
    for length in grant.checkpoint_tokens:
        if not 0 < length <= tokens or length % storage.block_tokens:
            raise InputError(
                f"checkpoint_tokens has {length}, the prompt has {tokens} tokens in blocks of "
                f"{storage.block_tokens}",
                where="grant",
                fix="send the grant as the receiver made it",
            )
    if grant.max_bytes < 0:
        raise InputError(
            f"max_bytes is {grant.max_bytes}", where="grant", fix="send the receiver's grant"
        )
