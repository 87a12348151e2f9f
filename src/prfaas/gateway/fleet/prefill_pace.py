"""How long prefills take in practice, and the costs that routing computes with.

A cluster's profile is corrected by what its prefills took (`scheduler/long_term`). A new correction
changes the costs of every view that the board makes from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prfaas.clock import Clock
from prfaas.config.deployment import CorrectionSection
from prfaas.scheduler.board import Board
from prfaas.scheduler.costs import Costs
from prfaas.scheduler.long_term.profile_correction import ProfileCorrection
from prfaas.scheduler.request import Route
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)


class PrefillPace:
    def __init__(
        self,
        costs: Mapping[ClusterId, Costs],
        board: Board,
        rules: CorrectionSection,
        clock: Clock,
    ) -> None:
        """`costs`: of each PD cluster."""
        self.costs = costs
        self._board = board
        self._paces = ProfileCorrection(rules)
        self._clock = clock

    @property
    def factors(self) -> Mapping[ClusterId, float]:
        """Observed over stated prefill times, where that is not 1."""
        return self._paces.factors

    def record_prefill(
        self,
        route: Route,
        tokens: int,
        cached: int,
        sent_s: float,
        *,
        beside_others: bool = False,
    ) -> float:
        """The prefill node has answered: it has prefilled `tokens`, of which `cached` were in its
        cache. Returns when it began. A prefill that ran beside those of other gateways does not
        count: it may have waited for them."""
        now = self._clock.now()
        before = self._paces.factors
        cached = min(max(0, cached), tokens)  # as the node reports it
        stated_s = self.stated_s(route, tokens - cached, cached)
        took_s = self._paces.record_prefill(
            route.cluster, route.prefill, stated_s, sent_s, now, counts=not beside_others
        )
        if self._paces.factors is not before:
            factors = self._paces.factors
            self.costs = {home: costs.paced(factors) for home, costs in self.costs.items()}
            for home, costs in self.costs.items():
                self._board.set_costs(costs, home)
            factor = self._paces.factors[route.cluster]
            log.info("%s: prefills take %.2f times what its profile states", route.cluster, factor)
        return now - took_s

    def stated_s(self, route: Route, new_tokens: int, cached_tokens: int) -> float:
        """What the profile of the route's prefill node states for a prefill."""
        costs = self.costs[route.decode_cluster]
        return costs.stated_s[route.cluster](new_tokens, cached_tokens)

    def restart(self, node: NodeId) -> None:
        """Begins a warm-up of a node that has restarted or is gone. Its prefills do not count."""
        self._paces.reset_node(node)
