"""Orders to the relays of a deployment for fault injection: the links cut, slowed and damaged."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.launch.children import Children
from prfaas.launch.commands import RelayedLink


class Links:
    """The WAN, which consists of the links from PrfaaS clusters; and what connects the gateways.
    Links between PD clusters are left alone: over them a request reaches the other PD cluster when
    its own cannot serve it, so that requests always have a way."""

    def __init__(
        self, children: Children, links: Sequence[RelayedLink], between_gateways: str | None
    ) -> None:
        """`links`: from PrfaaS clusters. `between_gateways`: the name of the relay there."""
        self._children = children
        self._links = links
        self._between_gateways = between_gateways

    def order(self, order: str, cluster: str | None = None) -> None:
        """Sends a line, in the syntax of `prfaas wan --control`, to the relays of all links, or of
        those from one cluster."""
        for way in self._links:
            if cluster in (None, way.link.source):
                self._children.named(way.name).write_line(order)

    def set_rates(self, share: float) -> None:
        """Of all links, as a share of what each has in the deployment."""
        for way in self._links:
            self._children.named(way.name).write_line(f"gbps {way.link.gbps * share:g}")

    def order_between_gateways(self, order: str) -> None:
        assert self._between_gateways is not None, "the gateways of one PD cluster do not talk"
        self._children.named(self._between_gateways).write_line(order)
