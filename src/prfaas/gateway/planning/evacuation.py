"""Before a node drains or is gone, its hot prefixes go to its cluster's other nodes, hottest first,
within a bound of time. What is not hot, or does not make it, is computed again when it is asked
for. Decisions are `GlobalKVManager.evacuations`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from prfaas.cache.manager import CopyProposal
from prfaas.clock import Clock
from prfaas.config.deployment import MovesSection
from prfaas.gateway.client.kvd_client import ASK_S
from prfaas.gateway.dispatch.background_calls import BackgroundCalls
from prfaas.gateway.planning.prefix_copies import PrefixCopies, move_of
from prfaas.gateway.router import Router
from prfaas.types import NodeId


class Evacuations:
    def __init__(
        self,
        router: Router,
        moves: PrefixCopies,
        errands: BackgroundCalls,
        clock: Clock,
        rules: MovesSection,
    ) -> None:
        self._router = router
        self._moves = moves
        self._errands = errands
        self._clock = clock
        self._rules = rules
        self._begun: dict[NodeId, asyncio.Future[Any] | None] = {}

    def over(self, node: NodeId) -> bool:
        """Whether its hot prefixes are elsewhere, or had their time. The first call begins it."""
        if node not in self._begun:
            self._begun[node] = self._begin(node)
        task = self._begun[node]
        return task is None or task.done()

    def forget(self, node: NodeId) -> None:
        """It has drained, or stays after all: the next `over` begins anew."""
        self._begun.pop(node, None)

    def _begin(self, node: NodeId) -> asyncio.Future[Any] | None:
        if not self._rules.evacuate_s:
            return None
        router = self._router
        proposals = router.manager.evacuations(
            node, self._clock.now(), router.pools(), router.waits_s()
        )
        if not proposals:
            return None
        until_s = self._clock.now() + self._rules.evacuate_s
        within_s = self._rules.evacuate_s + ASK_S
        return self._errands.run(self._carry_out(proposals, until_s), within_s)

    async def _carry_out(self, proposals: Sequence[CopyProposal], until_s: float) -> None:
        for together in batched(proposals, self._rules.at_once):
            left_s = until_s - self._clock.now()
            if left_s <= 0:
                return
            moves = [self._moves.start(move_of("evacuate", one), left_s) for one in together]
            under_way = [task for task in moves if task is not None]
            if under_way:
                await asyncio.wait(under_way)


def batched(proposals: Sequence[CopyProposal], size: int) -> Iterator[Sequence[CopyProposal]]:
    return (proposals[at : at + size] for at in range(0, len(proposals), size))
