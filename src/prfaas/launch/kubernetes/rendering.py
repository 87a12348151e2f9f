"""The manifests of all clusters, as files: from the services of a deployment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from prfaas import __version__
from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, GatewayEntry
from prfaas.config.write import deployment_toml
from prfaas.launch.kubernetes import dashboard, gateways, kustomizations, members, monitoring
from prfaas.launch.kubernetes.members import Pair
from prfaas.launch.kubernetes.network_policies import network_policies
from prfaas.launch.kubernetes.options import RenderOptions
from prfaas.launch.kubernetes.pod_places import (
    CONFIG,
    CREDENTIALS,
    CREDENTIALS_POLL_S,
    GATEWAY_PORT,
    HOST_FILE,
    SECRETS,
    pod_place,
)
from prfaas.launch.kubernetes.pods import Manifest, labels, port_name
from prfaas.launch.services.builders import (
    HTTP,
    engine_service,
    gateway_service,
    kvd_service,
)
from prfaas.launch.services.hosts import EngineSpec, list_hosts
from prfaas.launch.services.places import DEPLOYMENT, SALT
from prfaas.launch.services.sections import gateway_section
from prfaas.launch.services.service import Service

IMAGE, ENGINE_IMAGE = f"prfaas:{__version__}", f"prfaas-engine:{__version__}"


class Rendered(msgspec.Struct, frozen=True):
    """The files of one Kubernetes cluster, by path below its folder."""

    manifests: dict[str, Manifest]
    texts: dict[str, str]  # files of ConfigMaps
    secrets: dict[str, list[str]]  # names of files by Secret


def list_services(
    deployment: Deployment, engines: EngineSpec, options: RenderOptions, files: Mapping[str, str]
) -> list[Service]:
    """All services of the deployment. `files` are catalogs and the like, by name."""
    found: list[Service] = []
    for host in list_hosts(deployment):
        place = pod_place(host, engines, options)
        kvd = kvd_service(host, engines, place, HOST_FILE)
        engine = engine_service(host, engines, place, HOST_FILE)
        if engines.kind == "emulated":  # it follows a profile of the catalog
            engine = msgspec.structs.replace(engine, files={**engine.files, **files})
        found += [kvd, engine]
    serving = _for_gateways(deployment, options)
    texts = {DEPLOYMENT: deployment_toml(serving), **files}
    for pd in deployment.of_kind("pd"):
        found.append(
            gateway_service(
                f"{CONFIG}/{DEPLOYMENT}",
                serving.gateway,
                cluster=pd.name,
                # The port of its entry is that of its address outside the cluster.
                options=["--port", str(GATEWAY_PORT)],
                files=texts,
            )
        )
    return found


def _for_gateways(deployment: Deployment, options: RenderOptions) -> Deployment:
    """Members register themselves, so the file lists none."""
    section = gateway_section(
        deployment.gateway,
        "0.0.0.0",
        GATEWAY_PORT,
        CREDENTIALS,
        {tenant: f"{SECRETS}/{tenant_file(tenant)}" for tenant in options.tenants},
        f"{SECRETS}/{SALT}",
    )
    section = msgspec.structs.replace(section, credentials_poll_s=CREDENTIALS_POLL_S)
    entries = [
        GatewayEntry(home, f"https://{address}")
        for home, address in options.gateway_addresses.items()
    ]
    clusters = [msgspec.structs.replace(one, nodes=[]) for one in deployment.clusters]
    return msgspec.structs.replace(deployment, gateway=section, gateways=entries, clusters=clusters)


def tenant_file(tenant: str) -> str:
    return f"tenant-{tenant}.key"


def render_cluster(
    cluster: Cluster,
    services: Iterable[Service],
    deployment: Deployment,
    engines: EngineSpec,
    options: RenderOptions,
) -> Rendered:
    """The base and the overlay of one cluster. Its pods are equal, so those of the first host
    describe all."""
    own = [service for service in services if service.cluster == cluster.name]
    host = next(one for one in list_hosts(deployment) if one.cluster == cluster.name)
    kvd, engine = (
        next(one for one in own if one.kind == kind and one.host == host.name)
        for kind in ("kvd", "engine")
    )
    pair = Pair(host, kvd, engine)
    engine_image = IMAGE if engines.kind == "emulated" else ENGINE_IMAGE
    images = (IMAGE, engine_image)
    base: dict[str, Manifest] = {"namespace.yaml": kustomizations.namespace(options.network)}
    base["statefulset.yaml"] = members.stateful_set(
        pair, cluster.instances, engines, images, options
    )
    base["service.yaml"] = members.headless_service(pair)
    base["poddisruptionbudget.yaml"] = members.disruption_budget(cluster.name)
    texts = {**kvd.files, **engine.files}
    config_maps = {members.CONFIG_MAP: sorted(texts)}
    secrets = {members.SECRET: list(kvd.secrets)}
    external: dict[str, Manifest] = {}
    gateway = next((one for one in own if one.kind == "gateway"), None)
    if gateway is not None:
        base["gateway-deployment.yaml"] = gateways.deployment(
            gateway, IMAGE, deployment.gateway, options
        )
        for made in gateways.services(gateway):
            base[f"{made['metadata']['name']}-service.yaml"] = made
        base["gateway-poddisruptionbudget.yaml"] = gateways.disruption_budget(cluster.name)
        texts |= gateway.files
        config_maps[gateways.CONFIG_MAP] = sorted(gateway.files)
        secrets[gateways.SECRET] = list(gateway.secrets)
        external = {
            f"{made['metadata']['name']}-service.yaml": made
            for made in gateways.external_services(gateway)
        }
    for made in network_policies(cluster.name, options, has_gateway=gateway is not None):
        base[f"networkpolicy-{made['metadata']['name']}.yaml"] = made
    if options.monitoring:
        base |= _monitors(pair, gateway)
        secrets[monitoring.SECRET] = list(monitoring.FILES)
        base["dashboard.yaml"] = dashboard.config_map(dashboard.dashboard_json())
    manifests = {f"base/{name}": made for name, made in base.items()}
    manifests["base/kustomization.yaml"] = kustomizations.base(sorted(base), config_maps)
    manifests |= {f"overlay/{name}": made for name, made in external.items()}
    manifests["overlay/kustomization.yaml"] = kustomizations.overlay(
        sorted(external), secrets, sorted(set(images)), options.registry
    )
    return Rendered(manifests, {f"base/{name}": text for name, text in texts.items()}, secrets)


def _monitors(pair: Pair, gateway: Service | None) -> dict[str, Manifest]:
    cluster = pair.host.cluster
    ports = [port_name(pair.kvd, HTTP), port_name(pair.engine, HTTP)]
    found = {
        "servicemonitor.yaml": monitoring.service_monitor(
            cluster, labels(cluster, members.COMPONENT), ports
        )
    }
    if gateway is not None:
        # The service of members has the same labels, and the same pods: one of them is enough.
        selector = {**labels(cluster, gateways.COMPONENT), "prfaas.io/service": "gateway-members"}
        found["gateway-servicemonitor.yaml"] = monitoring.service_monitor(
            "gateway", selector, [port_name(gateway, HTTP)]
        )
    return found
