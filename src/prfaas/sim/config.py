"""What a simulated run assumes beyond the deployment: delays of reports, caches, faults.

Nothing in here is random: a run is determined by its problem, its arrivals and this config. A
caller that needs faults at random times draws them with the seed that drew the arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

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
    """A node fails, loses all it holds, and returns empty at `until_s` (infinity: never)."""

    node: NodeId
    at_s: float
    until_s: float = math.inf


class ClusterFault(NamedTuple):
    """All nodes of a cluster fail together, and return empty at `until_s` (infinity: never)."""

    cluster: ClusterId
    at_s: float
    until_s: float = math.inf


class LinkFault(NamedTuple):
    """A link breaks: its transfers end, and their requests start again. From `until_s` on
    (infinity: never) it has the bandwidth again that is configured, or that a `RateChange` set."""

    link: LinkId
    at_s: float
    until_s: float = math.inf


class SlowFault(NamedTuple):
    """The prefills that a node begins take `factor` times as long as its profile states. Faults
    that overlap multiply."""

    node: NodeId
    factor: float
    at_s: float
    until_s: float = math.inf


class DrainFault(NamedTuple):
    """An operator drains a cluster: its nodes finish what they have, and get nothing new until
    `until_s`, when it is taken back into use (infinity: never)."""

    cluster: ClusterId
    at_s: float
    until_s: float = math.inf


Fault: TypeAlias = NodeFault | ClusterFault | LinkFault | SlowFault | DrainFault


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """One hybrid prefix pool per node."""

    bytes_per_node: float  # memory for prefixes; infinity is allowed
    block_tokens: int = TRACE_BLOCK_TOKENS
    checkpoints: str = "default"  # see cache/checkpoints.py
    keep_answers: bool = True  # of traces that say which blocks answers complete


@dataclass(frozen=True, slots=True)
class SimConfig:
    scheduler: SchedulerSection = SchedulerSection()  # the policy and its constants
    cache: CacheConfig | None = None  # None: arrivals state cached lengths, alike at all nodes
    replans: bool = False  # whether the long-term loop runs
    report_interval_s: float = 1.0  # between two reports of a node or link
    report_lag_s: float = 0.05  # from a report until the router has it
    event_lag_s: float = 0.2  # from a cache event until the router's index has it
    decode_kv_bytes: float = math.inf  # KV memory of a decode node, reserved from the grant on
    links: Mapping[LinkId, tuple[RateChange, ...]] = field(default_factory=dict)  # ascending
    faults: tuple[Fault, ...] = ()
    # Round trips between PD clusters, from the one at which a request arrives: the PD clusters that
    # may decode it where its own cannot. Empty: none.
    round_trips: Mapping[LinkId, float] = field(default_factory=dict)
    sample_s: float = 1.0  # width of a bin of the time series
    timeline: bool = False  # whether the result keeps every span
    # The most moments at which nodes and links are recorded (`Result.recording`); 0: none.
    moments: int = 0


def node_names(cluster: str, instances: int) -> tuple[NodeId, ...]:
    """Names of a cluster's nodes. The first plan assigns roles in this order."""
    return tuple(NodeId(f"{cluster}-{index}") for index in range(instances))


def link_id(problem: Problem, remote: int) -> LinkId:
    """The link over which a PrfaaS cluster hands off."""
    source = problem.remotes[remote].pool.cluster
    return ClusterId(source), ClusterId(problem.local.pool.cluster)
