"""A sink and source over pages of a memory file, as a lease is, without a kvd."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from prfaas.cache.storage.arena import Arena
from prfaas.kvd.engine_socket.leases import MappedArena
from prfaas.kvspec import FullAttention, KVSpec, LinearState, Segment, block_bytes
from prfaas.kvspec.mapped import MappedRanges


class ArenaSegments:
    """Units of the state after exactly `tokens` tokens, each on pages of `page_bytes`."""

    def __init__(
        self,
        spec: KVSpec,
        tokens: int,
        *,
        block_tokens: int = 16,
        page_bytes: int = 4096,
        scattered: bool = False,
    ) -> None:
        keys = []
        for number, group in enumerate(spec.groups):
            if isinstance(group, LinearState):
                keys.append((number, tokens))
            else:
                first = 0 if isinstance(group, FullAttention) else group.first_token(tokens)
                blocks = range(first // block_tokens, -(-tokens // block_tokens))
                keys += [(number, block) for block in blocks]
        needed = {k: -(-block_bytes(spec.groups[k[0]], block_tokens) // page_bytes) for k in keys}
        pages = list(range(2 * sum(needed.values())))
        if scattered:
            random.Random(0).shuffle(pages)
        file = os.memfd_create("prfaas-test")
        os.ftruncate(file, len(pages) * page_bytes)
        self.arena = MappedArena(spec, block_tokens, Arena(file, page_bytes, len(pages)))
        os.close(file)
        self.table = {key: tuple(pages.pop(0) for _ in range(needed[key])) for key in keys}
        self._places = self.arena.places(self.table)
        self.segments: list[Segment] = []  # ready

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        return self.arena.views(segment, self.table)

    def mapped_buffers(self, segment: Segment) -> MappedRanges:
        return self.arena.mapped(segment, self._places)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        self.segments.append(segment)

    def views(self, segment: Segment) -> Sequence[memoryview]:
        return self.arena.views(segment, self.table)

    def mapped_views(self, segment: Segment) -> MappedRanges:
        return self.arena.mapped(segment, self._places)

    def content(self, segment: Segment) -> bytes:
        return b"".join(self.views(segment))
