"""The Kustomize files of a cluster: a base, and an overlay with secrets and images. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prfaas.launch.kubernetes.options import NetworkKind
from prfaas.launch.kubernetes.pod_places import NAMESPACE
from prfaas.launch.kubernetes.pods import Manifest

_KIND = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def base(resources: Sequence[str], config_maps: Mapping[str, Sequence[str]]) -> Manifest:
    """`config_maps`: files by ConfigMap. Its name gets a hash of the contents, so that pods are
    replaced when their configuration changes."""
    return {
        **_KIND,
        "namespace": NAMESPACE,
        "resources": list(resources),
        "configMapGenerator": [
            {"name": name, "files": list(files)} for name, files in config_maps.items()
        ],
    }


def overlay(
    resources: Sequence[str],
    secrets: Mapping[str, Sequence[str]],
    images: Sequence[str],
    registry: str,
) -> Manifest:
    """`secrets`: files by Secret. Their names have no hash: pods see new contents without a
    restart."""
    made = [image.rpartition(":") for image in images]
    return {
        **_KIND,
        "namespace": NAMESPACE,
        "resources": ["../base", *resources],
        "images": [
            {"name": name, "newName": f"{registry}{name}", "newTag": tag} for name, _, tag in made
        ],
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [
            {"name": name, "files": [f"secrets/{name}/{file}" for file in files]}
            for name, files in secrets.items()
        ],
    }


def namespace(network: NetworkKind) -> Manifest:
    """Pods that break the strictest rules of Kubernetes are refused. Pods in the network of their
    host break one of them."""
    rules = "restricted" if network == "pod" else "privileged"
    labels = {"pod-security.kubernetes.io/enforce": rules}
    metadata = {"name": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
