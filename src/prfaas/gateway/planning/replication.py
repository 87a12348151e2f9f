"""Replication: copies hot prefixes before their holder becomes the bottleneck, and evacuates nodes
whose engine leaves or whose cluster is drained. `GlobalKVManager` decides which copies are worth
their bytes. Each of several gateways copies the prefixes that are hot in its own traffic.

A route also copies a prefix, but only where that is better for its one request. Without replication
all requests with the prefix would wait at its holder for as long as a copy takes. Paper: section
3.2 (rebalancing).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prfaas.clock import Clock
from prfaas.config.deployment import MovesSection
from prfaas.contracts.kvd_api import PULL_S, KvdReport
from prfaas.gateway.fleet.cached_prefixes import Pool
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.planning.evacuation import Evacuations, wait_at_pools
from prfaas.gateway.planning.prefix_copies import PrefixCopies, copy_of
from prfaas.supervision import repeat
from prfaas.types import BlockHash, Compat, NodeId

LONGEST_WAIT_S = 0.5  # a sender whose bytes have waited longer gets no more copies
STEP_EVERY_S = 0.25
# A prefix is copied to the same node at most once in this time: the node may have evicted it.
AGAIN_S = 30.0


class Replication:
    def __init__(
        self,
        fleet: Fleet,
        copies: PrefixCopies,
        evacuations: Evacuations,
        clock: Clock,
        rules: MovesSection,
    ) -> None:
        self._fleet = fleet
        self._copies = copies
        self._evacuations = evacuations
        self._clock = clock
        self._rules = rules
        self._started_s = -math.inf  # the latest copy
        self._copied_s: dict[tuple[NodeId, Compat | None, BlockHash], float] = {}
        self._evacuated: set[NodeId] = set()  # nodes whose engine is gone

    async def run(self) -> None:
        """Runs the replication loop until cancelled."""

        async def step() -> None:
            self.step()

        every_s = min(STEP_EVERY_S, self._rules.every_s)
        await repeat(step, every_s, self._fleet.failures, loop="replication")

    def step(self) -> None:
        """Starts the copies that are worth making now."""
        self._fleet.failures.contain("replication", self._evacuate_leaving)
        if self._rules.replicate:
            self._fleet.failures.contain("replication", self._replicate)

    def _replicate(self) -> None:
        now, rules = self._clock.now(), self._rules
        under_way = self._copies.under_way_without_request
        if now < self._started_s + rules.every_s or len(under_way) >= rules.at_once:
            return
        self._copied_s = {key: at for key, at in self._copied_s.items() if now < at + AGAIN_S}
        pools = self._fleet.pools()
        waits_s = wait_at_pools(pools, self._fleet.prefill_waits_s())
        self._start_one(now, self._calm(pools), waits_s)

    def _start_one(
        self, now: float, living: set[NodeId], waits_s: Mapping[NodeId, float | None]
    ) -> None:
        proposals = self._fleet.manager.replications(
            now, living, waits_s, saturated_s=self._rules.saturated_s
        )
        for proposal in proposals:
            key = (proposal.target, proposal.compat, proposal.hashes[-1])
            if key in self._copied_s or proposal.crosses_clusters:
                continue
            if self._copies.start(copy_of("replicate", proposal), PULL_S) is not None:
                self._copied_s[key] = self._started_s = now
                return

    def _calm(self, pools: Iterable[Pool]) -> set[NodeId]:
        """The names of the pools whose kvds may be asked for more."""
        found = set()
        for pool in pools:
            member = self._fleet.members.named(pool.node)
            if member is not None and member.report is not None and is_calm(member.report):
                found.add(pool.name)
        return found

    def _evacuate_leaving(self) -> None:
        """Evacuates nodes whose cluster is drained, and nodes whose engine drains or does not
        answer while their kvd still does: the kvd's pool may be gone soon."""
        now, fleet = self._clock.now(), self._fleet
        self._evacuated = {n for n in self._evacuated if fleet.members.named(n) is not None}
        for node in dict.fromkeys(pool.node for pool in fleet.pools()):
            member = fleet.members.named(node)
            stays = member is None or (member.is_alive(now) and member.cluster not in fleet.drained)
            if stays:
                self._evacuated.discard(node)
            elif node not in self._evacuated and self._evacuations.evacuate(node):
                self._evacuations.reset(node)
                self._evacuated.add(node)


def is_calm(report: KvdReport) -> bool:
    """Whether the bytes that this kvd has to send, over the fabric and between clusters, leave
    soon."""
    return all(link.backlog_bytes == 0 or link.waited_s <= LONGEST_WAIT_S for link in report.links)
