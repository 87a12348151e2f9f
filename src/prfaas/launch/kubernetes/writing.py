"""Writes the manifests of a deployment: YAML files, the files of ConfigMaps, secrets."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from prfaas.errors import InputError
from prfaas.launch.kubernetes.pods import Manifest
from prfaas.launch.kubernetes.rendering import Rendered
from prfaas.launch.new_deployment.folder import FileTree

LARGEST_CONFIG = 1 << 20  # bytes of a ConfigMap


def write_manifests(folder: Path, rendered: Mapping[str, Rendered]) -> None:
    """Replaces the base of every cluster, and the files of its overlay that are written here. Other
    files of an overlay stay: they are the operator's."""
    for made in rendered.values():
        _check_size(made)
    tree = FileTree(folder)
    for cluster, made in rendered.items():
        shutil.rmtree(folder / cluster / "base", ignore_errors=True)
        for name, manifest in made.manifests.items():
            tree.write(f"{cluster}/{name}", to_yaml(manifest).encode())
        for name, text in made.texts.items():
            tree.write(f"{cluster}/{name}", text.encode())


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Manifests are read and edited by people: nothing is written as a reference."""
        return True


def to_yaml(manifest: Manifest) -> str:
    text: str = yaml.dump(
        manifest, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100
    )
    return text


def _check_size(made: Rendered) -> None:
    size = sum(len(text.encode()) for text in made.texts.values())
    if size > LARGEST_CONFIG:
        raise InputError(
            f"the files of the deployment have {size} bytes together, and a ConfigMap holds "
            f"{LARGEST_CONFIG}",
            where="catalog",
            fix="remove profiles that the deployment does not use",
        )
