"""The gateway of a PD cluster: Deployment, Services, PodDisruptionBudget. Pure."""

from __future__ import annotations

from prfaas.config.gateway import GatewaySection
from prfaas.gateway.body_workers.pool import WORKERS, memory_bound
from prfaas.gateway.client.node_client import ANSWER_BYTES
from prfaas.http_client.connection import HELD_BYTES, READ_BYTES
from prfaas.launch.kubernetes.options import RenderOptions
from prfaas.launch.kubernetes.pod_places import MEMBERS_SERVICE
from prfaas.launch.kubernetes.pods import (
    BASE_BYTES,
    MODELS_MOUNT,
    Manifest,
    container,
    http_probes,
    labels,
    memory_resources,
    models_volume,
    pod,
    port_name,
)
from prfaas.launch.services.service import Service
from prfaas.service.connections import MEMORY_BYTES as CONNECTION_BYTES
from prfaas.service.connections import most_of_gateway

COMPONENT = "gateway"
CONFIG_MAP, SECRET = "gateway", "gateway"
_START_S = 120
# Of the gateway's process, without what has a bound of its own: Python, the tokenizer, the index of
# cached prefixes, requests and their history.
_OWN_BYTES = 2 * BASE_BYTES
# Of the stream of a client that does not read: bytes that wait, those that were taken from them as
# events, and these as they are being written.
_STREAM_COPIES = 3
# Of one answer: it is joined from its parts, and corrected or merged. The event loop does this for
# one answer at a time.
_ANSWER_COPIES = 2
# A gateway in its last step releases what requests hold at kvds that do not answer.
_RELEASE_S = 20.0


def memory_bytes(section: GatewaySection) -> int:
    """The most memory that a gateway with these settings takes, as the sum of its own bounds. A pod
    with a smaller limit would be killed by clients that keep to every limit."""
    workers = WORKERS * memory_bound(int(section.max_body_mb * 1e6))
    # Bodies in memory, or in files that have no disk, and answers before they are sent.
    bodies = int(section.max_bodies_mb * 1e6) + _ANSWER_COPIES * ANSWER_BYTES
    streams = section.max_in_flight * _STREAM_COPIES * (HELD_BYTES + READ_BYTES)
    connections = most_of_gateway(section.max_in_flight) * CONNECTION_BYTES
    return _OWN_BYTES + workers + bodies + streams + connections


def deployment(
    service: Service, image: str, section: GatewaySection, options: RenderOptions
) -> Manifest:
    """One replica: gateways of one cluster do not tell each other their load. During an update a
    second one starts, and the first one stops when that one is ready."""
    found = labels(service.cluster, COMPONENT)
    volumes = [] if options.model_claim is None else [models_volume(options.model_claim)]
    made = container(
        service,
        image,
        memory_resources(BASE_BYTES, memory_bytes(section), "500m"),
        mounts=[] if options.model_claim is None else [MODELS_MOUNT],
        **http_probes(service, _START_S),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": service.kind, "labels": found},
        "spec": {
            "replicas": 1,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "minReadySeconds": 10,
            "selector": {"matchLabels": found},
            "template": {
                "metadata": {"labels": found},
                "spec": pod([made], CONFIG_MAP, SECRET, service.stop_s + _RELEASE_S, volumes),
            },
        },
    }


def services(service: Service) -> list[Manifest]:
    """One for clients, with gateways that are ready; one for members and other gateways. A gateway
    is not ready before members have registered, so theirs leads to gateways that are not, too."""
    return [
        _service(service, service.kind, publish=False),
        _service(service, MEMBERS_SERVICE, publish=True),
    ]


def external_services(service: Service) -> list[Manifest]:
    """The same two from outside of the cluster, for an operator to adapt."""
    found = []
    for inside in services(service):
        name = f"{inside['metadata']['name']}-external"
        spec = {"type": "LoadBalancer", **inside["spec"]}
        metadata = {"name": name, "labels": labels(service.cluster, COMPONENT)}
        found.append({**inside, "metadata": metadata, "spec": spec})
    return found


def _service(service: Service, name: str, *, publish: bool) -> Manifest:
    found = labels(service.cluster, COMPONENT)
    spec: Manifest = {
        "selector": found,
        "ports": [
            {"name": port_name(service, port), "port": at, "targetPort": port_name(service, port)}
            for port, at in service.ports.items()
        ],
    }
    if publish:
        spec["publishNotReadyAddresses"] = True
    metadata = {"name": name, "labels": {**found, "prfaas.io/service": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def disruption_budget(cluster: str) -> Manifest:
    """The one gateway is not evicted. `kubectl rollout restart` replaces it on another node."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "gateway", "labels": labels(cluster, COMPONENT)},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": labels(cluster, COMPONENT)}},
    }
