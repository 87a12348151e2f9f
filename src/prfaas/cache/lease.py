"""What a pool hands out: matches, leases, and its record of a lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from prfaas.cache.block_pool import Block
from prfaas.cache.units import UnitKey
from prfaas.types import BlockHash

LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt a pool could serve at the time of asking. Holds nothing."""

    tokens: int  # the hit: every group can resume here
    attention_tokens: int  # the longest run of full-attention blocks

    @property
    def lost_tokens(self) -> int:
        """Reuse found but lost for want of a state or a window."""
        return self.attention_tokens - self.tokens


@dataclass(frozen=True, slots=True)
class Lease:
    """Pages that stay put until `release` or the deadline.

    Of what was matched: the full-attention run, and the states and windows at the hit. Of what is
    to come: everything up to `tokens`, plus `checkpoint_tokens`, the boundaries after which states
    and windows are wanted as well.
    """

    id: LeaseId
    tokens: int
    match: Match
    skip_tokens: Mapping[str, int]  # per group: leading tokens that need not be written again
    checkpoint_tokens: tuple[int, ...]
    new_bytes: int


@dataclass(slots=True)
class Held:
    """The pool's side of a lease."""

    lease: Lease
    hashes: tuple[BlockHash, ...]
    deadline_s: float
    ttl_s: float
    pinned: dict[UnitKey, Block]
    new: dict[UnitKey, Block]
    promotable: set[UnitKey]  # of `new`: kept as prefix on commit
    spare_tokens: frozenset[int]  # lengths whose checkpoint is on speculation
    committed: bool = False

    def readable(self, key: UnitKey) -> Block | None:
        """What is written: the prefix that was found and, once committed, what was added."""
        block = self.new.get(key) if self.committed else None
        return block if block is not None else self.pinned.get(key)

    def blocks_in_order(self) -> list[Block]:
        """First block of the prompt first, transfer blocks before all."""
        blocks = [*self.pinned.values(), *self.new.values()]
        blocks.sort(key=lambda block: block.node.depth if block.node is not None else 0)
        return blocks


@dataclass(slots=True)
class PoolStats:
    """Counters since the pool was made."""

    queries: int = 0
    refused: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0  # reuse found but lost for want of a state or a window
    evicted_blocks: int = 0  # gone from every tier
    spilled_blocks: int = 0
    promoted_blocks: int = 0
    unreadable_blocks: int = 0  # on SSD, but not what was written


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full a pool is now."""

    capacity_pages: int | None
    used_pages: int
    idle_pages: int  # of the used ones: prefixes that nobody holds, to be evicted when need be
    leases: int
    spilled_units: int  # on SSD
