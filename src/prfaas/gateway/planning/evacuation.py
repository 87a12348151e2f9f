"""Evacuation: before a node drains or leaves, its hot prefixes are copied to other nodes of its
cluster and KV format, hottest first, within a time limit. From a cluster that is drained, they are
copied to the clusters that it has a link to. A prefix that is not hot, or is not
copied in time, is computed again when a request needs it. `GlobalKVManager.evacuations` chooses the
copies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prfaas.cache.manager import CopyProposal
from prfaas.clock import Clock
from prfaas.config.deployment import MovesSection
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.fleet.cached_prefixes import Pool
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.planning.prefix_copies import PrefixCopies, copy_of
from prfaas.types import NodeId


class Evacuations:
    def __init__(
        self,
        fleet: Fleet,
        copies: PrefixCopies,
        background_calls: BackgroundCalls,
        clock: Clock,
        rules: MovesSection,
    ) -> None:
        self._fleet = fleet
        self._copies = copies
        self._background_calls = background_calls
        self._clock = clock
        self._rules = rules
        self._started: dict[NodeId, asyncio.Future[Any] | None] = {}

    def evacuate(self, node: NodeId) -> bool:
        """Starts the node's evacuation with the first call. Returns whether it has ended: the hot
        prefixes are copied, or their time is up."""
        if node not in self._started:
            self._started[node] = self._start(node)
        task = self._started[node]
        return task is None or task.done()

    def reset(self, node: NodeId) -> None:
        """The node has drained, or stays after all: the next `evacuate` starts anew."""
        self._started.pop(node, None)

    def _start(self, node: NodeId) -> asyncio.Future[Any] | None:
        if not self._rules.evacuate_s:
            return None
        fleet = self._fleet
        pools = fleet.pools()
        waits_s = wait_at_pools(pools, fleet.prefill_waits_s())
        living = {pool.name for pool in pools}
        own = [pool.name for pool in pools if pool.node == node]
        targets = self._targets_elsewhere(node, pools)
        proposals = fleet.manager.evacuations(own, self._clock.now(), living, waits_s, targets)
        if not proposals:
            return None
        until_s = self._clock.now() + self._rules.evacuate_s
        within_s = self._rules.evacuate_s + self._fleet.timeouts.kvd_call_s
        return self._background_calls.run(self._copy_all(proposals, until_s), within_s)

    def _targets_elsewhere(self, node: NodeId, pools: Sequence[Pool]) -> list[NodeId] | None:
        """The pools of other clusters that a node of a drained cluster can send to, the best one
        first: PD clusters take over its requests, and the least busy prefill node takes them first.
        None: the node's own cluster stays."""
        fleet = self._fleet
        member = fleet.members.named(node)
        if member is None or member.cluster not in fleet.drained:
            return None
        waits_s = fleet.prefill_waits_s()

        def order(pool: Pool) -> tuple[bool, float]:
            other = fleet.members.named(pool.node)
            wait_s = waits_s[pool.node]
            is_home = other is not None and other.cluster in fleet.homes
            return not is_home, math.inf if wait_s is None else wait_s

        reached = [
            pool
            for pool in pools
            if pool.node in waits_s
            and (other := fleet.members.named(pool.node)) is not None
            and fleet.links.leads(member.cluster, other.cluster)
        ]
        return [pool.name for pool in sorted(reached, key=order)]

    async def _copy_all(self, proposals: Sequence[CopyProposal], until_s: float) -> None:
        for batch in batched(proposals, self._rules.at_once):
            left_s = until_s - self._clock.now()
            if left_s <= 0:
                return
            tasks = [self._copies.start(copy_of("evacuate", one), left_s) for one in batch]
            under_way = [task for task in tasks if task is not None]
            if under_way:
                await asyncio.wait(under_way)


def wait_at_pools(
    pools: Iterable[Pool], waits_s: Mapping[NodeId, float | None]
) -> dict[NodeId, float | None]:
    """How long a prefill would wait at the node of each pool, of those in use."""
    return {pool.name: waits_s[pool.node] for pool in pools if pool.node in waits_s}


def batched(proposals: Sequence[CopyProposal], size: int) -> Iterator[Sequence[CopyProposal]]:
    return (proposals[at : at + size] for at in range(0, len(proposals), size))
