"""The pods of a cluster: a kvd and an engine each, in one StatefulSet. Pure."""

from __future__ import annotations

import msgspec

from prfaas.config.sizes import parse_bytes
from prfaas.launch.kubernetes.options import RenderOptions
from prfaas.launch.kubernetes.pod_places import CREDENTIALS, LEAVING_FILE
from prfaas.launch.kubernetes.pods import (
    BASE_BYTES,
    MODELS_MOUNT,
    SSD_MOUNT,
    Manifest,
    container,
    exec_probes,
    labels,
    memory_resources,
    models_volume,
    pod,
    port_name,
    probe_command,
    quantity,
    ssd_volume,
)
from prfaas.launch.services.hosts import EngineSpec, Host
from prfaas.launch.services.service import Service

COMPONENT = "member"
CONFIG_MAP, SECRET = "host", "members"
GPU = "nvidia.com/gpu"
ACCELERATOR_LABEL = "prfaas.io/accelerator"
_START_S = {"kvd": 60, "emulated": 120, "hf": 3600, "vllm": 3600}  # models are loaded meanwhile
_MODEL_BYTES = 64 << 30  # of a host that loads a model, apart from its KV
CLOSE_S = 10.0  # for an engine to close its port after it has drained
_SHARED_MEMORY = "16Gi"  # between the processes of vLLM


class Pair(msgspec.Struct, frozen=True):
    """The two services of one pod."""

    host: Host
    kvd: Service
    engine: Service


def stateful_set(
    pair: Pair, replicas: int, engines: EngineSpec, images: tuple[str, str], options: RenderOptions
) -> Manifest:
    """`images`: of the kvd and of the engine. The pods of a cluster are equal: a role is an
    assignment of the gateway, and changes without a restart."""
    cluster = pair.host.cluster
    found = labels(cluster, COMPONENT)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": cluster, "labels": found},
        "spec": {
            "serviceName": cluster,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            # A pod that is ready is polled by gateways, and used, before the next one is replaced.
            "minReadySeconds": 10,
            "selector": {"matchLabels": found},
            "template": {
                "metadata": {"labels": found},
                "spec": _pod(pair, engines, images, options),
            },
        },
    }


def _pod(
    pair: Pair, engines: EngineSpec, images: tuple[str, str], options: RenderOptions
) -> Manifest:
    arena = parse_bytes(engines.memory, "--memory")
    kvd, engine = pair.kvd, pair.engine
    volumes: list[Manifest] = []
    kvd_mounts: list[Manifest] = []
    if options.ssd_size is not None:
        size = parse_bytes(options.ssd_size, "--ssd-size")
        volumes.append(ssd_volume(quantity(size + BASE_BYTES)))
        kvd_mounts.append(SSD_MOUNT)
    engine_mounts: list[Manifest] = []
    if options.model_claim is not None:
        volumes.append(models_volume(options.model_claim))
        engine_mounts.append(MODELS_MOUNT)
    if engines.kind == "vllm":
        memory = {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}
        volumes.append({"name": "shm", "emptyDir": memory})
        engine_mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    containers = [
        container(
            kvd,
            images[0],
            memory_resources(arena + BASE_BYTES, arena + BASE_BYTES, "200m"),
            mounts=kvd_mounts,
            lifecycle={"preStop": {"exec": {"command": _wait_for_engine(engine)}}},
            **exec_probes(kvd, _START_S["kvd"]),
        ),
        container(
            engine,
            images[1],
            _engine_resources(pair.host, engines, arena),
            mounts=engine_mounts,
            **_leave_first(engine, engines),
            **exec_probes(engine, _START_S[engines.kind]),
        ),
    ]
    changes: Manifest = {}
    if engines.kind != "emulated":
        changes["nodeSelector"] = options.node_selectors.get(
            pair.host.cluster, {ACCELERATOR_LABEL: pair.host.accelerator}
        )
        changes["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    elif pair.host.cluster in options.node_selectors:
        changes["nodeSelector"] = options.node_selectors[pair.host.cluster]
    if options.network == "host":
        changes |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    # The kvd is told to stop when the engine has ended.
    stop_s = engine.stop_s + CLOSE_S + kvd.stop_s
    return pod(containers, CONFIG_MAP, SECRET, stop_s, volumes, **changes)


def _wait_for_engine(engine: Service) -> list[str]:
    """The engine finishes its requests with the help of the kvd, so the kvd stops after it."""
    return probe_command(engine, engine.live_path, "--until-gone-s", f"{engine.stop_s + CLOSE_S:g}")


def _leave_first(engine: Service, engines: EngineSpec) -> Manifest:
    """`prfaas node` leaves and drains after SIGTERM. A vLLM server does so before it."""
    if engines.kind != "vllm":
        return {}
    words = ["--leave-file", LEAVING_FILE, "--leave-s", f"{engine.leave_s:g}"]
    words += ["--idle-s", f"{engine.drain_s:g}", "--key-file", CREDENTIALS.metrics_key]
    command = probe_command(engine, "/metrics", *words)
    return {"lifecycle": {"preStop": {"exec": {"command": command}}}}


def _engine_resources(host: Host, engines: EngineSpec, arena: int) -> Manifest:
    """The pages of the arena count for the process that first writes to them."""
    if engines.kind == "emulated":
        return memory_resources(BASE_BYTES // 2, BASE_BYTES + arena, "200m")
    return memory_resources(_MODEL_BYTES, _MODEL_BYTES + arena, "4", {GPU: str(host.gpus)})


def headless_service(pair: Pair) -> Manifest:
    """Gives each pod a DNS name, and Prometheus its targets."""
    cluster = pair.host.cluster
    found = labels(cluster, COMPONENT)
    ports = [
        {"name": port_name(service, name), "port": port, "targetPort": port_name(service, name)}
        for service in (pair.kvd, pair.engine)
        for name, port in service.ports.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": cluster, "labels": found},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": found,
            "ports": ports,
        },
    }


def disruption_budget(cluster: str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": cluster, "labels": labels(cluster, COMPONENT)},
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": labels(cluster, COMPONENT)},
        },
    }
