"""A deployment on Kubernetes: four clusters, each a podman network, from rendered manifests."""

from __future__ import annotations

import ipaddress
import itertools
import json
import random
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.launch.request_outcomes import RequestOutcome, parse_outcome
from prfaas.security.tls import client_context
from tests.browser.loop_thread import LoopThread
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.kubelet import RunningPod
from tests.kubernetes.kustomize import Manifest, built
from tests.kubernetes.podman import COMMAND_S, Podman, find
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
TWO_BY_TWO = ROOT / "configs" / "two_by_two.toml"
INSTANCES = {"east": 2, "west": 2, "north": 1, "south": 1}
HOMES = ("east", "west")
MODEL = "case-study-1t"
SCALES = {"time": 0.05, "byte": 0.004, "output": 0.03}  # for two cores
LONG_TOKENS = 60_000  # far above every threshold
SHORT_TOKENS = 700
GATEWAY_PORT = 8080
LOG_LINES = 400
MEMBER_PORTS = {"kvd": 7401, "engine": 8000}


def render(out: Path, networks: Mapping[str, ipaddress.IPv4Network], *options: str) -> None:
    words = ["render", "kubernetes", str(TWO_BY_TWO), "--out", str(out), "--engine", "emulated"]
    words += ["--registry", "localhost/"]
    for name, count in INSTANCES.items():
        words += ["--instances", f"{name}={count}"]
    for home in HOMES:
        address = f"{next(networks[home].hosts())}:{GATEWAY_PORT}"
        words += ["--gateway-address", f"{home}={address}", "--gateway-name", f"{home}=localhost"]
    for name, value in SCALES.items():
        words += [f"--{name}-scale", str(value)]
    done = CliRunner().invoke(cli, [*words, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def manifests(out: Path) -> dict[str, list[Manifest]]:
    return {name: built(out / name / "overlay") for name in INSTANCES}


def example_networks() -> dict[str, ipaddress.IPv4Network]:
    wide = ipaddress.IPv4Network("10.0.0.0/8").subnets(new_prefix=24)
    return dict(zip(INSTANCES, wide, strict=False))


def free_networks() -> dict[str, ipaddress.IPv4Network]:
    """A network for each cluster that this machine does not use."""
    program = find("ip")
    assert program is not None
    words = [program, "-json", "route", "show", "table", "all"]
    routes = json.loads(subprocess.check_output(words, timeout=COMMAND_S))
    used = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if route["dst"] != "default" and ":" not in route["dst"]
    ]
    wide = ipaddress.IPv4Network("10.128.0.0/9").subnets(new_prefix=24)
    free = (one for one in wide if not any(one.overlaps(other) for other in used))
    return dict(zip(INSTANCES, itertools.islice(free, 0, None, 256), strict=False))


class KubernetesDeployment:
    """What clients and an operator do with it."""

    def __init__(
        self, clusters: Mapping[str, Cluster], out: Path, networks: Mapping[str, Any]
    ) -> None:
        self.clusters = clusters
        self._out = out
        self._networks = networks

    # Operators ------------------------------------------------------------------------------------

    def render_and_apply(self, *options: str) -> None:
        render(self._out, self._networks, *options)
        for name, found in manifests(self._out).items():
            self.clusters[name].apply(found)

    def secret(self, path: str) -> str:
        """The first line of a key file that the operator has."""
        return (self._out / path).read_text().splitlines()[0]

    @property
    def operator_key(self) -> str:
        return self.secret("operator/operator.key")

    @property
    def metrics_key(self) -> str:
        return self.secret("operator/metrics.key")

    @property
    def client_tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self._out / "client" / "ca.pem"))

    @property
    def member_tls(self) -> ssl.SSLContext:
        """Of a pod of a cluster. No certificate names the addresses of pods."""
        at = self._out / "east" / "overlay" / "secrets" / "members"
        context = client_context(at / "ca.pem", at / "cert.pem", at / "key.pem")
        context.check_hostname = False
        return context

    def state(self, home: str) -> dict[str, Any]:
        url = f"{self.url(home)}/prfaas/v1/state"
        found: dict[str, Any] = get(url, self.operator_key, self.client_tls)
        return found

    def in_use(self, home: str) -> set[str]:
        """The pods to which the gateway sends requests."""
        clusters = self.state(home)["clusters"]
        return {node["node"] for one in clusters for node in one["nodes"] if node.get("in_use")}

    @property
    def members(self) -> dict[str, RunningPod]:
        return {
            name: pod
            for cluster in self.clusters.values()
            for name, pod in cluster.pods.items()
            if name.startswith(f"{cluster.name}-")
        }

    def wait_until_all_are_used(self) -> None:
        """By both gateways."""
        wait_until(
            lambda: all(self.in_use(home) == set(self.members) for home in HOMES),
            within_s=2 * PATIENCE_S,
        )

    # Clients --------------------------------------------------------------------------------------

    def url(self, home: str) -> str:
        """Certificates name the host, and the proxy listens at its IPv4 address."""
        port = self.clusters[home].address("gateway").rpartition(":")[2]
        return f"https://localhost:{port}"

    def complete(self, home: str, tokens: int, seed: int, request_id: str = "") -> dict[str, Any]:
        """One completion, over a connection of its own."""
        body = {"model": MODEL, "prompt": prompt(tokens, seed), "max_tokens": 4}
        headers = {
            "Authorization": f"Bearer {self.secret('client/tenant-default.key')}",
            "Content-Type": "application/json",
            "X-Request-Id": request_id or secrets.token_hex(8),
        }
        request = urllib.request.Request(
            f"{self.url(home)}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self.client_tls) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def outcome(self, home: str, request_id: str) -> RequestOutcome:
        """The line that a gateway has logged about a request."""
        found: list[RequestOutcome] = []

        def is_logged() -> bool:
            for line in self._gateway_log(home).splitlines():
                outcome = parse_outcome(line)
                if outcome is not None and outcome.id == request_id:
                    found.append(outcome)
            return bool(found)

        wait_until(is_logged)
        return found[0]

    def _gateway_log(self, home: str) -> str:
        cluster = self.clusters[home]
        return "\n".join(
            cluster.kubelet.logs(pod, pod.containers[0], LOG_LINES)
            for name, pod in cluster.pods.items()
            if name not in self.members
        )

    def all_logs(self) -> str:
        return "\n".join(
            cluster.kubelet.logs(pod, container)
            for cluster in self.clusters.values()
            for pod in cluster.pods.values()
            for container in pod.containers
        )


def prompt(tokens: int, seed: int) -> list[int]:
    """No two prompts share a prefix that is worth a look at the cache."""
    return list(random.Random(seed).randbytes(tokens))


def get(url: str, key: str, tls: ssl.SSLContext) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S, context=tls) as answer:
        body = answer.read()
    return json.loads(body) if body.startswith(b"{") else body.decode()


@contextmanager
def running(podman: Podman, loop: LoopThread, folder: Path) -> Iterator[KubernetesDeployment]:
    """Started, and ready. Everything is removed afterwards."""
    networks = free_networks()
    out = folder / "manifests"
    render(out, networks)
    with ExitStack() as stack:
        stack.callback(podman.remove_pods)
        clusters = {}
        for name, found in manifests(out).items():
            podman.add_network(name, str(networks[name]))
            cluster = Cluster(name, networks[name], podman, loop, folder / "pods" / name)
            cluster.apply(found)
            clusters[name] = cluster
        made = KubernetesDeployment(clusters, out, networks)
        for cluster in clusters.values():
            stack.enter_context(cluster.services())
        for cluster in clusters.values():
            cluster.start()
        for cluster in clusters.values():
            cluster.wait_until_ready()
        made.wait_until_all_are_used()
        yield made
