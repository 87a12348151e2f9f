"""What an operator says about the Kubernetes clusters of a deployment. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from prfaas.config import Deployment
from prfaas.config.address import Address, parse_address
from prfaas.config.deployment import Cluster
from prfaas.errors import InputError
from prfaas.security.peers import is_host_name

NetworkKind: TypeAlias = Literal["pod", "host"]
RotationStep: TypeAlias = Literal["add", "use", "remove"]
# Names of pods are labels of DNS names, and have an ordinal after the cluster's name.
_CLUSTER_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", re.ASCII)
_TAKEN = ("gateway", "gateway-members")  # names of services
EVERYWHERE = ("0.0.0.0/0", "::/0")


class RenderOptions(msgspec.Struct, frozen=True, kw_only=True):
    gateway_addresses: dict[str, Address]  # of each PD cluster: where others reach its gateway
    network: NetworkKind = "pod"
    peer_networks: tuple[str, ...] = EVERYWHERE  # of pods of other clusters, or of their hosts
    certificate_names: dict[str, tuple[str, ...]] = {}  # more names of a cluster's gateway
    node_selectors: dict[str, dict[str, str]] = {}  # by cluster
    monitoring: bool = True  # with ServiceMonitors, which need Prometheus's operator
    monitoring_namespace: str = "monitoring"
    tenants: tuple[str, ...] = ("default",)
    registry: str = ""  # of the images
    model_claim: str | None = None  # PersistentVolumeClaim with the checkpoint
    model_path: str | None = None  # of the checkpoint in the pods; None: by the model's name
    ssd_size: str | None = None
    days: int = 365  # validity of certificates


def check_names(deployment: Deployment) -> None:
    """Raises InputError when a cluster's name cannot be that of a StatefulSet."""
    for index, cluster in enumerate(deployment.clusters):
        if not _CLUSTER_NAME.fullmatch(cluster.name) or cluster.name in _TAKEN:
            raise InputError(
                f"{cluster.name!r} cannot be the name of a StatefulSet",
                where=f"clusters.{index}.name",
                fix="use at most 40 small letters, digits and -, and not the name gateway",
            )


def parse_gateway_addresses(values: Sequence[str], deployment: Deployment) -> dict[str, Address]:
    """`CLUSTER=HOST:PORT` for every PD cluster."""
    where = "--gateway-address"
    homes = [pd.name for pd in deployment.of_kind("pd")]
    found = {
        cluster: parse_address(text, where) for cluster, text in parse_pairs(values, homes, where)
    }
    missing = [name for name in homes if name not in found]
    if missing:
        raise InputError(
            f"the gateway of {missing[0]!r} has no address",
            where=where,
            fix=f"give --gateway-address {missing[0]}=HOST:PORT, where the pods and gateways of "
            "other clusters reach it",
        )
    return found


def parse_selectors(values: Sequence[str], deployment: Deployment) -> dict[str, dict[str, str]]:
    """`CLUSTER=LABEL=VALUE`; repeatable for a cluster."""
    where = "--node-selector"
    found: dict[str, dict[str, str]] = {}
    for cluster, text in parse_pairs(values, _names(deployment), where):
        label, equals, value = text.partition("=")
        if not equals or not label:
            raise InputError(f"{text!r} is not a label", where=where, fix="give LABEL=VALUE")
        found.setdefault(cluster, {})[label] = value
    return found


def parse_names(values: Sequence[str], deployment: Deployment) -> dict[str, tuple[str, ...]]:
    """`CLUSTER=NAME`; repeatable for a cluster."""
    where = "--gateway-name"
    homes = [pd.name for pd in deployment.of_kind("pd")]
    found: dict[str, tuple[str, ...]] = {}
    for cluster, name in parse_pairs(values, homes, where):
        if not is_host_name(name):
            raise InputError(f"{name!r} is not a host name", where=where, fix="give a DNS name")
        found[cluster] = (*found.get(cluster, ()), name)
    return found


def parse_instances(values: Sequence[str], deployment: Deployment) -> Deployment:
    """`CLUSTER=N`: the deployment with so many instances there."""
    where = "--instances"
    counts: dict[str, int] = {}
    for cluster, text in parse_pairs(values, _names(deployment), where):
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= 10_000):
            raise InputError(f"{text!r} is not a number of instances", where=where, fix="give N")
        counts[cluster] = int(text)

    def changed(cluster: Cluster) -> Cluster:
        if cluster.name not in counts:
            return cluster
        gpus = counts[cluster.name] * cluster.gpus_per_instance
        return msgspec.structs.replace(cluster, gpus=gpus, prefill=None, decode=None)

    clusters = [changed(cluster) for cluster in deployment.clusters]
    return msgspec.structs.replace(deployment, clusters=clusters)


def parse_networks(values: Sequence[str]) -> tuple[str, ...]:
    """Networks such as 10.1.0.0/16; all addresses where none is given."""
    try:
        return tuple(str(ipaddress.ip_network(text)) for text in values) or EVERYWHERE
    except ValueError as error:
        raise InputError(
            f"{error}", where="--peer-network", fix="give networks such as 10.1.0.0/16"
        ) from None


def parse_pairs(values: Sequence[str], names: Sequence[str], where: str) -> list[tuple[str, str]]:
    pairs = []
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or name not in names:
            raise InputError(
                f"{value!r} does not begin with a cluster and =",
                where=where,
                fix=f"clusters are: {', '.join(names)}",
            )
        pairs.append((name, rest))
    return pairs


def _names(deployment: Deployment) -> list[str]:
    return [cluster.name for cluster in deployment.clusters]
