"""Which nodes a deployment for fault injection has, and where. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from prfaas.config import Deployment
from prfaas.launch.services.hosts import list_hosts


class Layout:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._hosts = list_hosts(deployment)
        self.homes = [cluster.name for cluster in deployment.of_kind("pd")]
        self.struck: Counter[str] = Counter()  # how often a fault has struck each whole cluster

    @property
    def remotes(self) -> list[str]:
        """The PrfaaS nodes, in the remote clusters."""
        return [host.name for host in self._hosts if host.cluster not in self.homes]

    @property
    def locals(self) -> list[str]:
        """The nodes of the PD clusters."""
        return [host.name for host in self._hosts if host.cluster in self.homes]

    def nodes_of(self, cluster: str) -> list[str]:
        return [host.name for host in self._hosts if host.cluster == cluster]

    def clusters(self, kind: Literal["pd", "prfaas"]) -> list[str]:
        """Those of this kind, the one first that has been struck least."""
        names = [cluster.name for cluster in self._deployment.of_kind(kind)]
        return sorted(names, key=lambda name: self.struck[name])
