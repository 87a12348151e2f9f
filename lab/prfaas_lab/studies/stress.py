"""Stress cases for comparing policies: a slow link, a burst, a lost node, a hot prefix.

Each function takes the arrivals and config of the calm run and returns those of the stressed run.
The time of the stress is drawn from `rng`, so paired runs see the same stress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from prfaas.planner.problem import Problem
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import NodeFault, RateChange, SimConfig, link_id, node_names
from prfaas.types import BlockHash

Stress: TypeAlias = Callable[
    [Problem, Arrivals, SimConfig, np.random.Generator], tuple[Arrivals, SimConfig]
]


def sagging_link(
    problem: Problem, arrivals: Arrivals, config: SimConfig, rng: np.random.Generator
) -> tuple[Arrivals, SimConfig]:
    """Every link from a PrfaaS cluster has a tenth of its bandwidth for 60 s of every 300 s."""
    first_s = float(rng.uniform(0, 300))
    starts = np.arange(first_s, float(arrivals.at_s[-1]), 300.0).tolist()
    changes = tuple(
        change for at_s in starts for change in (RateChange(at_s, 0.1), RateChange(at_s + 60, 1.0))
    )
    links = {link_id(problem, index): changes for index in range(len(problem.remotes))}
    return arrivals, replace(config, links=links)


def burst(
    problem: Problem, arrivals: Arrivals, config: SimConfig, rng: np.random.Generator
) -> tuple[Arrivals, SimConfig]:
    """For 30 s, starting between a fifth and a half of the run, requests come five times as fast.
    Later arrivals move up, so that the rate before and after the burst is unchanged."""
    at = arrivals.at_s
    start = float(rng.uniform(0.2, 0.5)) * float(at[-1])
    pulled = np.minimum(np.maximum(at - start, 0.0), 5 * 30.0) * (1 - 1 / 5)
    return replace(arrivals, at_s=at - pulled), config


def node_lost(
    problem: Problem, arrivals: Arrivals, config: SimConfig, rng: np.random.Generator
) -> tuple[Arrivals, SimConfig]:
    """One node of the first PrfaaS cluster is lost in the first half and does not return."""
    pool = problem.remotes[0].pool
    names = node_names(pool.cluster, pool.instances)
    node = names[int(rng.integers(len(names)))]
    at_s = float(rng.uniform(0.1, 0.4)) * float(arrivals.at_s[-1])
    return arrivals, replace(config, faults=(NodeFault(node, at_s),))


def hot_prefix(
    problem: Problem, arrivals: Arrivals, config: SimConfig, rng: np.random.Generator
) -> tuple[Arrivals, SimConfig]:
    """After the first third of the run, a third of all prompts begin with the same 24 blocks of 512
    tokens (12,288 tokens), put in front of the original prompt: a popular document."""
    assert arrivals.hashes is not None and config.cache is not None, "needs prefix caches"
    blocks = tuple(BlockHash(b"hot prefix %d" % index) for index in range(24))
    later = arrivals.at_s > float(arrivals.at_s[-1]) / 3
    chosen = later & (rng.random(len(arrivals)) < 1 / 3)
    extra = len(blocks) * config.cache.block_tokens
    hashes = [
        # Hashes are chained: after another beginning, the same text has other hashes.
        (*blocks, *(BlockHash(b"hot" + name) for name in names)) if hot else names
        for names, hot in zip(arrivals.hashes, chosen.tolist(), strict=True)
    ]
    longer = replace(arrivals, prompt_tokens=arrivals.prompt_tokens + extra * chosen, hashes=hashes)
    return longer, config


STRESSES: dict[str, Stress] = {
    "sagging link": sagging_link,
    "burst": burst,
    "node lost": node_lost,
    "hot prefix": hot_prefix,
}
