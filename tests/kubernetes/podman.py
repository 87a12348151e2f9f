"""podman with a storage, networks and settings of its own, apart from those of the machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND_S = 120.0  # for one command; only one that hangs takes so long
BUILD_S = 1200.0
MOST_IMAGES = 100  # with those of steps of a build
# Programs of other packages: where there is no systemd, no shell has /usr/sbin in its PATH.
_PATH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/libexec/podman"]
)
# Programs, and the packages of Debian that have them.
_NEEDED = {
    **{"podman": "podman", "catatonit": "catatonit"},
    **{"mmdebstrap": "mmdebstrap", "ip": "iproute2"},
}


def missing() -> str:
    """Why pods cannot be run here; empty: they can."""
    for program, package in _NEEDED.items():
        if find(program) is None:
            return f"{program} is missing: apt-get install --no-install-recommends {package}"
    if runtime() is None:
        return "runc is missing: apt-get install --no-install-recommends runc"
    if os.geteuid() != 0:
        return "pods are reached by their addresses, which they have only where root runs podman"
    if not _may_make_namespaces():
        return "root may not make namespaces here, which every container needs"
    return ""


def _may_make_namespaces() -> bool:
    """Root of an unprivileged container may not."""
    program = find("unshare")
    if program is None:
        return False
    words = [program, "--mount", "--net", "--pid", "--fork", "true"]
    return subprocess.run(words, timeout=COMMAND_S, check=False).returncode == 0


def find(program: str) -> str | None:
    return shutil.which(program, path=_PATH)


def runtime() -> str | None:
    return find("runc") or find("crun")


class Failed(AssertionError):
    """A command of podman failed; with its output."""


class Podman:
    """Everything lies below `folder`. `remove_pods` ends and removes all of it but images, which
    the next run uses again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        made = self._write_settings()
        self._environment = {**os.environ, "PATH": _PATH, "CONTAINERS_CONF": str(made)}
        self._driver = "overlay"
        if not self._overlay_works():
            self._driver = "vfs"  # copies the image for every container, but works everywhere

    def _write_settings(self) -> Path:
        # The default limits are higher than a root without CAP_SYS_RESOURCE may set.
        limits = [
            f'"{name}={least}:{least}"'
            for name, kind, most in (
                ("nofile", resource.RLIMIT_NOFILE, 4096),
                ("nproc", resource.RLIMIT_NPROC, 8192),
            )
            for least in (_at_most(kind, most),)
        ]
        program = runtime()
        assert program is not None
        file = self._folder / "containers.conf"
        file.write_text(
            f"[containers]\ndefault_ulimits = [{', '.join(limits)}]\n"
            'log_driver = "k8s-file"\n'
            f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runtime"\n'
            f'[engine.runtimes]\nruntime = ["{program}"]\n'
            f'[network]\nnetwork_config_dir = "{self._folder / "networks"}"\n'
        )
        (self._folder / "networks").mkdir(exist_ok=True)
        return file

    def _overlay_works(self) -> bool:
        words = self._words(["info"])
        found = subprocess.run(
            words, env=self._environment, capture_output=True, timeout=COMMAND_S, check=False
        )
        return found.returncode == 0

    def _words(self, arguments: Sequence[str]) -> list[str]:
        at = self._folder
        options = ["--root", str(at / "storage"), "--runroot", str(at / "run")]
        options += ["--tmpdir", str(at / "tmp"), "--storage-driver", self._driver]
        return ["podman", *options, *arguments]

    def run(self, *arguments: str, within_s: float = COMMAND_S) -> str:
        """The command's output. Raises Failed."""
        try:
            done = subprocess.run(
                self._words(arguments),
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"podman {' '.join(arguments[:4])} took over {within_s:g} s") from error
        if done.returncode != 0:
            shown = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
            raise Failed(f"podman {' '.join(arguments[:6])}: exit {done.returncode}\n{shown}")
        return done.stdout

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        found: Any = json.loads(self.run(kind, "inspect", name))
        one: dict[str, Any] = found[0] if isinstance(found, list) else found
        return one

    def logs(self, container: str, lines: int) -> str:
        """podman prints the container's stderr to its own."""
        words = self._words(["logs", "--tail", str(lines), container])
        done = subprocess.run(
            words,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return done.stdout

    def has_image(self, name: str) -> bool:
        return bool(self.run("images", "--quiet", name).strip())

    def add_network(self, name: str, subnet: str) -> None:
        self.run("network", "create", "--subnet", subnet, name)

    def remove_pods(self) -> None:
        """Ends and removes every pod, container, volume and network."""
        self.run("pod", "rm", "--all", "--force", "--time", "0")
        self.run("rm", "--all", "--force", "--time", "0")
        self.run("volume", "prune", "--force")
        for name in self.run("network", "ls", "--format", "{{.Name}}").split():
            if name != "podman":
                self.run("network", "rm", "--force", name)
        # The layers of earlier builds make the next one quick.
        if len(self.run("images", "--all", "--quiet").split()) > MOST_IMAGES:
            self.run("image", "prune", "--force")


def _at_most(kind: int, most: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return most if hard == resource.RLIM_INFINITY else min(hard, most)
