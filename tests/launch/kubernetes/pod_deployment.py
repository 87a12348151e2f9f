"""A rendered deployment with one PD cluster, whose pods run as processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prfaas.config.address import Address
from prfaas.errors import PeerError
from prfaas.http_client.client import open_client
from prfaas.launch.kubernetes.options import RotationStep
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import trust_context
from tests.launch.kubernetes.pod_processes import Pod
from tests.launch.kubernetes.rendered import objects
from tests.waiting import HANG_S, wait_until

PORT = 8080


def gateway_address(net: str) -> Address:
    return Address(f"{net}.0.1", PORT)


class PodDeployment:
    """`net`: the first half of the loopback addresses of its pods. A subclass renders it."""

    def __init__(self, folder: Path, net: str) -> None:
        self.folder = folder
        self.k8s = folder / "k8s"
        self.pods: dict[str, Pod] = {}
        self._net = net
        self._gateway = str(gateway_address(net).host)
        self.render()
        for cluster in ("prfaas", "pd"):
            for kind in ("StatefulSet", "Deployment"):
                for name, one in objects(self.k8s, cluster, kind).items():
                    for number in range(one["spec"]["replicas"]):
                        self._make(cluster, name, number, one["spec"]["template"]["spec"])

    def render(self, step: RotationStep | None = None) -> None:
        raise NotImplementedError

    def _make(self, cluster: str, owner: str, number: int, spec: dict[str, Any]) -> None:
        is_gateway = owner == "gateway"
        name = owner if is_gateway else f"{owner}-{number}"
        address = self._gateway if is_gateway else f"{self._net}.1.{len(self.pods) + 1}"
        hosts = {"gateway-members.prfaas.svc.cluster.local": self._gateway}
        pod = Pod(name, address, self.folder / "pods" / name, spec, hosts)
        pod.prepare(self.k8s / cluster / "base", self.k8s / cluster / "overlay")
        self.pods[name] = pod

    @contextmanager
    def running(self, members: Collection[str], within_s: float = HANG_S) -> Iterator[None]:
        """All pods, from the time at which the gateway uses these members."""
        try:
            for pod in self.pods.values():
                pod.start()
            wait_until(lambda: self.in_use() == set(members), within_s=within_s)
            yield
        finally:
            for pod in self.pods.values():
                pod.kill()

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
        """A request to the gateway with the key of this file."""
        trust = trust_context(self.k8s / "client" / "ca.pem")

        async def ask() -> dict[str, Any]:
            async with open_client(self.key(key), tls=lambda: trust) as http:
                url = f"https://{self._gateway}:{PORT}{path}"
                data = b"" if body is None else msgspec.json.encode(body)
                how = "GET" if body is None else "POST"
                return await http.request_json(
                    how, url, dict[str, Any], timeout_s=HANG_S, body=data
                )

        return asyncio.run(ask())

    def nodes(self) -> dict[str, dict[str, Any]]:
        state = self.call("/prfaas/v1/state", "operator/operator.key")
        return {one["node"]: one for cluster in state["clusters"] for one in cluster["nodes"]}

    def in_use(self) -> set[str]:
        try:
            return {name for name, one in self.nodes().items() if one.get("in_use")}
        except PeerError:
            return set()  # the gateway starts
