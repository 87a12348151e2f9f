"""Orders of operators to drain a cluster, as all gateways of a deployment agree on them.

An order has a version. Gateways merge each other's orders: of one cluster, the highest version
counts, and of equal versions the one that drains, so that all gateways choose the same. A drained
cluster gets no new requests; that is the routers' work, not this module's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from prfaas.contracts.gateway_api import MAX_COUNT, DrainOrder
from prfaas.types import ClusterId


def merge_orders(*given: Mapping[ClusterId, DrainOrder]) -> dict[ClusterId, DrainOrder]:
    merged: dict[ClusterId, DrainOrder] = {}
    for orders in given:
        for cluster, order in orders.items():
            known = merged.get(cluster)
            if known is None or _rank(order) > _rank(known):
                merged[cluster] = order
    return merged


def _rank(order: DrainOrder) -> tuple[int, bool]:
    return order.version, order.drained


class Drains:
    """The orders that this gateway follows, for the clusters of its deployment."""

    def __init__(
        self, clusters: Collection[ClusterId], wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clusters = frozenset(clusters)
        self._wall_clock = wall_clock
        self._orders: dict[ClusterId, DrainOrder] = {}

    @property
    def orders(self) -> Mapping[ClusterId, DrainOrder]:
        return self._orders

    @property
    def drained(self) -> frozenset[ClusterId]:
        return frozenset(cluster for cluster, order in self._orders.items() if order.drained)

    def set(self, cluster: ClusterId, drained: bool) -> DrainOrder:
        """A new order, which counts from now on. The cluster is one of the deployment's."""
        assert cluster in self._clusters, cluster
        highest = max((order.version for order in self._orders.values()), default=0)
        # A gateway that has just started may not have seen the orders of the others yet. Its order
        # is still the newest, because versions are at least the seconds of the wall clock.
        version = min(max(highest + 1, int(self._wall_clock())), MAX_COUNT)
        order = DrainOrder(drained, version)
        self._orders[cluster] = order
        return order

    def merge(self, others: Mapping[ClusterId, DrainOrder]) -> bool:
        """Follows newer orders of other gateways. Whether anything changed. Clusters that are not
        in the deployment are ignored."""
        known = {name: order for name, order in others.items() if name in self._clusters}
        merged = merge_orders(self._orders, known)
        changed = merged != self._orders
        self._orders = merged
        return changed
