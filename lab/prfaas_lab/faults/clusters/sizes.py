"""Makes the several clusters of a deployment small enough for one machine with two cores. Pure."""

from __future__ import annotations

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, Link
from prfaas.launch.scaling import smaller_deployment

SHARE = 0.25  # of the instances: of two_by_two.toml 3 and 2 are left, and 1 of each PrfaaS cluster
FASTEST_GBPS = 1.0  # of the tiny model's links; the others keep their ratio to the fastest


def small_clusters(given: Deployment) -> Deployment:
    """For emulated engines. Links keep their rates, because prompts are as long as before."""
    return msgspec.structs.replace(smaller_deployment(given, SHARE), links=given.links)


def tiny_clusters(given: Deployment, tiny: Deployment) -> Deployment:
    """For real engines: the tiny deployment's model and workload on the clusters and links of the
    given one. All instances are this machine."""
    (machine,) = {cluster.accelerator for cluster in tiny.clusters}

    def on_this_machine(cluster: Cluster) -> Cluster:
        return msgspec.structs.replace(
            cluster,
            accelerator=machine,
            gpus=cluster.instances,
            gpus_per_instance=1,
            workload=None,
            usd_per_gpu_hour=None,
        )

    fastest = max(link.gbps for link in given.links if link.source != link.target)

    def slower(link: Link) -> Link:
        return msgspec.structs.replace(link, gbps=link.gbps * FASTEST_GBPS / fastest)

    return msgspec.structs.replace(
        tiny,
        clusters=[on_this_machine(cluster) for cluster in small_clusters(given).clusters],
        links=[slower(link) for link in given.links],
    )
