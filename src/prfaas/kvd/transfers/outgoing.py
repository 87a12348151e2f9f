"""Leases that engines fill, and the transfers that leave while they do.

Runs on the loop that owns the pool. A segment that is ready and that the receiver lacks goes to the
link at once, straight from the arena's pages; what was found in the pool leaves before anything is
computed. Pages go back when the engine is done and the link reads them no more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from prfaas.cache.lease import Lease
from prfaas.cache.storage.places import LeaseTables, segment_ranges
from prfaas.clock import Clock
from prfaas.errors import InputError, PrfaasError, TransferFailed
from prfaas.kvd.engine_socket.messages import Begin, Sent, Ticket, units_of
from prfaas.kvd.store import Shelf, Store
from prfaas.kvd.transfers.incoming import UNREGISTERED, TransferStatus, patient
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.manifest import Coverage, Lane, Stripe, owed, stripes
from prfaas.kvd.transfers.states import WritingLife
from prfaas.kvspec import Segment, segment_bytes
from prfaas.transport.buffers import FileSlice
from prfaas.transport.link import HANDOFF, PREFIX_COPY, Transfer
from prfaas.types import BlockHash, Grant, NotNow, TransferId

log = logging.getLogger(__name__)
REMEMBERED_TRANSFERS = 1_024


class Departure:
    """One transfer under way: which stripes wait for the engine."""

    def __init__(
        self, shelf: Shelf, tables: LeaseTables, pieces: Sequence[Stripe], transfer: Transfer
    ) -> None:
        self.transfer = transfer
        self._shelf = shelf
        self._tables = tables
        self._waiting: dict[Lane, list[Segment]] = {}
        for piece in pieces:
            if not piece.found:
                lane = (piece.segment.group, piece.segment.layer)
                self._waiting.setdefault(lane, []).append(piece.segment)
        found = [piece.segment for piece in pieces if piece.found]
        transfer.ready_all({s.name: self._slices(s, found=True) for s in found})

    def covered(self, lanes: Iterable[Lane], coverage: Coverage) -> None:
        """More is ready in these lanes: whatever is whole now leaves."""
        leaving: list[Segment] = []
        for lane in lanes:
            waiting: list[Segment] = []
            for segment in self._waiting.get(lane, ()):
                (leaving if coverage.has(segment) else waiting).append(segment)
            self._waiting[lane] = waiting
        if leaving:
            self.transfer.ready_all({s.name: self._slices(s, found=False) for s in leaving})

    def _slices(self, segment: Segment, *, found: bool) -> list[FileSlice]:
        shelf = self._shelf
        table = self._tables.readable if found else self._tables.writable
        ranges = segment_ranges(shelf.spec, shelf.block_tokens, shelf.arena, segment, table.get)
        return [FileSlice(shelf.arena.view(start, stop), shelf.fd, start) for start, stop in ranges]


@dataclass(slots=True)
class _Write:
    shelf: Shelf
    lease: Lease
    life: WritingLife
    coverage: Coverage
    notify: Callable[[Sent], None]
    transfer_id: TransferId | None
    departure: Departure | None = None


class OutgoingTransfers:
    def __init__(self, store: Store, links: Links, clock: Clock) -> None:
        self._store = store
        self._links = links
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._writes: dict[int, _Write] = {}
        self._statuses: dict[TransferId, TransferStatus] = {}  # oldest first

    # For engines ----------------------------------------------------------------------------------

    def begin(self, asked: Begin, notify: Callable[[Sent], None]) -> Ticket | NotNow:
        shelf = self._store.shelf
        if shelf is None:
            return UNREGISTERED
        lease = self._reserve(shelf, asked)
        self._store.changed()
        if isinstance(lease, NotNow):
            return patient(lease)
        tables = shelf.pool.tables(lease.id)
        lengths = {*lease.checkpoint_tokens} | (
            {lease.tokens} if lease.tokens > lease.match.tokens else set()
        )
        wanted = owed(
            shelf.spec,
            lease.tokens,
            skip_tokens=lease.skip_tokens,
            lengths=lengths,
            whole=shelf.whole,
        )
        write = _Write(
            shelf,
            lease,
            WritingLife(sending=asked.grant is not None),
            Coverage(shelf.spec, wanted),
            notify,
            asked.grant.transfer_id if asked.grant is not None else None,
        )
        self._writes[lease.id] = write
        if asked.grant is not None:
            try:
                self._depart(write, tables, asked.grant, HANDOFF, asked.tail)
            except PrfaasError:
                self._forget(write)
                raise
        return Ticket(
            lease_id=lease.id,
            tokens=lease.tokens,
            match_tokens=lease.match.tokens,
            skip_tokens=dict(lease.skip_tokens),
            checkpoint_tokens=lease.checkpoint_tokens,
            readable=units_of(tables.readable),
            writable=units_of(tables.writable),
            sending=asked.grant is not None,
        )

    def ready(self, lease_id: int, segments: Sequence[Segment]) -> None:
        write = self._writes.get(lease_id)
        if write is None:
            return  # aborted meanwhile
        for segment in segments:
            segment_bytes(write.shelf.spec, segment)  # InputError where it is none of this model's
            write.coverage.add(segment)
        if write.departure is not None:
            lanes = dict.fromkeys((segment.group, segment.layer) for segment in segments)
            write.departure.covered(lanes, write.coverage)

    def commit(self, lease_id: int) -> None:
        """InputError, and an abort, when something is missing: nothing half written is kept."""
        write = self._found(lease_id)
        missing = write.coverage.missing()
        if missing is not None:
            self.abort(lease_id, f"committed without {missing.name}")
            raise InputError(
                f"segment {missing.name} is not ready", fix="commit when everything owed is"
            )
        write.life.written()
        write.shelf.pool.commit(write.lease.id, self._clock.now())
        self._store.changed()
        self._free(write)

    def abort(self, lease_id: int, reason: str) -> None:
        """Nobody writes to the lease any more."""
        write = self._writes.get(lease_id)
        if write is None:
            return
        if write.life.aborted() and write.departure is not None:
            write.departure.transfer.abort(reason)
        self._free(write)

    def give_up_sending(self, lease_id: int, reason: str) -> None:
        """The transfer cannot become whole; the engine may still write."""
        write = self._writes.get(lease_id)
        if write is not None and write.departure is not None:
            write.departure.transfer.abort(reason)

    # For other kvds -------------------------------------------------------------------------------

    def push(self, grant: Grant, hashes: Sequence[BlockHash], tokens: int) -> NotNow | None:
        """Sends a prefix that is here to the kvd that has granted it, after everything urgent."""
        shelf = self._store.shelf
        if shelf is None:
            return UNREGISTERED
        lease = shelf.pool.pin(hashes, now=self._clock.now(), ttl_s=math.inf)
        if isinstance(lease, NotNow):
            return patient(lease)
        life = WritingLife(sending=True)
        life.written()
        write = _Write(
            shelf,
            lease,
            life,
            Coverage(shelf.spec, owed(shelf.spec, tokens, skip_tokens={}, lengths=())),
            lambda _: None,
            grant.transfer_id,
        )
        self._writes[lease.id] = write
        try:
            if lease.tokens != tokens:
                raise TransferFailed(f"{tokens} tokens are wanted, {lease.tokens} are here")
            self._depart(write, shelf.pool.tables(lease.id), grant, PREFIX_COPY, b"")
        except PrfaasError:
            self._forget(write)
            raise
        return None

    def status(self, transfer_id: TransferId) -> TransferStatus | None:
        return self._statuses.get(transfer_id)

    def counts(self) -> dict[str, int]:
        writing = sum(1 for write in self._writes.values() if not write.life.free)
        sending = sum(1 for s in self._statuses.values() if s.state == "sending")
        return {"writing": writing, "sending": sending}

    # Inside ---------------------------------------------------------------------------------------

    def _reserve(self, shelf: Shelf, asked: Begin) -> Lease | NotNow:
        """With what the grant asks for among the checkpoints, where the prefill passes it."""
        hashes = [BlockHash(name) for name in asked.hashes]
        promised = asked.grant.checkpoint_tokens if asked.grant is not None else ()

        def reserve(checkpoints: tuple[int, ...] | None) -> Lease | NotNow:
            now = self._clock.now()
            return shelf.pool.reserve(
                hashes, asked.tokens, now=now, ttl_s=math.inf, checkpoint_tokens=checkpoints
            )

        if asked.checkpoint_tokens is not None:
            return reserve((*asked.checkpoint_tokens, *promised))
        lease = reserve(None)
        if isinstance(lease, NotNow):
            return lease
        more = {n for n in promised if n > lease.match.tokens} - {*lease.checkpoint_tokens}
        if not more:
            return lease
        shelf.pool.release(lease.id, self._clock.now())
        return reserve((*lease.checkpoint_tokens, *more))

    def _depart(
        self, write: _Write, tables: LeaseTables, grant: Grant, priority: int, tail: bytes
    ) -> None:
        shelf, lease = write.shelf, write.lease
        if not grant.max_bytes:  # the receiver has everything
            self._loop.call_soon(self._settled, write, "")  # after the caller has its ticket
            return
        pieces = stripes(
            shelf.spec,
            shelf.block_tokens,
            lease.tokens,
            skip_tokens=grant.skip_tokens,
            lengths=(*grant.checkpoint_tokens, lease.tokens),
            match_tokens=lease.match.tokens,
            found_tokens=lease.skip_tokens,
            whole=shelf.whole,
        )
        sizes = {p.segment.name: segment_bytes(shelf.spec, p.segment) for p in pieces}
        link = self._links.to(grant.data_address)
        transfer = link.open(grant, sizes, priority=priority, label=tail)
        self._note(TransferStatus(grant.transfer_id, "sending", "", sum(sizes.values())))
        write.departure = Departure(shelf, tables, pieces, transfer)
        transfer.done.add_done_callback(partial(self._signal, write))

    def _signal(self, write: _Write, done: Future[None]) -> None:
        """From a thread of the link's."""
        error = done.exception()
        reason = "" if error is None else str(error) or "the transfer failed"
        self._loop.call_soon_threadsafe(self._settled, write, reason)

    def _settled(self, write: _Write, reason: str) -> None:
        write.life.sent(reason)
        assert write.transfer_id is not None
        before = self._statuses.get(write.transfer_id)
        nbytes = before.nbytes if before is not None else 0
        state = "failed" if reason else "sent"
        self._note(TransferStatus(write.transfer_id, state, reason, nbytes))
        log.info("transfer %s %s: %d bytes %s", write.transfer_id, state, nbytes, reason)
        write.notify(Sent(write.lease.id, reason))
        self._free(write)

    def _note(self, status: TransferStatus) -> None:
        self._statuses.pop(status.transfer_id, None)
        self._statuses[status.transfer_id] = status
        if len(self._statuses) > REMEMBERED_TRANSFERS:
            del self._statuses[next(iter(self._statuses))]

    def _free(self, write: _Write) -> None:
        if write.life.free:
            self._forget(write)

    def _forget(self, write: _Write) -> None:
        if self._writes.pop(write.lease.id, None) is not None:
            write.shelf.pool.release(write.lease.id, self._clock.now())
            self._store.changed()

    def _found(self, lease_id: int) -> _Write:
        write = self._writes.get(lease_id)
        if write is None:
            raise TransferFailed(f"lease {lease_id} has ended")
        return write
