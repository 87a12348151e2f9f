"""What a simulated run assumes beyond the deployment: delays of knowledge, caches, faults.

Nothing in here is random: a run is determined by its problem, its arrivals and this. Whoever wants
faults at random times draws them with the seed that drew the arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.config.deployment import SchedulerSection
from prfaas.config.trace import TRACE_BLOCK_TOKENS
from prfaas.planner.problem import Problem
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId, NodeId


class RateChange(NamedTuple):
    """From `at_s` on a link carries `share` of its configured bandwidth; 0 is an outage."""

    at_s: float
    share: float


class NodeFault(NamedTuple):
    """A node dies with all it holds, and comes back empty (never: infinity)."""

    node: NodeId
    at_s: float
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """One hybrid prefix pool per node."""

    bytes_per_node: float  # memory for prefixes; infinity is allowed
    block_tokens: int = TRACE_BLOCK_TOKENS
    checkpoints: str = "default"  # see cache/checkpoints.py


@dataclass(frozen=True, slots=True)
class SimConfig:
    scheduler: SchedulerSection = SchedulerSection()  # the policy and its constants
    cache: CacheConfig | None = None  # None: arrivals say how much is cached, the same everywhere
    replans: bool = False  # whether the long-term loop runs
    report_interval_s: float = 1.0  # nodes and links report so often ...
    report_lag_s: float = 0.05  # ... and the router hears it so much later
    event_lag_s: float = 0.2  # the router's index learns of cached and evicted blocks this late
    role_switch_s: float = 10.0  # between the end of the drain and the first work of the new role
    decode_kv_bytes: float = math.inf  # KV memory of a decode node, promised from the grant on
    links: Mapping[LinkId, tuple[RateChange, ...]] = field(default_factory=dict)  # ascending
    faults: tuple[NodeFault, ...] = ()
    sample_s: float = 1.0  # width of a bin of the time series
    timeline: bool = False  # keep every span


def local_nodes(problem: Problem) -> tuple[NodeId, ...]:
    """Names of the PD cluster's nodes, in the order in which a first plan gives them roles."""
    return node_names(problem.local.pool.cluster, problem.local.pool.instances)


def node_names(cluster: str, instances: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(f"{cluster}-{index}") for index in range(instances))


def link_id(problem: Problem, remote: int) -> LinkId:
    """The link over which a PrfaaS cluster hands off."""
    source = problem.remotes[remote].pool.cluster
    return ClusterId(source), ClusterId(problem.local.pool.cluster)
