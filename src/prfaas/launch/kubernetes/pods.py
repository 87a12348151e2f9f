"""Containers and pods of services, as Kubernetes describes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from prfaas.launch.kubernetes.pod_places import (
    CONFIG,
    CREDENTIALS,
    MODELS,
    RUN,
    SECRETS,
    SSD,
    TMP,
)
from prfaas.launch.services.service import Service

Manifest: TypeAlias = dict[str, Any]
USER = 10001  # of the image
MARGIN_S = 20.0  # for a process to close after it has drained
APP = "prfaas"
CLUSTER_LABEL, COMPONENT_LABEL = "prfaas.io/cluster", "app.kubernetes.io/component"
_READ_ONLY_MODE = 0o440  # of secrets: for the group of the pod's files
_MIB = 1 << 20
BASE_BYTES = 1024 * _MIB  # of a process, apart from KV and a model


def labels(cluster: str, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": APP, COMPONENT_LABEL: component, CLUSTER_LABEL: cluster}


def port_name(service: Service, port: str) -> str:
    """Names of ports are unique in a pod."""
    return f"{service.kind}-{port}"


def container(service: Service, image: str, resources: Manifest, **changes: Any) -> Manifest:
    """The container of a service. `changes` are added to it: probes, hooks."""
    mounts = [
        {"name": "run", "mountPath": RUN},
        {"name": "tmp", "mountPath": TMP},
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
    ]
    return {
        "name": service.kind,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [service.program],
        "args": list(service.words),
        "env": _environment(service),
        "ports": [
            {"name": port_name(service, name), "containerPort": port, "protocol": "TCP"}
            for name, port in service.ports.items()
        ],
        "resources": resources,
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [*mounts, *changes.pop("mounts", ())],
        **changes,
    }


def _environment(service: Service) -> list[Manifest]:
    fields = {"POD_NAME": "metadata.name", "POD_ADDRESS": "status.podIP"}
    found: list[Manifest] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in fields.items()
    ]
    # Libraries write caches to the home folder, and the root file system cannot be written.
    given = {"HOME": TMP, "PYTHONDONTWRITEBYTECODE": "1", **service.environment}
    return found + [{"name": name, "value": value} for name, value in given.items()]


def pod(
    containers: Sequence[Manifest],
    config: str,
    secret: str,
    stop_s: float,
    volumes: Sequence[Manifest] = (),
    **changes: Any,
) -> Manifest:
    """The specification of a pod whose containers need `stop_s` to stop."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(stop_s + MARGIN_S),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [
            {"name": "run", "emptyDir": {"sizeLimit": "64Mi"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "8Gi"}},
            {"name": "config", "configMap": {"name": config}},
            {"name": "secrets", "secret": {"secretName": secret, "defaultMode": _READ_ONLY_MODE}},
            *volumes,
        ],
        **changes,
    }


def memory_resources(
    request_bytes: int, limit_bytes: int, cpu: str, more: Mapping[str, Any] | None = None
) -> Manifest:
    """No limit of CPU: a process that is throttled answers its probes and its peers late."""
    extra = dict(more or {})
    return {
        "requests": {"cpu": cpu, "memory": quantity(request_bytes), **extra},
        "limits": {"memory": quantity(limit_bytes), **extra},
    }


def quantity(nbytes: int) -> str:
    return f"{math.ceil(nbytes / _MIB)}Mi"


# Probes -------------------------------------------------------------------------------------------


def probe_command(service: Service, path: str, *options: str) -> list[str]:
    """Asks the service in its own pod, with its own certificate: over mutual TLS no other client
    is answered."""
    tls = CREDENTIALS.tls
    url = f"https://127.0.0.1:{service.ports[service.probe_port]}{path}"
    words = ["prfaas", "probe", url]
    for option, file in (("--tls-ca", tls.ca), ("--tls-cert", tls.cert), ("--tls-key", tls.key)):
        assert file is not None
        words += [option, file]
    return [*words, *options]


def exec_probes(service: Service, start_s: int) -> Manifest:
    """Probes of a service with mutual TLS, which has `start_s` to start."""
    live = {"exec": {"command": probe_command(service, service.live_path)}}
    ready = {"exec": {"command": probe_command(service, service.ready_path)}}
    return _probes(live, ready, start_s)


def http_probes(service: Service, start_s: int) -> Manifest:
    """Probes of a service that answers clients without a certificate."""

    def get(path: str) -> Manifest:
        port = port_name(service, service.probe_port)
        return {"httpGet": {"path": path, "port": port, "scheme": "HTTPS"}}

    return _probes(get(service.live_path), get(service.ready_path), start_s)


def _probes(live: Manifest, ready: Manifest, start_s: int) -> Manifest:
    every_s = 5
    return {
        "startupProbe": {
            **live,
            "periodSeconds": every_s,
            "timeoutSeconds": 10,
            "failureThreshold": math.ceil(start_s / every_s),
        },
        "livenessProbe": {
            **live,
            "periodSeconds": 20,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
        "readinessProbe": {
            **ready,
            "periodSeconds": every_s,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        },
    }


def ssd_volume(size: str) -> Manifest:
    return {"name": "ssd", "emptyDir": {"sizeLimit": size}}


SSD_MOUNT = {"name": "ssd", "mountPath": SSD}
MODELS_MOUNT = {"name": "models", "mountPath": MODELS, "readOnly": True}


def models_volume(claim: str) -> Manifest:
    return {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
