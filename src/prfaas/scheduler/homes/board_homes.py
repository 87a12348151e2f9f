"""What the board knows about each PD cluster: its costs, the PrfaaS clusters that reach it, and the
links between them. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.scheduler.costs import Costs
from prfaas.scheduler.view import ClusterView, LinkId, LinkView
from prfaas.types import ClusterId


class BoardHome:
    """One PD cluster."""

    __slots__ = ("costs", "links", "local", "remotes")

    def __init__(
        self,
        local: ClusterView,
        remotes: tuple[ClusterView, ...],
        links: Mapping[LinkId, LinkView],
        costs: Costs,
    ) -> None:
        self.local = local
        self.remotes = remotes
        self.links = links
        self.costs = costs


class BoardHomes:
    """All PD clusters. With one of them, every link is shown in its views, also a link between two
    PrfaaS clusters. With several, a link belongs to the PD cluster at its end."""

    def __init__(
        self,
        costs: Mapping[ClusterId, Costs],
        clusters: Mapping[ClusterId, ClusterView],
        links: Mapping[LinkId, LinkView],
    ) -> None:
        only = len(costs) == 1
        self.several = not only
        self._homes: dict[ClusterId, BoardHome] = {}
        for name, of_home in costs.items():
            remotes = tuple(
                view
                for cluster, view in clusters.items()
                if cluster not in costs and (only or (cluster, name) in links)
            )
            seen = {ends: link for ends, link in links.items() if only or name in ends}
            self._homes[name] = BoardHome(clusters[name], remotes, seen, of_home)
        self._first = next(iter(self._homes.values()))

    def get(self, name: ClusterId | None) -> BoardHome:
        """The PD cluster of that name; the first one for None."""
        return self._first if name is None else self._homes[name]

    def find_link(self, link_id: LinkId) -> LinkView | None:
        if not any(end in self._homes for end in link_id) and len(self._homes) > 1:
            return None
        return self._of_link(link_id).links.get(link_id)

    def link(self, link_id: LinkId) -> LinkView:
        return self._of_link(link_id).links[link_id]

    def put_link(self, link_id: LinkId, link: LinkView) -> None:
        home = self._of_link(link_id)
        # Replaced and not modified, because views in use share the old mapping.
        home.links = {**home.links, link_id: link}

    def _of_link(self, link_id: LinkId) -> BoardHome:
        if len(self._homes) == 1:
            return self._first
        source, target = link_id
        return self._homes[target if target in self._homes else source]
