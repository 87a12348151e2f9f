"""Hot prefixes, spread before their holder becomes the bottleneck; and saved from nodes that leave.
A loop of the gateway that plans; what is worth a copy is `GlobalKVManager`'s to say.

A route would copy a prefix, too, but only where that is better for the one request: everybody would
wait at the holder for as long as a copy takes. Paper: section 3.2 (rebalancing).
"""

from __future__ import annotations

import asyncio
import math

from prfaas.clock import Clock
from prfaas.config.deployment import MovesSection
from prfaas.contracts.kvd_api import PULL_S, KvdReport
from prfaas.gateway.planning.evacuation import Evacuations
from prfaas.gateway.planning.prefix_copies import PrefixCopies, move_of
from prfaas.gateway.router import Router
from prfaas.types import BlockHash, NodeId

LONGEST_WAIT_S = 0.5  # a sender whose bytes have waited longer gets no more to do
LOOK_EVERY_S = 0.25
AGAIN_S = 30.0  # a prefix goes to the same node at most once in so long: it may not stay there


class Replication:
    def __init__(
        self,
        router: Router,
        moves: PrefixCopies,
        evacuations: Evacuations,
        clock: Clock,
        rules: MovesSection,
    ) -> None:
        self._router = router
        self._moves = moves
        self._evacuations = evacuations
        self._clock = clock
        self._rules = rules
        self._made_s = -math.inf  # the last one began
        self._copied_s: dict[tuple[NodeId, BlockHash], float] = {}
        self._left: set[NodeId] = set()  # whose engine is gone, and whose hot prefixes are not

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._rules.every_s))
            self.look()

    def look(self) -> None:
        """Begins what is worth it now."""
        self._save()
        if self._rules.replicate:
            self._spread()

    def _spread(self) -> None:
        now, rules = self._clock.now(), self._rules
        if now < self._made_s + rules.every_s or len(self._moves.of_hot_ones) >= rules.at_once:
            return
        self._copied_s = {key: at for key, at in self._copied_s.items() if now < at + AGAIN_S}
        proposals = self._router.manager.replications(
            now, self._calm_pools(), self._router.waits_s(), saturated_s=rules.saturated_s
        )
        for proposal in proposals:
            key = (proposal.target, proposal.hashes[-1])
            if key in self._copied_s or proposal.crosses_clusters:
                continue
            if self._moves.start(move_of("replicate", proposal), PULL_S) is not None:
                self._copied_s[key] = self._made_s = now
                return

    def _calm_pools(self) -> set[NodeId]:
        found = set()
        for node in self._router.pools():
            member = self._router.members.named(node)
            if member is not None and member.report is not None and is_calm(member.report):
                found.add(node)
        return found

    def _save(self) -> None:
        """An engine that drains, or does not answer, and a kvd that does: its pool may be gone
        soon."""
        now, router = self._clock.now(), self._router
        for node in router.pools():
            member = router.members.named(node)
            assert member is not None
            if member.alive(now):
                self._left.discard(node)
            elif node not in self._left and self._evacuations.over(node):
                self._evacuations.forget(node)
                self._left.add(node)


def is_calm(report: KvdReport) -> bool:
    """Whether what this kvd has to send, over the fabric and between clusters, leaves soon."""
    return all(link.backlog_bytes == 0 or link.waited_s <= LONGEST_WAIT_S for link in report.links)
