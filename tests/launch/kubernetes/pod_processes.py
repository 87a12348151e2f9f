"""Rendered pods as processes of this machine: every pod has a loopback address of its own.

What a container engine does is done here with as little as possible: files of ConfigMaps and
Secrets in folders, variables in command lines, hooks before SIGTERM. `tests/kubernetes` runs the
same manifests in real containers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from prfaas.launch.kubernetes.pod_places import CONFIG, MODELS, RUN, SECRETS

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
PRFAAS = [sys.executable, "-m", "prfaas"]


def read_manifests(folder: Path) -> list[dict[str, Any]]:
    """The objects of a base or an overlay."""
    names = read_yaml(folder / "kustomization.yaml")["resources"]
    files = [folder / name for name in names if name.endswith(".yaml")]
    return [read_yaml(file) for file in files]


def read_yaml(file: Path) -> Any:
    return yaml.load(file.read_text(), Loader=LOADER)


@dataclass
class Pod:
    """One pod, with its containers as processes."""

    name: str
    address: str
    folder: Path
    spec: Mapping[str, Any]
    hosts: Mapping[str, str]  # addresses by name, instead of DNS
    vllm: Callable[[Sequence[str]], Sequence[str]] = (
        list  # the command of a server, as it runs here
    )
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def prepare(self, base: Path, overlay: Path) -> None:
        """Writes the files of its volumes."""
        made = read_yaml(base / "kustomization.yaml")["configMapGenerator"]
        config_maps = {one["name"]: one["files"] for one in made}
        for volume in self.spec["volumes"]:
            at = self.folder / volume["name"]
            at.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                for name in config_maps[volume["configMap"]["name"]]:
                    (at / name).write_text(self.translated((base / name).read_text()))
            elif "secret" in volume:
                self.mount_secret(overlay / "secrets" / volume["secret"]["secretName"], at)

    def mount_secret(self, source: Path, at: Path) -> None:
        for file in source.iterdir():
            temporary = at / f".{file.name}"
            temporary.write_bytes(file.read_bytes())
            temporary.chmod(0o600)
            temporary.replace(at / file.name)

    def translated(self, text: str) -> str:
        """With the folders and the address of this pod instead of a container's own."""
        places = {CONFIG: "config", SECRETS: "secrets", RUN: "run", f"{MODELS}/": "models/"}
        for inside, name in places.items():
            text = text.replace(inside, f"{self.folder}/{name}")
        text = text.replace("0.0.0.0", self.address).replace("127.0.0.1", self.address)
        for name, address in self.hosts.items():
            text = text.replace(name, address)
        return text

    def start(self) -> None:
        for container in self.spec["containers"]:
            self.start_container(container)

    def start_container(self, container: Mapping[str, Any]) -> None:
        with (self.folder / f"{container['name']}.log").open("ab") as log:
            self.processes[container["name"]] = subprocess.Popen(
                self.command([*container["command"], *container["args"]]),
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment(container)},
            )

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        return {name: self.translated(value) for name, value in given.items() if name != "HOME"}

    def command(self, words: Sequence[str]) -> list[str]:
        values = {"POD_NAME": self.name, "POD_ADDRESS": self.address}
        filled = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in words]
        program, *rest = (self.translated(word) for word in filled)
        return [*PRFAAS, *rest] if program == "prfaas" else list(self.vllm([program, *rest]))

    def log(self, container: str) -> str:
        return (self.folder / f"{container}.log").read_text(errors="replace")

    def stop(self) -> None:
        """As the kubelet does: a hook runs first, then SIGTERM; all containers at once."""
        hooks = []
        for container in self.spec["containers"]:
            hook = container.get("lifecycle", {}).get("preStop")
            if hook is None:
                self.processes[container["name"]].send_signal(signal.SIGTERM)
            else:
                command = self.command(hook["exec"]["command"])
                hooks.append((container["name"], subprocess.Popen(command)))
        for name, hook in hooks:
            hook.wait()
            self.processes[name].send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(self.spec["terminationGracePeriodSeconds"])

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
