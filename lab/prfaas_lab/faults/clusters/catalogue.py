"""Cluster-wide faults, for deployments of several PD clusters with a gateway each.

A whole cluster is killed, cut off or drained, or one of the gateways is. Of the faults of single
processes (`faults/catalogue.py`) all but one make sense here as well: which gateway is killed
matters where one of them is elected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from prfaas.contracts.gateway_api import DRAIN_PATH
from prfaas.errors import InputError, PeerError
from prfaas_lab.faults.catalogue import (
    FAULTS,
    STREAMED_TOKENS,
    Fault,
    Mend,
    first_with,
    killed,
    running,
)
from prfaas_lab.faults.deployment import FaultDeployment, planning_gateways
from prfaas_lab.faults.questions import Verdict

OUT_S = 10.0  # for which a cluster is gone: requests have to be served without it
# Longer than the planning lease, so that another gateway plans before this one returns.
NO_GATEWAY_S = 6.0


# Victims ------------------------------------------------------------------------------------------


async def prfaas_cluster_at_work(deployment: FaultDeployment) -> str | None:
    """A PrfaaS cluster that prefills or sends for a request."""

    async def works(name: str) -> bool:
        return any((await deployment.stats(name))["outgoing"].values())

    return await _first_cluster(deployment, deployment.layout.clusters("prfaas"), works)


async def pd_cluster_at_work(deployment: FaultDeployment) -> str | None:
    """A PD cluster with a node that generates."""
    works = partial(running, deployment)
    return await _first_cluster(deployment, deployment.layout.clusters("pd"), works)


async def _first_cluster(
    deployment: FaultDeployment,
    clusters: Sequence[str],
    works: Callable[[str], Awaitable[bool]],
) -> str | None:
    for cluster in clusters:
        if await first_with(deployment.layout.nodes_of(cluster), works) is not None:
            return cluster
    return None


async def planner(deployment: FaultDeployment) -> str | None:
    """The gateway that plans; None while none or more than one does."""
    found = await planning_gateways(deployment)
    return found[0] if len(found) == 1 else None


async def follower(deployment: FaultDeployment) -> str | None:
    """A gateway that follows the plan of the one that plans."""
    plans = await planner(deployment)
    return next((name for name in deployment.gateways if plans not in (None, name)), None)


# Strikes ------------------------------------------------------------------------------------------


async def cluster_killed(deployment: FaultDeployment, cluster: str) -> Mend:
    """All nodes and kvds of the cluster. Its gateway, if it has one, goes on."""
    deployment.layout.struck[cluster] += 1
    nodes = deployment.layout.nodes_of(cluster)
    kvds = [f"kvd-{node}" for node in nodes]
    await asyncio.gather(*(deployment.kill(name) for name in (*nodes, *kvds)))

    async def restart() -> None:
        await asyncio.gather(*map(deployment.restart, kvds))  # an engine needs its kvd
        await asyncio.gather(*map(deployment.restart, nodes))

    return restart


async def cluster_cut(deployment: FaultDeployment, cluster: str) -> Mend:
    deployment.layout.struck[cluster] += 1
    deployment.links.order("outage", cluster)

    async def restore() -> None:
        deployment.links.order("restore", cluster)

    return restore


async def gateways_cut(deployment: FaultDeployment, name: str) -> Mend:
    deployment.links.order_between_gateways("outage")

    async def restore() -> None:
        deployment.links.order_between_gateways("restore")

    return restore


async def cluster_drained(deployment: FaultDeployment, cluster: str) -> Mend:
    """As an operator does it for maintenance."""
    ordered = 0
    for gateway in range(len(deployment.gateways)):
        with suppress(PeerError):  # a gateway that was killed hears of the order from another
            await _order_drain(deployment, gateway, cluster, drained=True)
            ordered += 1
    if not ordered:
        raise PeerError("no gateway accepts an order now")
    deployment.layout.struck[cluster] += 1

    async def returned() -> bool:
        for gateway in range(len(deployment.gateways)):
            if await is_drained(deployment, gateway, cluster):
                await _order_drain(deployment, gateway, cluster, drained=False)
                return False
        return True

    return partial(deployment.until, returned)


async def _order_drain(
    deployment: FaultDeployment, gateway: int, cluster: str, *, drained: bool
) -> None:
    url = f"{deployment.targets[gateway].url}{DRAIN_PATH}"
    await deployment.post(url, {"cluster": cluster, "drained": drained})


async def is_drained(deployment: FaultDeployment, gateway: int, cluster: str) -> bool:
    """Whether the gateway follows an order to drain the cluster. Raises `PeerError`."""
    clusters = (await deployment.state(gateway))["clusters"]
    return any(one["drained"] for one in clusters if one["cluster"] == cluster)


CLUSTER_FAULTS = (
    Fault(
        "prfaas-cluster-killed",
        "PrfaaS cluster killed",
        "far",
        prfaas_cluster_at_work,
        cluster_killed,
        lasts_s=OUT_S,
    ),
    Fault(
        "pd-cluster-killed",
        "PD cluster killed, without its gateway",
        "decode",
        pd_cluster_at_work,
        cluster_killed,
        lasts_s=OUT_S,
        may=frozenset({Verdict.BROKEN}),
        tokens=STREAMED_TOKENS,
    ),
    Fault(
        "planner-killed",
        "gateway that plans killed",
        "gateway",
        planner,
        killed,
        lasts_s=NO_GATEWAY_S,
        may=frozenset({Verdict.LOST}),
    ),
    Fault(
        "follower-killed",
        "gateway that follows killed",
        "gateway",
        follower,
        killed,
        lasts_s=NO_GATEWAY_S,
        may=frozenset({Verdict.LOST}),
    ),
    Fault(
        "prfaas-cluster-cut",
        "all links of a PrfaaS cluster cut",
        "wan",
        prfaas_cluster_at_work,
        cluster_cut,
        lasts_s=OUT_S,
    ),
    Fault(
        "gateways-cut",
        "connection between the gateways cut",
        "gateway",
        planner,
        gateways_cut,
        lasts_s=OUT_S,
    ),
    Fault(
        "prfaas-cluster-drained",
        "PrfaaS cluster drained",
        "far",
        prfaas_cluster_at_work,
        cluster_drained,
        lasts_s=OUT_S,
    ),
    Fault(
        "pd-cluster-drained",
        "PD cluster drained",
        "decode",
        pd_cluster_at_work,
        cluster_drained,
        lasts_s=OUT_S,
        tokens=STREAMED_TOKENS,
    ),
)
_NAMED_THERE = "gateway-killed"  # two faults here say which gateway


def faults_of(pd_clusters: int) -> Sequence[Fault]:
    """The faults that can strike a deployment with so many PD clusters."""
    if pd_clusters == 1:
        return FAULTS
    return [*(fault for fault in FAULTS if fault.name != _NAMED_THERE), *CLUSTER_FAULTS]


def choose_faults(only: Collection[str], pd_clusters: int) -> list[Fault]:
    """The faults of these names; all that the deployment can have where no name is given. Raises
    `InputError` for a name of another fault."""
    possible = faults_of(pd_clusters)
    names = [fault.name for fault in possible]
    for name in only:
        if name not in names:
            raise InputError(
                f"{name} cannot strike a deployment with "
                f"{'one pd cluster' if pd_clusters == 1 else 'several pd clusters'}",
                where="--fault",
                fix=f"name some of these: {', '.join(names)}",
            )
    return [fault for fault in possible if not only or fault.name in only]


def is_cluster_wide(fault: str) -> bool:
    return any(fault == one.name for one in CLUSTER_FAULTS)


def draw_from(possible: Sequence[Fault], struck: Collection[str]) -> Sequence[Fault]:
    """The faults of which the next one is drawn: before any cluster-wide fault has struck, only
    those, so that also a short soak has one."""
    if any(map(is_cluster_wide, struck)):
        return possible
    return [fault for fault in possible if is_cluster_wide(fault.name)] or possible
