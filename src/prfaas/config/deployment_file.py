"""Reads the deployment file: strict decoding, then the rules that concern several keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prfaas.config.address import parse_address, parse_network, parse_peer_url
from prfaas.config.assignments import assign
from prfaas.config.deployment import (
    Component,
    Deployment,
    Lognormal,
    Mixture,
    WorkloadSection,
)
from prfaas.config.gateway import GatewaySection
from prfaas.config.strict import decode, parse_toml, read_text
from prfaas.errors import InputError

# Shares that differ from 1 in sum by no more than this were rounded: 0.333 for each of three.
_SHARES_ROUNDED = 0.002


def load_deployment(path: str | Path, assignments: Iterable[str] = ()) -> Deployment:
    """The file's deployment, with the keys that `--set KEY=VALUE` changes."""
    raw = parse_toml(read_text(path), path)
    for text in assignments:
        assign(raw, text)
    return parse_deployment(raw, path)


def parse_deployment(raw: dict[str, Any], file: str | Path) -> Deployment:
    deployment = decode(raw, Deployment, file)
    try:
        _check_clusters(deployment)
        _check_traffic(deployment)
        _check_links(deployment)
        _check_relays(deployment)
        _check_gateways(deployment)
        _check_workloads(deployment)
        _check_keys(deployment.gateway)
        _check_tenants(deployment.gateway)
        for index, entry in enumerate(deployment.gateway.proxies):
            parse_network(entry, f"gateway.proxies.{index}")
    except InputError as error:
        raise error.in_file(file) from None
    return deployment


def _check_clusters(deployment: Deployment) -> None:
    names = [cluster.name for cluster in deployment.clusters]
    for index, cluster in enumerate(deployment.clusters):
        at = f"clusters.{index}"
        if names.index(cluster.name) != index:
            raise InputError(
                f"another cluster is named {cluster.name!r}",
                where=f"{at}.name",
                fix="use another name",
            )
        if cluster.instances == 0:
            raise InputError(
                f"{cluster.gpus} GPUs are less than one instance of {cluster.gpus_per_instance}",
                where=f"{at}.gpus",
                fix="add GPUs or lower gpus_per_instance",
            )
        fixed = (cluster.prefill, cluster.decode)
        if fixed == (None, None):
            continue
        if cluster.kind == "prfaas":
            raise InputError(
                "a prfaas cluster only prefills", where=at, fix="remove prefill and decode"
            )
        if cluster.prefill is None or cluster.decode is None:
            raise InputError(
                "the split is incomplete", where=at, fix="set both prefill and decode, or neither"
            )
        if cluster.prefill + cluster.decode != cluster.instances:
            raise InputError(
                f"prefill {cluster.prefill} + decode {cluster.decode} is not "
                f"{cluster.gpus} / {cluster.gpus_per_instance} = {cluster.instances} instances",
                where=at,
                fix="change them so that they add up",
            )
        if cluster.decode == 0:
            raise InputError(
                "the cluster has no decode instance", where=f"{at}.decode", fix="set 1 or more"
            )
    if not deployment.of_kind("pd"):
        raise InputError(
            "no cluster has kind 'pd', so none can decode", where="clusters", fix="add one"
        )


