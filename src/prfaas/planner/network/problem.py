"""What the planner of several clusters solves: PD clusters with their traffic, and the PrfaaS
clusters that they share.

A `Home` is a PD cluster with the traffic that arrives there and the PrfaaS clusters that have a
path to it; its `Problem` is the same type that a deployment with one PD cluster has. A PrfaaS
cluster that reaches several PD clusters appears in each of their problems with the same number of
instances. Paths are directed, and may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from prfaas.config import Deployment
from prfaas.config.deployment import Cluster
from prfaas.planner.problem import Pool, Problem, Remote


@dataclass(frozen=True, slots=True)
class Home:
    """A PD cluster and the traffic that arrives there."""

    share: float  # of the requests of all PD clusters
    problem: Problem  # its own workload, its instances, and the PrfaaS clusters that reach it

    @property
    def cluster(self) -> str:
        return self.problem.local.pool.cluster


@dataclass(frozen=True, slots=True)
class NetworkProblem:
    """PD clusters that share PrfaaS clusters. The shares of the homes sum to 1."""

    homes: tuple[Home, ...]

    def __post_init__(self) -> None:
        assert abs(sum(home.share for home in self.homes) - 1) < 1e-6, "shares must sum to 1"
        pools = self.prfaas_pools
        for remote in self._remotes():
            known = pools[remote.pool.cluster]
            assert remote.pool.instances == known.instances, "a cluster has one size"

    @property
    def prfaas_pools(self) -> dict[str, Pool]:
        """The PrfaaS clusters by name, in the order in which the homes name them."""
        return {remote.pool.cluster: remote.pool for remote in self._remotes()}

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*self.prfaas_pools.values(), *(home.problem.local.pool for home in self.homes))

    def with_homes(self, change: Callable[[Problem], Problem]) -> NetworkProblem:
        """The problem with `change` applied to the problem of each home."""
        homes = tuple(replace(home, problem=change(home.problem)) for home in self.homes)
        return NetworkProblem(homes)

    def with_remotes(self, change: Callable[[Home, Remote], Remote | None]) -> NetworkProblem:
        """The problem with `change` applied to each pair of home and PrfaaS cluster. None removes
        the path."""
        homes = []
        for home in self.homes:
            changed = (change(home, remote) for remote in home.problem.remotes)
            remotes = tuple(remote for remote in changed if remote is not None)
            homes.append(replace(home, problem=replace(home.problem, remotes=remotes)))
        return NetworkProblem(tuple(homes))

    def _remotes(self) -> list[Remote]:
        return [remote for home in self.homes for remote in home.problem.remotes]


def build_network(
    deployment: Deployment, problem_at: Callable[[Cluster], Problem]
) -> NetworkProblem:
    """The caller makes the problem of each PD cluster, which may need files."""
    shares = deployment.traffic_shares
    pds = deployment.of_kind("pd")
    return NetworkProblem(tuple(Home(shares[pd.name], problem_at(pd)) for pd in pds))
