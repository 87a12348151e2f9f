"""The files of ConfigMaps and Secrets in running pods, as a kubelet keeps them.

VOLUME/..data -> ..3             replaced in one step, so that all files change together
VOLUME/..3/ca.pem
VOLUME/ca.pem -> ..data/ca.pem
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.kubernetes.kustomize import Manifest

_DATA = "..data"
_DEFAULT_MODE = 0o644


def write_volumes(
    pod: Manifest, folder: Path, config_maps: Iterable[Manifest], secrets: Iterable[Manifest]
) -> None:
    """Writes the volumes of a pod, or replaces their files where these have changed."""
    maps = {one["metadata"]["name"]: one["data"] for one in config_maps}
    private = {one["metadata"]["name"]: one["data"] for one in secrets}
    group = pod["spec"]["securityContext"]["fsGroup"]
    for volume in pod["spec"]["volumes"]:
        at = folder / volume["name"]
        if "configMap" in volume:
            source = volume["configMap"]
            texts = maps[source["name"]]
            files = {name: text.encode() for name, text in texts.items()}
        elif "secret" in volume:
            source = volume["secret"]
            texts = private[source["secretName"]]
            files = {name: base64.b64decode(text) for name, text in texts.items()}
        else:
            assert "emptyDir" in volume, volume
            continue
        _write(at, files, source.get("defaultMode", _DEFAULT_MODE), group)


def _write(folder: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / _DATA
    before = folder / link.readlink() if link.is_symlink() else None
    if before is not None and _contents(before) == files:
        return
    number = 1 if before is None else int(before.name.removeprefix("..")) + 1
    made = folder / f"..{number}"
    made.mkdir(mode=0o755)
    for name, content in files.items():
        path = made / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)
    new = folder / "..data_new"
    new.symlink_to(made.name)
    new.rename(link)
    for name in files:
        path = folder / name
        if not path.is_symlink():
            path.symlink_to(f"{_DATA}/{name}")
    if before is not None:
        shutil.rmtree(before)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
