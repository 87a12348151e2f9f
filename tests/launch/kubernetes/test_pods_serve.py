"""The rendered pods serve: as processes, each with an address of its own (`pod_processes`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.config import load_deployment
from prfaas.config.address import Address
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import PeerError
from prfaas.http_client.client import open_client
from prfaas.launch.kubernetes.options import RenderOptions, RotationStep, parse_instances
from prfaas.launch.kubernetes.rendered_deployment import render_deployment
from prfaas.launch.preparation import LaunchOptions, prepare_launch
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import trust_context
from tests.launch.kubernetes.pod_processes import Pod
from tests.launch.kubernetes.rendered import CONFIGS, objects
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow

CASE_STUDY = CONFIGS / "case_study.toml"
# Other tests do not use these addresses.
GATEWAY, MEMBER = "127.83.0.1", "127.83.1.{}"
OPTIONS = RenderOptions(gateway_addresses={"pd": Address(GATEWAY, 8080)})
LONG = [number % 200 + 1 for number in range(60_000)]


class Pods:
    """A deployment of three pods and a gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.k8s = folder / "k8s"
        self.pods: dict[str, Pod] = {}
        self.render()
        for cluster in ("prfaas", "pd"):
            for kind in ("StatefulSet", "Deployment"):
                for name, one in objects(self.k8s, cluster, kind).items():
                    for number in range(one["spec"]["replicas"]):
                        self._make(cluster, name, number, one["spec"]["template"]["spec"])

    def render(self, step: RotationStep | None = None) -> None:
        deployment = parse_instances(["prfaas=1", "pd=2"], load_deployment(CASE_STUDY))
        launch = LaunchOptions("emulated", Scales(0.2, 0.002, 0.02))
        plan = prepare_launch(deployment, CASE_STUDY, launch, self.folder)
        render_deployment(self.k8s, plan, OPTIONS, None, step=step)

    def _make(self, cluster: str, owner: str, number: int, spec: dict[str, Any]) -> None:
        is_gateway = owner == "gateway"
        name = owner if is_gateway else f"{owner}-{number}"
        address = GATEWAY if is_gateway else MEMBER.format(len(self.pods) + 1)
        hosts = {"gateway-members.prfaas.svc.cluster.local": GATEWAY}
        pod = Pod(name, address, self.folder / "pods" / name, spec, hosts)
        pod.prepare(self.k8s / cluster / "base", self.k8s / cluster / "overlay")
        self.pods[name] = pod

    def mount_secrets(self) -> None:
        """As a kubelet does after the Secrets have changed."""
        for name, pod in self.pods.items():
            cluster = "prfaas" if name.startswith("prfaas") else "pd"
            secret = "gateway" if name == "gateway" else "members"
            source = self.k8s / cluster / "overlay" / "secrets" / secret
            pod.mount_secret(source, pod.folder / "secrets")

    def key(self, name: str) -> SharedKey:
        return SharedKey.read(self.k8s / name)

    def call(self, path: str, key: str, body: Any = None) -> dict[str, Any]:
        trust = trust_context(self.k8s / "client" / "ca.pem")

        async def ask() -> dict[str, Any]:
            async with open_client(self.key(key), tls=lambda: trust) as http:
                url = f"https://{GATEWAY}:8080{path}"
                data = b"" if body is None else msgspec.json.encode(body)
                how = "GET" if body is None else "POST"
                return await http.request_json(
                    how, url, dict[str, Any], timeout_s=HANG_S, body=data
                )

        return asyncio.run(ask())

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": "case-study-1t", "prompt": prompt, "max_tokens": 4}
        return self.call("/v1/completions", "client/tenant-default.key", body)

    def nodes(self) -> dict[str, dict[str, Any]]:
        state = self.call("/prfaas/v1/state", "operator/operator.key")
        return {one["node"]: one for cluster in state["clusters"] for one in cluster["nodes"]}

    def in_use(self) -> set[str]:
        try:
            return {name for name, one in self.nodes().items() if one.get("in_use")}
        except PeerError:
            return set()  # the gateway starts


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    made = Pods(tmp_path_factory.mktemp("pods"))
    try:
        for pod in made.pods.values():
            pod.start()
        wait_until(lambda: made.in_use() == {"prfaas-0", "pd-0", "pd-1"}, within_s=HANG_S)
        yield made
    finally:
        for pod in made.pods.values():
            pod.kill()


def log_of(pod: Pod, container: str) -> str:
    return (pod.folder / f"{container}.log").read_text(errors="replace")


def test_pods_register_themselves_and_serve_what_another_cluster_has_prefilled(
    pods: Pods,
) -> None:
    answer = pods.complete(LONG)
    assert answer["usage"]["completion_tokens"] == 4
    (line,) = [x for x in log_of(pods.pods["gateway"], "gateway").splitlines() if '"route"' in x]
    assert '"prefill":"prfaas-0"' in line.replace(" ", "")
    assert not any(one["listed"] for one in pods.nodes().values())


def test_keys_are_replaced_without_a_restart(pods: Pods) -> None:
    before = {name: [p.pid for p in pod.processes.values()] for name, pod in pods.pods.items()}
    steps: tuple[RotationStep, ...] = ("add", "use", "remove")
    for step in steps:
        reads = {
            (name, part): log_of(pod, part).count("have been read again")
            for name, pod in pods.pods.items()
            for part in pod.processes
        }
        pods.render(step)
        pods.mount_secrets()
        for (name, part), count in reads.items():
            pod = pods.pods[name]
            wait_until(
                lambda pod=pod, part=part, count=count: (
                    log_of(pod, part).count("have been read again") > count
                )
            )
        assert pods.complete(LONG[:3000])["usage"]["completion_tokens"] == 4
    assert pods.in_use() == {"prfaas-0", "pd-0", "pd-1"}
    after = {name: [p.pid for p in pod.processes.values()] for name, pod in pods.pods.items()}
    assert before == after
    assert all(p.poll() is None for pod in pods.pods.values() for p in pod.processes.values())


def test_a_pod_stops_in_order_and_returns(pods: Pods) -> None:
    """The kvd is told to stop when its engine has ended."""
    pod = pods.pods["pd-1"]
    pod.stop()
    assert {name: p.returncode for name, p in pod.processes.items()} == {"kvd": 0, "engine": 0}
    assert "pd-1" not in pods.in_use()
    pod.start()
    wait_until(lambda: "pd-1" in pods.in_use(), within_s=HANG_S)
    assert pods.complete(LONG)["usage"]["completion_tokens"] == 4