def _check_traffic(deployment: Deployment) -> None:
    for index, cluster in enumerate(deployment.clusters):
        for key in ("traffic_share", "workload"):
            if cluster.kind == "prfaas" and getattr(cluster, key) is not None:
                raise InputError(
                    "no request arrives at a prfaas cluster",
                    where=f"clusters.{index}.{key}",
                    fix="remove it here, and set it on the pd clusters",
                )
    pds = [(i, c) for i, c in enumerate(deployment.clusters) if c.kind == "pd"]
    if len(pds) == 1 and pds[0][1].workload is not None:
        raise InputError(
            "the only pd cluster receives the [workload] of the file",
            where=f"clusters.{pds[0][0]}.workload",
            fix="write this workload as [workload]",
        )
    given = [cluster.traffic_share for _, cluster in pds if cluster.traffic_share is not None]
    if not given:
        return
    for index, cluster in pds:
        if cluster.traffic_share is None:
            raise InputError(
                "is missing, and other pd clusters have it",
                where=f"clusters.{index}.traffic_share",
                fix=f"set it on every pd cluster; the others leave {max(0.0, 1 - sum(given)):.4g}",
            )
    if abs(sum(given) - 1) > _SHARES_ROUNDED:
        raise InputError(
            f"the shares of the pd clusters sum to {sum(given):.6g}",
            where=f"clusters.{pds[-1][0]}.traffic_share",
            fix="change them so that they sum to 1",
        )


def check_units(gbps: float, rtt_ms: float, *, at: str) -> None:
    """Raises for a link whose figures are in other units than those of the file."""
    if gbps > 1e6:
        raise InputError(
            f"{gbps:g} Gbit/s is more than any link has",
            where=f"{at}.gbps",
            fix="the unit is 10^9 bits per second",
        )
    if rtt_ms > 1e4:
        raise InputError(
            f"{rtt_ms:g} ms is longer than any round trip",
            where=f"{at}.rtt_ms",
            fix="the unit is milliseconds",
        )


def _check_links(deployment: Deployment) -> None:
    names = {cluster.name for cluster in deployment.clusters}
    seen = set()
    for index, link in enumerate(deployment.links):
        for key, name in (("from", link.source), ("to", link.target)):
            if name not in names:
                raise InputError(
                    f"no cluster is named {name!r}",
                    where=f"links.{index}.{key}",
                    fix=f"clusters are: {', '.join(sorted(names))}",
                )
        if (link.source, link.target) in seen:
            raise InputError(
                f"a second link from {link.source!r} to {link.target!r}",
                where=f"links.{index}",
                fix="state the aggregate bandwidth once",
            )
        seen.add((link.source, link.target))
        check_units(link.gbps, link.rtt_ms, at=f"links.{index}")
    for index, cluster in enumerate(deployment.clusters):
        targets = [pd.name for pd in deployment.of_kind("pd")]
        if cluster.kind == "prfaas" and not any(deployment.link(cluster.name, t) for t in targets):
            raise InputError(
                f"no link leads from {cluster.name!r} to a pd cluster",
                where=f"clusters.{index}",
                fix=f"add [[links]] with from = {cluster.name!r}, to = {targets[0]!r}",
            )


def _check_relays(deployment: Deployment) -> None:
    """The relays of nodes, which may differ by the cluster that sends."""
    names = [cluster.name for cluster in deployment.clusters]
    for index, cluster in enumerate(deployment.clusters):
        for number, node in enumerate(cluster.nodes):
            if not isinstance(node.via, dict):
                continue
            at = f"clusters.{index}.nodes.{number}.via"
            for source, address in node.via.items():
                if source not in names or source == cluster.name:
                    others = [name for name in names if name != cluster.name]
                    raise InputError(
                        f"no other cluster is named {source!r}",
                        where=f"{at}.{source}",
                        fix=f"other clusters are: {', '.join(sorted(others)) or 'none'}",
                    )
                parse_address(address, f"{at}.{source}")


