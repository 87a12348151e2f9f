"""The parts of a kvd that make transfers, without its processes: real pool, arena, listener and
links, and a clock that moves only when a test advances it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prfaas.config.address import Address
from prfaas.contracts.kvd_api import OpenTransfer, shapes_of
from prfaas.engine.chunks import resume_segments
from prfaas.engine.emulated.content import Content
from prfaas.kvd.engine_socket.leases import MappedArena, WriteLease
from prfaas.kvd.engine_socket.messages import (
    Answer,
    Call,
    Done,
    LeaseTicket,
    Register,
    SegmentName,
    table_of,
)
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Storage, Store, StoreOptions
from prfaas.kvd.transfers.incoming import IncomingTransfers, KvdTimeouts
from prfaas.kvd.transfers.links import Links
from prfaas.kvd.transfers.manifest import plan_segments
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.kvspec import KVSpec, Segment, segment_bytes
from prfaas.transport.link import ConnectionBudget, LinkOptions
from prfaas.transport.listener import Listener
from prfaas.types import Grant, NodeId, NotNow, TransferId
from prfaas_lab.testing.clock import FakeClock
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, MEMORY_BYTES, SPEC, names

OPTIONS = KvdTimeouts(grant_s=60.0, dispatch_s=30.0, remember_s=120.0)


@dataclass(frozen=True)
class Parts:
    store: Store
    clock: FakeClock
    listener: Listener
    links: Links
    incoming: IncomingTransfers
    outgoing: OutgoingTransfers

    @property
    def storage(self) -> Storage:
        assert self.store.first is not None
        return self.store.first

    @property
    def mapped(self) -> MappedArena:
        return MappedArena(SPEC, BLOCK, self.storage.arena)

    def register(self, spec: KVSpec = SPEC) -> None:
        """`spec` may name heads; its bytes are those of SPEC."""
        self.store.register(Register("engine", shapes_of(spec), BLOCK, COMPAT))

    def in_use(self) -> tuple[int, int]:
        """Pages of leases, and leases; the pool's invariants are checked."""
        self.storage.pool.check()
        occupancy = self.storage.pool.occupancy()
        return occupancy.used_pages - occupancy.idle_pages, occupancy.leases

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        return self.storage.pool.match(names(prompt)).tokens

    def open(self, prompt: Sequence[int], transfer_id: TransferId | None = None) -> Grant | NotNow:
        return self.incoming.open(
            OpenTransfer(tuple(names(prompt)), len(prompt), COMPAT, transfer_id=transfer_id)
        )

    def grant(self, prompt: Sequence[int], transfer_id: TransferId | None = None) -> Grant:
        grant = self.open(prompt, transfer_id)
        assert isinstance(grant, Grant), grant
        return grant

    def send(self, grant: Grant, prompt: Sequence[int]) -> None:
        """Plays the other kvd: sends everything that the grant requires."""
        content = Content(SPEC, prompt)
        segments = segments_of(grant, len(prompt))
        transfer = self.links.to(grant.data_address).open(
            grant, {one.name: segment_bytes(SPEC, one) for one in segments}
        )
        transfer.ready_all({one.name: [memoryview(content.of(one))] for one in segments})

    def write_lease(self, ticket: LeaseTicket) -> WriteLease:
        return WriteLease(ticket, self.mapped, _Direct(self.outgoing), Future())

    def assert_readable(self, ticket: LeaseTicket, prompt: Sequence[int]) -> None:
        """Every byte that an engine reads to continue after the prompt."""
        content, table = Content(SPEC, prompt), table_of(ticket.readable)
        for segment in resume_segments(SPEC, len(prompt)):
            content.check(segment, self.mapped.views(segment, table))


class _Direct:
    """An engine's connection without a socket."""

    def __init__(self, outgoing: OutgoingTransfers) -> None:
        self._outgoing = outgoing

    @property
    def gone(self) -> bool:
        return False

    def call(self, call: Call) -> Answer:
        return Done()

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        self._outgoing.ready(lease_id, [segment.share])


def segments_of(grant: Grant, tokens: int) -> list[Segment]:
    planned = plan_segments(
        SPEC,
        BLOCK,
        tokens,
        skip_tokens=grant.skip_tokens,
        lengths=(*grant.checkpoint_tokens, tokens),
        match_tokens=0,
        found_tokens={},
    )
    return [plan.segment for plan in planned]


@asynccontextmanager
async def transfer_parts(
    *, memory_bytes: int = MEMORY_BYTES, link: LinkOptions | None = None
) -> AsyncIterator[Parts]:
    """No engine has registered yet."""
    clock = FakeClock()
    store = Store(
        NodeId("pool"), StoreOptions(memory_bytes=memory_bytes), EventLog("instance"), clock
    )
    links = Links(link or LinkOptions(), tls=None, budget=ConnectionBudget(8))
    with Listener(clock=clock) as listener:
        address = str(Address(*listener.address))
        incoming = IncomingTransfers(store, listener, address, OPTIONS, clock)
        outgoing = OutgoingTransfers(store, links, clock)
        try:
            yield Parts(store, clock, listener, links, incoming, outgoing)
        finally:
            links.close()
            listener.close()
            store.close()
