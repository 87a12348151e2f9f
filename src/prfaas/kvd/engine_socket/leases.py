"""An engine's hold on pages of its kvd's arena: where a prefill writes, what a request reads.

Addresses are computed here, over this process's own mapping of the arena; the kvd hears only what
is ready and how it ended. A lease belongs to the process that asked for it. Its ticket may be
handed to other processes of the same engine (`KvdClient.join_write`, `join_read`), which then touch
the same pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import PageTable, segment_ranges
from prfaas.errors import ConnectionLost
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Answer,
    Call,
    Commit,
    Release,
    SegmentName,
    Ticket,
    table_of,
)
from prfaas.kvspec import KVSpec, Segment


class Line(Protocol):
    """A connection to the kvd."""

    def call(self, call: Call) -> Answer: ...

    def ready(self, lease_id: int, segment: SegmentName) -> None: ...


class Pages:
    """The arena as this process has mapped it, and how segments lie in it."""

    def __init__(self, spec: KVSpec, block_tokens: int, arena: Arena) -> None:
        self.spec = spec
        self.block_tokens = block_tokens
        self.arena = arena

    def views(self, segment: Segment, table: PageTable) -> list[memoryview]:
        ranges = segment_ranges(self.spec, self.block_tokens, self.arena, segment, table.get)
        return [self.arena.view(start, stop) for start, stop in ranges]


class ReadLease:
    """Committed state after exactly `tokens` tokens (0: nothing was found). A `SegmentSource`."""

    def __init__(self, ticket: Ticket, pages: Pages, line: Line) -> None:
        self.ticket = ticket
        self.tokens = ticket.tokens
        self._pages = pages
        self._table = table_of(ticket.readable)
        self._line = line
        self._over = False

    def views(self, segment: Segment) -> Sequence[memoryview]:
        return self._pages.views(segment, self._table)

    def release(self) -> None:
        """Nobody of this engine reads any more. Idempotent; a kvd that is gone has released it."""
        if not self._over:
            self._over = True
            try:
                self._line.call(Release(self.ticket.lease_id))
            except ConnectionLost:
                pass

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WriteLease:
    """Room for what a prefill up to `tokens` adds (a `SegmentSink`), and what was found of it
    already (a `SegmentSource` up to `match_tokens`, where the engine resumes).

    Everything must be ready before `commit`: full attention from `skip_tokens` of its group to
    `tokens`, windows and states after `tokens` (unless that is `match_tokens`: then there is
    nothing to compute) and after each of `checkpoint_tokens`.
    """

    def __init__(self, ticket: Ticket, pages: Pages, line: Line, sent: Future[None]) -> None:
        self.ticket = ticket
        self.tokens = ticket.tokens
        self.match_tokens = ticket.match_tokens
        self.skip_tokens: Mapping[str, int] = ticket.skip_tokens  # of the local pool
        self.checkpoint_tokens = ticket.checkpoint_tokens
        # With a grant: done when the receiver has committed, TransferFailed as soon as it is known
        # that it will not (the prefill is then of use to the local pool alone). Without one, and in
        # a process that joined: never done.
        self.sent = sent
        self._pages = pages
        self._readable = table_of(ticket.readable)
        self._writable = table_of(ticket.writable)
        self._line = line
        self._over = False

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        return self._pages.views(segment, self._writable)

    def ready(self, segment: Segment) -> None:
        """One way and without waiting. With a grant it leaves at once, where the receiver lacks
        it. Never raises: a kvd that is gone is told by `commit`."""
        name = SegmentName(segment.group, segment.layer, segment.start, segment.stop)
        self._line.ready(self.ticket.lease_id, name)

    def views(self, segment: Segment) -> Sequence[memoryview]:
        """Of the prefix that was found."""
        return self._pages.views(segment, self._readable)

    def commit(self) -> None:
        """Everything is ready: block-aligned state becomes prefix of the local pool. Waits for
        nothing remote, and ends this lease for the engine; InputError when something is missing."""
        self._over = True
        self._line.call(Commit(self.ticket.lease_id))

    def abort(self, reason: str) -> None:
        """Gives everything back, and up the transfer. Nobody of this engine writes any more.
        Idempotent, and nothing after a commit."""
        if not self._over:
            self._over = True
            try:
                self._line.call(Abort(self.ticket.lease_id, reason))
            except ConnectionLost:
                pass
