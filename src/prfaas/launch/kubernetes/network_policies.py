"""Who may talk to whom, as NetworkPolicies: the table of docs/security.md. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prfaas.config.address import Address
from prfaas.launch.kubernetes import gateways, members
from prfaas.launch.kubernetes.options import EVERYWHERE, RenderOptions
from prfaas.launch.kubernetes.pod_places import DATA_PORT, GATEWAY_PORT, KVD_PORT, NODE_PORT
from prfaas.launch.kubernetes.pods import APP, Manifest, labels


class Flow(NamedTuple):
    """A row of the table. The row within a pod has no port, and needs no rule."""

    row: int
    source: str  # client, operator, gateway or member
    target: str
    ports: tuple[int, ...]


FLOWS = (
    Flow(1, "client", "gateway", (GATEWAY_PORT,)),
    Flow(2, "operator", "gateway", (GATEWAY_PORT,)),
    Flow(2, "operator", "member", (KVD_PORT, NODE_PORT)),  # Prometheus
    Flow(3, "gateway", "member", (NODE_PORT, KVD_PORT)),
    Flow(4, "member", "gateway", (GATEWAY_PORT,)),
    Flow(5, "member", "member", (DATA_PORT, KVD_PORT)),
    Flow(6, "member", "member", ()),  # of one pod, over the Unix socket
    Flow(7, "gateway", "gateway", (GATEWAY_PORT,)),
    Flow(8, "client", "gateway", (GATEWAY_PORT,)),
)
_DNS = {
    "to": [{"namespaceSelector": {}}],
    "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
}


def network_policies(cluster: str, options: RenderOptions, *, has_gateway: bool) -> list[Manifest]:
    """Everything that no other policy allows is denied, in both directions."""
    found = [_policy("deny-all", {"matchLabels": {"app.kubernetes.io/name": APP}}, [], [])]
    found.append(_of(cluster, "member", options, has_gateway=has_gateway))
    if has_gateway:
        found.append(_of(cluster, "gateway", options, has_gateway=True))
    return found


def _of(cluster: str, part: str, options: RenderOptions, *, has_gateway: bool) -> Manifest:
    ingress, egress = [], [_DNS]
    for flow in FLOWS:
        if flow.target == part and flow.ports:
            ingress += _ingress(cluster, flow, options)
        if flow.source == part and flow.ports:
            egress += _egress(cluster, flow, options, has_gateway=has_gateway)
    component = {"member": members.COMPONENT, "gateway": gateways.COMPONENT}[part]
    selector = {"matchLabels": labels(cluster, component)}
    return _policy(part, selector, _unique(ingress), _unique(egress))


def _ingress(cluster: str, flow: Flow, options: RenderOptions) -> list[Manifest]:
    ports = _ports(flow.ports)
    if flow.target == "gateway":
        return [{"ports": ports}]  # for clients everywhere; keys decide what they may do
    if flow.source == "operator":
        namespace = {"kubernetes.io/metadata.name": options.monitoring_namespace}
        source = {"namespaceSelector": {"matchLabels": namespace}}
        return [{"from": [source], "ports": ports}] if options.monitoring else []
    peers = _blocks(options.peer_networks)
    return [{"from": [_pods(cluster, flow.source), *peers], "ports": ports}]


def _egress(
    cluster: str, flow: Flow, options: RenderOptions, *, has_gateway: bool
) -> list[Manifest]:
    if flow.target == "member":
        peers = _blocks(options.peer_networks)
        return [{"to": [_pods(cluster, "member"), *peers], "ports": _ports(flow.ports)}]
    found: list[Manifest] = []
    if has_gateway and flow.source == "member":
        found.append({"to": [_pods(cluster, "gateway")], "ports": _ports(flow.ports)})
    for home, address in options.gateway_addresses.items():
        if home != cluster:
            found.append({"to": _blocks(_networks(address)), "ports": _ports([address.port])})
    return found


def _networks(address: Address) -> Sequence[str]:
    """A policy cannot name hosts, so a name stands for every address."""
    try:
        return [str(ipaddress.ip_network(address.host))]
    except ValueError:
        return EVERYWHERE


def _pods(cluster: str, part: str) -> Manifest:
    component = {"member": members.COMPONENT, "gateway": gateways.COMPONENT}[part]
    return {"podSelector": {"matchLabels": labels(cluster, component)}}


def _blocks(networks: Iterable[str]) -> list[Manifest]:
    return [{"ipBlock": {"cidr": network}} for network in networks]


def _ports(ports: Iterable[int]) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _unique(rules: Iterable[Manifest]) -> list[Manifest]:
    found: list[Manifest] = []
    for rule in rules:
        if rule not in found:
            found.append(rule)
    return found


def _policy(
    name: str, selector: Manifest, ingress: list[Manifest], egress: list[Manifest]
) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": APP}},
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }
