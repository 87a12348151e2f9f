"""Small models, prompts and pools for the cache's tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from hypothesis import settings

from prfaas.cache.blocks import Eviction
from prfaas.cache.checkpoints import BranchPoints, CheckpointPolicy
from prfaas.cache.eviction import LRU, CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.hashing import block_hashes
from prfaas.cache.journal import Journal
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena, PageLayout, choose_layout
from prfaas.cache.storage.preparation import Preparation
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow
from prfaas.types import BlockHash

BLOCK = 4  # tokens
SEEDED = settings(derandomize=True, deadline=None)  # the same examples on every run

FULL = FullAttention("full0", (0, 2), 8)
WINDOW = SlidingWindow("window0", (3,), 16, window=7)  # 6 tokens: never a whole number of blocks
LINEAR = LinearState("linear0", (1, 4), 96)

SPECS = {
    "full": KVSpec((FULL,)),
    "hybrid": KVSpec((FULL, LINEAR)),
    "windowed": KVSpec((FULL, WINDOW)),
    "linear": KVSpec((LINEAR,)),
    "all": KVSpec((FULL, WINDOW, LINEAR, FullAttention("full1", (5,), 24))),
}


def hashes_of(tokens: Sequence[int], salt: str = "") -> list[BlockHash]:
    return block_hashes(list(tokens), BLOCK, salt=salt)


def layout_of(spec: KVSpec) -> PageLayout:
    return choose_layout(unit_bytes(spec, BLOCK))


def prefill_seconds(new_tokens: int, cached_tokens: int) -> float:
    return 1e-3 * new_tokens + 1e-6 * new_tokens * (new_tokens + 2 * cached_tokens)


def eviction_of(name: str, spec: KVSpec) -> Eviction:
    if name == "lru":
        return LRU()
    return CostAware(rules_for(spec), layout_of(spec), BLOCK, prefill_seconds)


def make_pool(
    spec: KVSpec,
    *,
    pages: int | None = None,
    evict: str = "lru",
    checkpoints: CheckpointPolicy | None = None,
    arena: Arena | None = None,
    ssd: SpillFile | None = None,
    journal: Journal | None = None,
    lease_ids: Iterator[int] | None = None,
    storage: PoolStorage | None = None,
) -> HybridPrefixPool:
    return HybridPrefixPool(
        spec,
        BLOCK,
        storage or PoolStorage(layout_of(spec), pages, arena, ssd),
        eviction=eviction_of(evict, spec),
        checkpoints=checkpoints or BranchPoints(),
        journal=journal,
        lease_ids=lease_ids,
    )


def prepare_now(
    pool: HybridPrefixPool,
    hashes: Sequence[BlockHash],
    tokens: int | None,
    *,
    checkpoint_tokens: Sequence[int] | None = None,
    now: float = 0.0,
    tenant: str = "",
) -> Preparation | None:
    """Carries the whole preparation out, job by job, in this thread. The caller ends it."""
    preparation = pool.prepare(hashes, tokens, checkpoint_tokens=checkpoint_tokens, tenant=tenant)
    while preparation is not None and (jobs := preparation.next_jobs(now)):
        for job in jobs:
            job.run()
            job.finish(now)
    return preparation


def content(nbytes: int, *what: object) -> bytes:
    """Bytes that only this name has."""
    seed = hashlib.sha256(repr(what).encode()).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]
