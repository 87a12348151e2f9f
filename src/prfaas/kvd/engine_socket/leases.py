"""An engine's leases on pages of its kvd's arena: prefills write to them, requests read them.

Addresses are computed here, over this process's mapping of the arena; the kvd only receives which
segments are ready and how the lease ended. A lease belongs to the process that requested it. Its
ticket may be passed to other processes of the same engine (`KvdClient.join_write`, `join_read`),
which then use the same pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import PageTable, joint_ranges, segment_ranges
from prfaas.errors import ConnectionLost, InputError
from prfaas.kvd.engine_socket.messages import (
    MAX_COUNT,
    Abort,
    Answer,
    Call,
    Commit,
    LeaseTicket,
    ReadProblem,
    Release,
    SegmentName,
    UnitPages,
    table_of,
)
from prfaas.kvd.engine_socket.unit_places import UnitPlaces
from prfaas.kvspec import KVSpec, Segment, all_heads, block_bytes
from prfaas.kvspec.mapped import MappedRanges


class KvdConnection(Protocol):
    """A connection to the kvd. A lease belongs to the connection on which it was made."""

    @property
    def gone(self) -> bool:
        """The connection has ended, and every lease of it."""
        ...

    def call(self, call: Call) -> Answer: ...

    def ready(self, lease_id: int, segment: SegmentName) -> None: ...


class MappedArena:
    """This process's mapping of the arena, and the places of segments in it."""

    def __init__(self, spec: KVSpec, block_tokens: int, arena: Arena) -> None:
        self.spec = spec
        self.block_tokens = block_tokens
        self.arena = arena
        self._unit_pages = [
            -(-block_bytes(group, block_tokens) // arena.page_bytes) for group in spec.groups
        ]

    def table(self, units: Iterable[UnitPages]) -> PageTable:
        """The pages of a ticket. InputError unless each unit has its number of pages, and the arena
        has them: copies use addresses, which nothing checks later."""
        table = table_of(units)
        sizes, pages = self._unit_pages, self.arena.pages
        for (group, where), found in table.items():
            if (
                not (0 <= group < len(sizes) and 0 <= where <= MAX_COUNT)
                or len(found) != sizes[group]
                or min(found) < 0
                or max(found) >= pages
            ):
                raise InputError(
                    f"the ticket places unit {where} of group {group} on pages {found[:8]}, which "
                    f"does not suit an arena of {pages} pages and the units of this model",
                    fix="use one version of prfaas for the engine and its kvd",
                )
        return table

    def views(self, segment: Segment, table: PageTable) -> list[memoryview]:
        ranges = segment_ranges(self.spec, self.block_tokens, self.arena, segment, table.get)
        return [self.arena.view(start, stop) for start, stop in ranges]

    @property
    def memory(self) -> mmap.mmap:
        memory = self.arena.view(0, 0).obj
        assert isinstance(memory, mmap.mmap)
        return memory

    def places(self, table: PageTable) -> UnitPlaces:
        return UnitPlaces(self.spec, self.block_tokens, self.arena, table)

    def mapped(self, segment: Segment, places: UnitPlaces) -> MappedRanges:
        return MappedRanges(self.memory, *places.ranges(segment))

    def joint_views(self, segments: Sequence[Segment], table: PageTable) -> list[memoryview]:
        ranges = joint_ranges(self.spec, self.block_tokens, self.arena, segments, table.get)
        return [self.arena.view(start, stop) for start, stop in ranges]


class ReadLease:
    """Committed state after exactly `tokens` tokens (0: none was found). A `SegmentSource`."""

    def __init__(self, ticket: LeaseTicket, arena: MappedArena, kvd: KvdConnection) -> None:
        self.ticket = ticket
        self.tokens = ticket.tokens
        self._arena = arena
        self._table = arena.table(ticket.readable)
        self._places = arena.places(self._table)
        self._kvd = kvd
        self._ended = False

    @property
    def lost(self) -> bool:
        """The kvd has exited, or the connection to it has ended, and the lease with it."""
        return self._kvd.gone

    def views(self, segment: Segment) -> Sequence[memoryview]:
        return self._arena.views(segment, self._table)

    def mapped_views(self, segment: Segment) -> MappedRanges:
        """The same memory as `views`."""
        return self._arena.mapped(segment, self._places)

    def joint_views(self, segments: Sequence[Segment]) -> Sequence[memoryview]:
        """The memory of segments that differ in the layer alone: unit by unit, in each unit
        segment by segment."""
        return self._arena.joint_views(segments, self._table)

    def release(self, problem: ReadProblem = "") -> None:
        """Called when no process of this engine reads any more. Idempotent. A kvd that has exited
        has released the lease already. `problem` tells gateways why the engine did not use the
        state of an attached transfer."""
        if not self._ended:
            self._ended = True
            try:
                self._kvd.call(Release(self.ticket.lease_id, problem))
            except ConnectionLost:
                pass

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WriteLease:
    """Pages for what a prefill up to `tokens` adds (a `SegmentSink`), and the prefix that the pool
    already had (a `SegmentSource` up to `match_tokens`, where the engine resumes).

    Before `commit`, these must be ready: full attention from `skip_tokens` of its group to
    `tokens`, windows and states after `tokens` (unless that is `match_tokens`: then there is
    nothing to compute) and after each of `checkpoint_tokens`; all with every head.
    """

    def __init__(
        self, ticket: LeaseTicket, arena: MappedArena, kvd: KvdConnection, sent: Future[None]
    ) -> None:
        self.ticket = ticket
        self.tokens = ticket.tokens
        self.match_tokens = ticket.match_tokens
        self.skip_tokens: Mapping[str, int] = ticket.skip_tokens  # of the local pool
        self.checkpoint_tokens = ticket.checkpoint_tokens
        # With a grant: done when the receiver has committed, TransferFailed as soon as it cannot
        # commit any more (the prefill then serves the local pool only). Without a grant,
        # and in a process that joined the lease: never done.
        self.sent = sent
        self._arena = arena
        self._readable = arena.table(ticket.readable)
        self._writable = arena.table(ticket.writable)
        self._readable_places = arena.places(self._readable)
        self._writable_places = arena.places(self._writable)
        self._kvd = kvd
        self._ended = False

    @property
    def lost(self) -> bool:
        """The kvd has exited, or the connection to it has ended, and the lease with it: it cannot
        be committed any more."""
        return self._kvd.gone

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        return self._arena.views(segment, self._writable)

    def mapped_buffers(self, segment: Segment) -> MappedRanges:
        """The same memory as `buffers`."""
        return self._arena.mapped(segment, self._writable_places)

    def joint_buffers(self, segments: Sequence[Segment]) -> Sequence[memoryview]:
        """The memory of segments that differ in the layer alone: unit by unit, in each unit
        segment by segment."""
        return self._arena.joint_views(segments, self._writable)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        """Reports a written segment, or these heads of it, without waiting for an answer. With a
        grant, the kvd sends the segment as soon as every head is written, if the receiver lacks it.
        Without `heads` it never raises: `commit` reports a kvd that has exited. InputError when the
        segment has no such heads."""
        if heads is None or all_heads(self._arena.spec, segment, heads):
            name = SegmentName(segment.group, segment.layer, segment.start, segment.stop)
        else:
            name = SegmentName(
                segment.group, segment.layer, segment.start, segment.stop, heads.start, len(heads)
            )
        self._kvd.ready(self.ticket.lease_id, name)

    def views(self, segment: Segment) -> Sequence[memoryview]:
        """The memory of a segment of the prefix that the pool already had."""
        return self._arena.views(segment, self._readable)

    def mapped_views(self, segment: Segment) -> MappedRanges:
        """The same memory as `views`."""
        return self._arena.mapped(segment, self._readable_places)

    def commit(self) -> None:
        """Ends the lease: the local pool keeps the block-aligned state as a prefix. Does not wait
        for the transfer. InputError when a required segment is not ready."""
        self._ended = True
        self._kvd.call(Commit(self.ticket.lease_id))

    def abort(self, reason: str) -> None:
        """Ends the lease and its transfer, and keeps nothing. Called when no process of this engine
        writes any more. Idempotent; without effect after a commit."""
        if not self._ended:
            self._ended = True
            try:
                self._kvd.call(Abort(self.ticket.lease_id, reason))
            except ConnectionLost:
                pass
