"""Pods of StatefulSets and Deployments, as Kubernetes' controllers and kubelets make them. Pure.

`podman play kube` takes pods only, and knows neither the addresses of pods nor $(NAME) in command
lines, hooks, probes, fsGroup or Secrets that change. A kubelet's part of these is done here and in
`kubelet.py`; everything else of the manifests reaches podman as it is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.kubernetes.kustomize import Manifest

DOMAIN = "svc.cluster.local"
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
# podman makes health checks of some probes, which need systemd. `kubelet.py` runs them.
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


class PodPlace(NamedTuple):
    """What a kubelet knows when a pod starts."""

    name: str
    address: str
    files: Path  # folder with a folder for each ConfigMap and Secret volume
    hosts: Mapping[str, str]  # addresses of services by name, instead of the cluster's DNS


def pod_names(workload: Manifest, suffix: str) -> list[str]:
    """A StatefulSet's pods keep their names; those of a Deployment get a suffix, which is a new one
    each time."""
    name, replicas = workload["metadata"]["name"], workload["spec"]["replicas"]
    if workload["kind"] == "StatefulSet":
        return [f"{name}-{ordinal}" for ordinal in range(replicas)]
    return [f"{name}-{suffix}-{ordinal}" for ordinal in range(replicas)]


def pod_of(workload: Manifest, name: str) -> Manifest:
    """The pod that the controller of a StatefulSet or Deployment makes."""
    template = copy.deepcopy(workload["spec"]["template"])
    metadata = {**template["metadata"], "name": name}
    metadata["namespace"] = workload["metadata"]["namespace"]
    spec = template["spec"]
    if workload["kind"] == "StatefulSet":
        spec |= {"hostname": name, "subdomain": workload["spec"]["serviceName"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def for_podman(pod: Manifest, place: PodPlace) -> Manifest:
    """The pod with what a kubelet fills in, as `podman play kube` takes it."""
    made = copy.deepcopy(pod)
    spec = made["spec"]
    for container in spec["containers"]:
        variables = _environment(container, made, place)
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        for key in ("command", "args"):
            container[key] = [_expanded(word, variables) for word in container.get(key, [])]
        for key in (*PROBES, "lifecycle", "ports"):  # podman publishes ports on the machine
            container.pop(key, None)
        for mount in container["volumeMounts"]:
            mount["name"] = f"{place.name}-{mount['name']}"
    spec["volumes"] = [_volume(volume, place) for volume in spec["volumes"]]
    spec["hostAliases"] = [
        {"ip": address, "hostnames": [name]} for name, address in place.hosts.items()
    ]
    return made


def _environment(container: Manifest, pod: Manifest, place: PodPlace) -> dict[str, str]:
    fields = {"metadata.name": pod["metadata"]["name"], "status.podIP": place.address}
    found = {}
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[variable["name"]] = variable["value"]
    return found


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """A name that is not a variable stays as it is."""
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), word)


def _volume(volume: Manifest, place: PodPlace) -> Manifest:
    """podman's volumes are named by the volume alone, so two pods would share theirs."""
    name = f"{place.name}-{volume['name']}"
    if "emptyDir" in volume:
        return {"name": name, "emptyDir": volume["emptyDir"]}
    at = str(place.files / volume["name"])
    return {"name": name, "hostPath": {"path": at, "type": "Directory"}}


def selects(selector: Mapping[str, str], pod: Manifest) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()


def service_names(service: Manifest) -> list[str]:
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    return [f"{name}.{namespace}.{DOMAIN}", f"{name}.{namespace}.svc", f"{name}.{namespace}", name]
