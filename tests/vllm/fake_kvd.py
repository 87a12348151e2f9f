"""A kvd that answers at once, with real leases, and pins that register nothing."""

from __future__ import annotations

import os
import random
from concurrent.futures import Future

from prfaas.cache.storage.arena import Arena
from prfaas.device.page_pins import PagePins
from prfaas.kvd.engine_socket.leases import MappedArena, ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import LeaseTicket, SegmentName, UnitPages
from prfaas.kvspec import KVSpec, LinearState
from prfaas.kvspec.segments import block_bytes


class HostPins(PagePins):
    def __init__(self) -> None:
        super().__init__("cpu", part_bytes=1000)
        self.registered: set[int] = set()

    def _register(self, address: int, nbytes: int) -> int:
        self.registered.add(address)
        return 0

    def _unregister(self, address: int) -> None:
        self.registered.remove(address)


class Kvd:
    """Of one sequence. Its pages are in any order."""

    gone = False

    def __init__(self, spec: KVSpec, block_tokens: int, tokens: int, page: int = 1 << 12) -> None:
        needed = [
            (group, unit, -(-block_bytes(one, block_tokens) // page))
            for group, one in enumerate(spec.groups)
            for unit in (
                [tokens] if isinstance(one, LinearState) else range(-(-tokens // block_tokens))
            )
        ]
        pages = sum(count for _, _, count in needed)
        fd = os.memfd_create("prfaas-test")
        os.ftruncate(fd, page * pages)
        arena = Arena(fd, page, pages)
        os.close(fd)
        self.memory = arena.view(0, page * pages)
        self.arena = MappedArena(spec, block_tokens, arena)
        order = list(range(pages))
        random.Random(pages).shuffle(order)
        units = tuple(
            UnitPages(group, unit, tuple(order.pop() for _ in range(count)))
            for group, unit, count in needed
        )
        self.ticket = LeaseTicket(1, tokens, 0, {}, (), units, units)
        self.ready_segments: list[SegmentName] = []
        self.flushed: list[int] = []  # segments that were ready then

    def join_write(self, ticket: LeaseTicket) -> WriteLease:
        return WriteLease(ticket, self.arena, self, Future())  # type: ignore[arg-type]

    def join_read(self, ticket: LeaseTicket) -> ReadLease:
        return ReadLease(ticket, self.arena, self)  # type: ignore[arg-type]

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        self.ready_segments.append(segment)

    def flush(self) -> None:
        self.flushed.append(len(self.ready_segments))

    def close(self) -> None: ...
