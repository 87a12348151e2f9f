"""Metrics of how well each PD cluster is served, and of the PrfaaS clusters that prefill for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import gauge
from prfaas.scheduler.service import SERVICE_LEVELS, ClusterNodes, Service, why_no_prefill_at
from prfaas.types import ClusterId


def service_metrics(
    services: Mapping[ClusterId, Service], remotes: Mapping[ClusterId, Sequence[ClusterNodes]]
) -> Iterator[Metric]:
    """The clusters of the deployment file bound the number of series."""
    levels = gauge(
        "home_service",
        "How well a PD cluster is served: 1 for its level, 0 for the others. `degraded`: every "
        "request is answered, but one node prefills and decodes it, another PD cluster decodes, "
        "or the plan has capacity 0. `unserved`: none of its nodes is in use.",
        *("home", "level"),
    )
    prefills = gauge(
        "prefill_cluster_usable",
        "Whether a PrfaaS cluster can prefill for a PD cluster now: a node is in use, and the "
        "link is not cut. The series is absent while the cluster is drained.",
        *("home", "cluster"),
    )
    for home, service in services.items():
        for level in SERVICE_LEVELS:
            levels.add_metric([home, level], service.level == level)
        for remote in remotes[home]:
            if not remote.drained:
                usable = not why_no_prefill_at(remote, home)
                prefills.add_metric([home, remote.cluster], usable)
    yield from (levels, prefills)
