"""What `kubectl apply -k` would apply: an overlay with its base, generators and images.

`built` knows the keys of Kustomize that `prfaas render` writes, and no other. Where kubectl has a
current Kustomize, a test compares the two.
"""

from __future__ import annotations

import base64
import re
import subprocess
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.kubernetes.podman import COMMAND_S, find

Manifest: TypeAlias = dict[str, Any]
FILE = "kustomization.yaml"
# Of Kustomize in kubectl: 1.20 and earlier have version 2, which cannot read folders as resources.
OLDEST_KUBECTL = (1, 21)
_KNOWN = {
    *("apiVersion", "kind", "namespace", "resources", "images", "generatorOptions"),
    *("configMapGenerator", "secretGenerator"),
}
_CLUSTER_WIDE = ("Namespace",)


def built(folder: Path) -> list[Manifest]:
    """The manifests of a folder with a kustomization. Generated names have no hash."""
    wanted = yaml.safe_load((folder / FILE).read_text())
    unknown = set(wanted) - _KNOWN
    assert not unknown, f"{folder / FILE}: this stand-in for Kustomize does not know {unknown}"
    found: list[Manifest] = []
    for name in wanted["resources"]:
        at = folder / name
        found += built(at) if at.is_dir() else [yaml.safe_load(at.read_text())]
    found += [_config_map(folder, one) for one in wanted.get("configMapGenerator", [])]
    found += [_secret(folder, one) for one in wanted.get("secretGenerator", [])]
    for manifest in found:
        if manifest["kind"] not in _CLUSTER_WIDE:
            manifest["metadata"]["namespace"] = wanted["namespace"]
        for container in containers(manifest):
            _rename_image(container, wanted.get("images", []))
    return found


def containers(manifest: Manifest) -> list[Manifest]:
    found: list[Manifest] = pod_spec(manifest).get("containers", [])
    return found


def pod_spec(manifest: Manifest) -> Manifest:
    """Of a Pod, or of the template of a StatefulSet or Deployment; empty for others."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Pod":
        return dict(spec)
    found: Manifest = spec.get("template", {}).get("spec", {})
    return found


def _rename_image(container: Manifest, images: list[Manifest]) -> None:
    name, _, tag = container["image"].rpartition(":")
    for image in images:
        if image["name"] == name:
            container["image"] = f"{image['newName']}:{image.get('newTag', tag)}"


def _config_map(folder: Path, generator: Manifest) -> Manifest:
    data = {path.name: path.read_text() for path in _files(folder, generator)}
    return _generated("ConfigMap", generator["name"], data)


def _secret(folder: Path, generator: Manifest) -> Manifest:
    files = _files(folder, generator)
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in files}
    return {**_generated("Secret", generator["name"], data), "type": "Opaque"}


def _files(folder: Path, generator: Manifest) -> list[Path]:
    return [folder / name for name in generator["files"]]


def _generated(kind: str, name: str, data: dict[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "data": data}


# The real one -------------------------------------------------------------------------------------


def kubectl() -> tuple[str, str]:
    """The program, or why there is none that can be used."""
    program = find("kubectl")
    if program is None:
        return "", "kubectl is missing"
    shown = _output(program, "version", "--client", "--output", "json")
    version = re.search(r'"gitVersion": "v(\d+)\.(\d+)', shown)
    assert version is not None, shown
    if tuple(map(int, version.groups())) < OLDEST_KUBECTL:
        return "", f"kubectl {'.'.join(version.groups())} has Kustomize 2; 1.21 is needed"
    return program, ""


def built_by_kubectl(program: str, folder: Path) -> list[Manifest]:
    """With the hashes that Kustomize adds to the names of ConfigMaps."""
    found: list[Manifest] = list(yaml.safe_load_all(_output(program, "kustomize", str(folder))))
    for manifest in found:
        if manifest["kind"] == "Secret":  # long values have line breaks
            data = manifest["data"]
            manifest["data"] = {name: "".join(text.split()) for name, text in data.items()}
    return found


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
