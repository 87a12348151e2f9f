"""How long prefills take in practice, and the costs that routing computes with.

The profiles are corrected by what prefills took (`scheduler/long_term`). A new correction changes
the costs, or the pace of a node, in every view that the board makes from then on.
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
        self._factors: Mapping[ClusterId, float] = {}  # those that the costs have
        self._node_paces: Mapping[NodeId, float] = {}  # those that the board has

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
        cached = min(max(0, cached), tokens)  # as the node reports it
        stated_s = self.stated_s(route, tokens - cached, cached)
        took_s = self._paces.record_prefill(
            route.cluster, route.prefill, stated_s, sent_s, now, counts=not beside_others
        )
        self._apply()
        return now - took_s

    def update(self) -> None:
        """Called twice a second: what was not observed for a while is believed less."""
        self._paces.doubt_old(self._clock.now(), self._board.has_own_prefills)
        self._apply()

    def _apply(self) -> None:
        """Routing computes with the corrections from now on."""
        factors, before = self._paces.factors, self._factors
        if factors is not before:
            self._factors = factors
            self.costs = {home: costs.paced(factors) for home, costs in self.costs.items()}
            for home, costs in self.costs.items():
                self._board.set_costs(costs, home)
            for cluster, factor in factors.items():
                if factor != before.get(cluster, 1.0):
                    log.info("%s: prefills take %.3g times the stated time", cluster, factor)
        paces, known = self._paces.paces, self._node_paces
        if paces is not known:
            self._node_paces = paces
            for node in paces.keys() | known.keys():
                pace = paces.get(node, 1.0)
                if node in self._board and pace != self._board.node(node).pace:
                    self._board.set_pace(node, pace)
                    log.info("%s: prefills take %.3g times as long as at its like", node, pace)

    def stated_s(self, route: Route, new_tokens: int, cached_tokens: int) -> float:
        """What the profile of the route's prefill node states for a prefill."""
        costs = self.costs[route.decode_cluster]
        return costs.stated_s[route.cluster](new_tokens, cached_tokens)

    def restart(self, node: NodeId) -> None:
        """Begins a warm-up of a node that has restarted or is gone. Its prefills do not count."""
        self._paces.reset_node(node)
        self._apply()
