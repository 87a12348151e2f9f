"""How fast a pool hands out and takes back pages, and how many neighbours they are.

    python -m prfaas_lab bench pages [--pages 200000] [--reservations 2000]

A pool without bytes serves prompts of 1,000 to 64,000 tokens, which share no prefix: some leases
are open at a time, they end in any order, a quarter of them without a commit. The figures are from
the time after the pool has been full once, when every reservation evicts. The result is JSON. Rates
are per second of CPU time; a run is pages that a reservation got as neighbours.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import click

from prfaas.cache.blocks import Eviction
from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import LRU, CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.lease import Lease, LeaseId
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.types import BlockHash

BLOCK_TOKENS = 64
OPEN_LEASES = 8
MODELS = {
    "attention": KVSpec((FullAttention("full", tuple(range(36)), 4096),)),
    "hybrid": KVSpec(
        (
            FullAttention("full", tuple(range(7)), 1152),
            LinearState("linear", tuple(range(7, 27)), 2_170_880),
        )
    ),
}


def prefill_seconds(new_tokens: int, cached_tokens: int) -> float:
    return 1e-5 * new_tokens + 1e-10 * new_tokens * (new_tokens + 2 * cached_tokens)


def make_pool(spec: KVSpec, pages: int, evict: str) -> HybridPrefixPool:
    layout = choose_layout(unit_bytes(spec, BLOCK_TOKENS))
    eviction: Eviction = LRU()
    if evict == "cost":
        eviction = CostAware(rules_for(spec), layout, BLOCK_TOKENS, prefill_seconds)
    return HybridPrefixPool(
        spec,
        BLOCK_TOKENS,
        PoolStorage(layout, pages),
        eviction=eviction,
        checkpoints=checkpoint_policy("default", BLOCK_TOKENS),
    )


def run_lengths(pool: HybridPrefixPool, lease_id: LeaseId) -> list[int]:
    """Pages in each run of neighbours, in the order of groups and tokens."""
    table = pool.tables(lease_id).writable
    found: list[int] = []
    after = -1
    for key in sorted(table):
        for page in table[key]:
            if page == after:
                found[-1] += 1
            else:
                found.append(1)
            after = page + 1
    return found


def measure(spec: KVSpec, evict: str, pages: int, reservations: int) -> dict[str, Any]:
    pool = make_pool(spec, pages, evict)
    choose = random.Random(1)
    names = iter(range(10**12))
    leases: list[LeaseId] = []
    units = refused = warm = 0
    now = reserve_s = release_s = 0.0
    runs: list[int] = []
    counts: list[int] = []
    while len(counts) < reservations:
        tokens = int(2 ** choose.uniform(10, 16))
        hashes = [BlockHash(next(names).to_bytes(8, "big")) for _ in range(tokens // BLOCK_TOKENS)]
        now += 1.0
        started = time.process_time()
        lease = pool.reserve(hashes, tokens, now=now)
        reserve_took_s = time.process_time() - started
        if not isinstance(lease, Lease):
            refused += 1
            pool.release(leases.pop(0), now)
            continue
        leases.append(lease.id)
        is_warm = pool.stats.evicted_blocks > 0 and (warm := warm + 1) > reservations // 4
        if is_warm:
            found = run_lengths(pool, lease.id)
            runs += found
            counts.append(len(found))
            units += len(pool.tables(lease.id).writable)
            reserve_s += reserve_took_s
        if choose.random() < 0.75:
            pool.commit(lease.id, now)
        if len(leases) > OPEN_LEASES:
            ended = leases.pop(choose.randrange(OPEN_LEASES))
            started = time.process_time()
            pool.release(ended, now)
            release_s += (time.process_time() - started) if is_warm else 0.0
    return {
        "reserve_units_per_s": round(units / reserve_s),  # evictions included
        "release_units_per_s": round(units / release_s),
        "pages_per_run": round(sum(runs) / len(runs), 1),
        "runs_per_reservation": {
            "mean": round(statistics.mean(counts), 1),
            "median": statistics.median(counts),
            "largest": max(counts),
        },
        "refused": refused,
    }


@click.command(help=__doc__)
@click.option("--pages", default=200_000, show_default=True, help="Pages of the pool.")
@click.option("--reservations", default=2_000, show_default=True, help="Reservations per case.")
def main(pages: int, reservations: int) -> None:
    result: dict[str, Any] = {}
    for name, evict in (("attention", "lru"), ("hybrid", "cost")):
        result[f"{name}, {evict}"] = measure(MODELS[name], evict, pages, reservations)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
