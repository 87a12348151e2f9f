"""What is applied to a cluster: valid in five versions of Kubernetes, and as Kustomize makes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.deployment import INSTANCES, example_networks, manifests, render
from tests.kubernetes.kustomize import Manifest, built, built_by_kubectl, containers, kubectl
from tests.launch.kubernetes.test_manifests import VERSIONS

# Objects of Prometheus's operator have no schema in Kubernetes.
WITHOUT_SCHEMA = ("ServiceMonitor",)
_HASH = re.compile(r"-[a-z0-9]{10}$")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rendered")
    render(folder, example_networks())
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_all_objects_are_valid(out: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", exc_type=ImportError)
    kinds = set()
    for found in manifests(out).values():
        for manifest in found:
            if manifest["kind"] not in WITHOUT_SCHEMA:
                kubernetes_validate.validate(manifest, version, strict=True)
                kinds.add(manifest["kind"])
    assert {"StatefulSet", "Deployment", "Secret", "ConfigMap", "NetworkPolicy"} <= kinds


@pytest.mark.parametrize("cluster", INSTANCES)
def test_the_stand_in_for_kustomize_does_what_kustomize_does(out: Path, cluster: str) -> None:
    program, reason = kubectl()
    if reason:
        pytest.skip(reason)
    real = built_by_kubectl(program, out / cluster / "overlay")
    assert _by_name(_without_hashes(real)) == _by_name(built(out / cluster / "overlay"))


def test_every_image_comes_from_the_registry(out: Path) -> None:
    for found in manifests(out).values():
        for manifest in found:
            for container in containers(manifest):
                assert container["image"].startswith("localhost/prfaas:"), container["image"]


def _by_name(found: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def _without_hashes(found: list[Manifest]) -> list[Manifest]:
    """Kustomize adds a hash to the names of ConfigMaps, and to what refers to them."""
    names = {
        one["metadata"]["name"]: _HASH.sub("", one["metadata"]["name"])
        for one in found
        if one["kind"] == "ConfigMap" and _HASH.search(one["metadata"]["name"])
    }

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    return [plain(one) for one in found]
