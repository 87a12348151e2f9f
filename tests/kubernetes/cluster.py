"""A stand-in for one Kubernetes cluster: what its controllers do with the rendered manifests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Network
from pathlib import Path

from tests.browser.loop_thread import LoopThread
from tests.kubernetes.expansion import PodPlace, pod_names, pod_of, selects, service_names
from tests.kubernetes.kubelet import Kubelet, RunningPod
from tests.kubernetes.kustomize import Manifest
from tests.kubernetes.podman import Podman
from tests.kubernetes.service_proxy import ServiceProxy

WORKLOADS = ("StatefulSet", "Deployment")
OUTSIDE = "-external"  # of the names of Services for others than pods of this cluster
FIRST_POD = 10  # of the addresses of the network


class Cluster:
    """One podman network. The network's own address stands for the Services that pods use, and
    loopback for those of clients."""

    def __init__(
        self, name: str, network: IPv4Network, podman: Podman, loop: LoopThread, folder: Path
    ) -> None:
        self.name = name
        self.kubelet = Kubelet(podman, name)
        self.pods: dict[str, RunningPod] = {}
        self._ready: set[str] = set()
        self._addresses = itertools.islice(network.hosts(), FIRST_POD, None)
        self._gateway = str(next(network.hosts()))  # of the network, not ours
        self._loop = loop
        self._folder = folder
        self._manifests: list[Manifest] = []
        self._proxies: dict[str, ServiceProxy] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # several pods start and end at once

    def __repr__(self) -> str:
        return f"Cluster({self.name}, pods: {', '.join(self.pods)})"

    # Manifests ------------------------------------------------------------------------------------

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Replaces the manifests. Running pods get new files of Secrets; nothing is restarted."""
        self._manifests = list(manifests)
        for pod in self.pods.values():
            self.kubelet.update_volumes(pod, self._of("ConfigMap"), self._of("Secret"))

    def _of(self, *kinds: str) -> list[Manifest]:
        return [one for one in self._manifests if one["kind"] in kinds]

    @property
    def workloads(self) -> list[Manifest]:
        return self._of(*WORKLOADS)

    # Services -------------------------------------------------------------------------------------

    @contextmanager
    def services(self) -> Iterator[None]:
        """Serves the addresses of Services."""
        with ExitStack() as stack:
            for service in self._proxied():
                name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
                inside = service["spec"].get("publishNotReadyAddresses", False)
                at = (self._gateway, port["port"]) if inside else ("127.0.0.1", 0)
                proxy = ServiceProxy(*at)
                self._loop.run(proxy.start())
                stack.callback(self._close, proxy)
                self._proxies[name] = proxy
            yield

    def _close(self, proxy: ServiceProxy) -> None:
        self._loop.run(proxy.close())

    def _proxied(self) -> list[Manifest]:
        return [
            one
            for one in self._of("Service")
            if one["spec"].get("clusterIP") != "None"
            and not one["metadata"]["name"].endswith(OUTSIDE)
        ]

    def address(self, service: str) -> str:
        host, port = self._proxies[service].address
        return f"{host}:{port}"

    def _update_services(self) -> None:
        for service in self._proxied():
            spec = service["spec"]
            chosen = [pod for pod in self.pods.values() if selects(spec["selector"], pod.manifest)]
            if not spec.get("publishNotReadyAddresses", False):
                chosen = [pod for pod in chosen if pod.name in self._ready]
            (port,) = spec["ports"]
            endpoints = [(pod.place.address, pod.port(port["targetPort"])) for pod in chosen]
            proxy = self._proxies[service["metadata"]["name"]]
            self._loop.run(proxy.set_endpoints(endpoints))

    def _hosts(self) -> dict[str, str]:
        return {
            name: proxy.address[0]
            for service in self._proxied()
            if (proxy := self._proxies[service["metadata"]["name"]]).address[0] == self._gateway
            for name in service_names(service)
        }

    # Pods -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all pods, and does not wait for them."""
        for workload in self.workloads:
            for name in pod_names(workload, self._suffix()):
                self._start(workload, name)

    def wait_until_ready(self) -> None:
        for pod in list(self.pods.values()):
            self._wait_until_ready(pod)

    def pods_of(self, workload: Manifest) -> list[RunningPod]:
        selector = workload["spec"]["selector"]["matchLabels"]
        return [pod for pod in self.pods.values() if selects(selector, pod.manifest)]

    def roll_all(self) -> None:
        for workload in self.workloads:
            self.roll(workload)

    def roll(self, workload: Manifest) -> None:
        """Replaces every pod, one after the other, as `kubectl rollout restart` does. A StatefulSet
        ends the old pod first, beginning with the last one; this Deployment starts the new one
        first."""
        old = self.pods_of(workload)
        ready_s = workload["spec"].get("minReadySeconds", 0)
        if workload["kind"] == "StatefulSet":
            for pod in reversed(old):
                self.stop(pod)
                self._replace(workload, pod.name, ready_s)
            return
        update = workload["spec"]["strategy"]["rollingUpdate"]
        assert update == {"maxSurge": 1, "maxUnavailable": 0}, update
        for pod, name in zip(old, pod_names(workload, self._suffix()), strict=True):
            self._replace(workload, name, ready_s)
            self.stop(pod)

    def _replace(self, workload: Manifest, name: str, ready_s: float) -> None:
        self._wait_until_ready(self._start(workload, name))
        time.sleep(ready_s)  # the manifest says so; nothing else happens meanwhile

    def stop(self, pod: RunningPod) -> None:
        """Kubernetes takes a pod out of Services when it begins to end it."""
        with self._lock:
            self._ready.discard(pod.name)
            self._update_services()
        self.kubelet.stop(pod)
        self._forget(pod)

    def lose(self, pod: RunningPod) -> None:
        """The pod ends at once, and its controller notices later."""
        self.kubelet.kill(pod)
        self._forget(pod)

    def restore(self) -> None:
        """The controllers start the pods that are missing."""
        for workload in self._of("StatefulSet"):
            for name in pod_names(workload, ""):
                if name not in self.pods:
                    self._start(workload, name)
        self.wait_until_ready()

    def _suffix(self) -> str:
        """The pods of all clusters are in one podman, so their names differ."""
        return f"{self.name}{next(self._numbers)}"

    def _start(self, workload: Manifest, name: str) -> RunningPod:
        with self._lock:
            place = PodPlace(name, str(next(self._addresses)), self._folder / name, self._hosts())
            made = pod_of(workload, name)
            pod = self.kubelet.start(made, place, self._of("ConfigMap"), self._of("Secret"))
            self.pods[name] = pod
            self._update_services()
        return pod

    def _forget(self, pod: RunningPod) -> None:
        with self._lock:
            del self.pods[pod.name]
            self._ready.discard(pod.name)
            self._update_services()

    def _wait_until_ready(self, pod: RunningPod) -> None:
        self.kubelet.wait_until_ready(pod)
        with self._lock:
            self._ready.add(pod.name)
            self._update_services()
