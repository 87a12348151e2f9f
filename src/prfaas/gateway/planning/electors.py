"""The kvds that elect the gateway that plans, and keep the planning records."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from prfaas.config import Deployment
from prfaas.gateway.fleet.member import Member
from prfaas.gateway.fleet.membership import Membership
from prfaas.gateway.planning.candidacy import has_majority


class Electors:
    def __init__(self, deployment: Deployment, members: Membership) -> None:
        self._members = members
        # How many there are, where the file does not list them: one for each instance. 0: it does.
        self.stated = 0
        if not any(cluster.nodes for cluster in deployment.clusters):
            self.stated = sum(cluster.instances for cluster in deployment.clusters)

    def members(self) -> list[Member]:
        """Those of the deployment file, which all gateways read; where it lists none, those that
        have registered, and of a kvd that has moved its new address."""
        members = list(self._members)
        listed = [member for member in members if member.listed]
        return listed or [member for member in members if not member.has_duplicate_name]

    def urls(self) -> Sequence[str]:
        return [member.kvd_url for member in self.members()]

    def are_enough(self, urls: Collection[str], of: Collection[str]) -> bool:
        """Whether these are a majority. `of`: all `urls()`."""
        return has_majority(urls, of, self.stated)
