"""What a pool gives to its callers (matches, leases, counters), and its record of a lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from prfaas.cache.blocks import Block
from prfaas.cache.units import UnitKey
from prfaas.types import BlockHash

LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt a pool could serve at the time of the call. Holds nothing."""

    tokens: int  # the hit: every group can resume here
    attention_tokens: int  # the longest run of full-attention blocks

    @property
    def lost_tokens(self) -> int:
        """Attention tokens that cannot be reused because a state or a window is missing."""
        return self.attention_tokens - self.tokens


@dataclass(frozen=True, slots=True)
class Lease:
    """Pages that stay in memory until `release`.

    The lease covers what was matched (the full-attention run, and the states and windows at the
    hit) and what the prefill adds: everything up to `tokens`, and the states and windows after
    each of `checkpoint_tokens`.
    """

    id: LeaseId
    tokens: int
    match: Match
    skip_tokens: Mapping[str, int]  # per group: leading tokens that need not be written again
    checkpoint_tokens: tuple[int, ...]
    new_bytes: int


@dataclass(frozen=True, slots=True)
class AnswerBasis:
    """What an answer counts on in the pool, on either tier."""

    runs: Mapping[int, int]  # per full-attention group, the blocks before the first new one
    complete: bool  # the pool had all of the answer, also the states after it
    new_pages: int


@dataclass(slots=True)
class LeaseRecord:
    """What the pool keeps about a lease."""

    hashes: tuple[BlockHash, ...]
    pinned: dict[UnitKey, Block]
    new: dict[UnitKey, Block]
    promotable: set[UnitKey]  # of `new`: kept as prefix on commit
    spare_tokens: frozenset[int]  # lengths whose checkpoint is speculative
    # Of an answer, which pins nothing: what was found, and must still be there at the commit.
    answer: AnswerBasis | None = None
    committed: bool = False


@dataclass(slots=True)
class PoolStats:
    """Counters since the pool was made."""

    queries: int = 0
    refused: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0  # found, but not reusable: a state or a window is missing
    evicted_blocks: int = 0  # dropped from every tier
    spilled_blocks: int = 0
    promoted_blocks: int = 0
    unreadable_blocks: int = 0  # on SSD, but not what was written
    dropped_blocks: int = 0  # evicted without a copy on SSD, although the pool has one
    kept_answers: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full a pool is now."""

    capacity_pages: int | None
    used_pages: int
    idle_pages: int  # of the used ones: prefixes under no lease, evicted when room is needed
    leases: int
    spilled_units: int  # on SSD