def _check_gateways(deployment: Deployment) -> None:
    """No entry, or one for each pd cluster."""
    if not deployment.gateways:
        return
    homes = [pd.name for pd in deployment.of_kind("pd")]
    clusters: list[str] = []
    urls: list[str] = []
    for index, entry in enumerate(deployment.gateways):
        at = f"gateways.{index}"
        if entry.cluster not in homes:
            raise InputError(
                f"no pd cluster is named {entry.cluster!r}",
                where=f"{at}.cluster",
                fix=f"pd clusters are: {', '.join(sorted(homes))}",
            )
        if entry.cluster in clusters:
            raise InputError(
                f"a second gateway for {entry.cluster!r}",
                where=f"{at}.cluster",
                fix="keep one entry for each pd cluster",
            )
        url = parse_peer_url(entry.url, f"{at}.url")
        if url in urls:
            raise InputError(
                f"another gateway has the URL {entry.url!r}",
                where=f"{at}.url",
                fix="give each gateway its own host or port",
            )
        clusters.append(entry.cluster)
        urls.append(url)
    if not deployment.gateway.plans:
        raise InputError(
            "the gateways of [[gateways]] agree themselves on which of them plans",
            where="gateway.plans",
            fix="remove the key",
        )
    missing = [name for name in homes if name not in clusters]
    if missing:
        raise InputError(
            f"the pd cluster {missing[0]!r} has no gateway, and other pd clusters have one",
            where="gateways",
            fix=f"add [[gateways]] with cluster = {missing[0]!r}, or remove all entries: "
            "then one gateway serves all pd clusters",
        )


def _check_workloads(deployment: Deployment) -> None:
    sections = {"workload": deployment.workload}
    for index, cluster in enumerate(deployment.clusters):
        if cluster.workload is not None:
            sections[f"clusters.{index}.workload"] = cluster.workload
    parts = [found for at, section in sections.items() for found in _distributions(at, section)]
    for at, part in parts:
        if part.min_tokens > part.max_tokens:
            raise InputError(
                f"{part.min_tokens} is above max_tokens = {part.max_tokens}",
                where=f"{at}.min_tokens",
                fix="swap them",
            )
        if part.max_tokens > 16_777_216:
            raise InputError(
                f"{part.max_tokens} is beyond 16,777,216 tokens", where=f"{at}.max_tokens"
            )
        if not -5 <= part.mu <= 20:
            raise InputError(
                f"exp({part.mu:g}) tokens is not a plausible median",
                where=f"{at}.mu",
                fix="mu is the mean of the natural logarithm of the length",
            )
    threshold = deployment.scheduler.threshold_tokens
    if threshold is not None and parts:
        longest = max(part.max_tokens for _, part in parts)
        if threshold > longest:
            raise InputError(
                f"{threshold} is above the longest prompt ({longest} tokens)",
                where="scheduler.threshold_tokens",
                fix="lower it, or use policy 'local' to never offload",
            )


def _distributions(at: str, section: WorkloadSection) -> list[tuple[str, Lognormal | Component]]:
    if isinstance(section, Lognormal):
        return [(at, section)]
    if isinstance(section, Mixture):
        return [(f"{at}.components.{i}", c) for i, c in enumerate(section.components)]
    return []


def _check_keys(gateway: GatewaySection) -> None:
    for index, key in enumerate(gateway.keys):
        if (key.key is None) == (key.file is None):
            raise InputError(
                "exactly one of key and file is required",
                where=f"gateway.keys.{index}",
                fix="set one of them",
            )
        if key.key == "":
            raise InputError("is empty", where=f"gateway.keys.{index}.key", fix="set a key")


def _check_tenants(gateway: GatewaySection) -> None:
    with_keys = {key.tenant for key in gateway.keys}
    sections = {f"gateway.tenants.{name}": found for name, found in gateway.tenants.items()}
    for name, at in zip(gateway.tenants, sections, strict=True):
        if name not in with_keys:
            raise InputError(
                f"no key belongs to the tenant {name!r}",
                where=at,
                fix=f"add [[gateway.keys]] with tenant = {name!r}, or remove the section",
            )
    for at, section in {"gateway.tenant_default": gateway.tenant_default, **sections}.items():
        for key in ("max_in_flight", "max_queued_tokens", "max_bodies_mb"):
            value, most = getattr(section, key), getattr(gateway, key)
            if value is not None and value > most:
                raise InputError(
                    f"{value:g} is above gateway.{key} = {most:g}",
                    where=f"{at}.{key}",
                    fix="lower it, or raise the limit of the gateway",
                )
