"""A stand-in for the kubelet: it starts pods with podman, probes them, and ends them as Kubernetes
does, with hooks, SIGTERM and a time after which the rest is killed."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import yaml

from tests.kubernetes.expansion import PodPlace, for_podman
from tests.kubernetes.kustomize import Manifest
from tests.kubernetes.podman import Failed, Podman
from tests.kubernetes.volumes import write_volumes
from tests.waiting import HANG_S

PROBE_S = 30.0  # on a busy machine a process takes its time to start
POLL_S = 0.5


@dataclass(frozen=True)
class RunningPod:
    manifest: Manifest
    place: PodPlace

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def containers(self) -> list[Manifest]:
        found: list[Manifest] = self.manifest["spec"]["containers"]
        return found

    def podman_name(self, container: Manifest) -> str:
        return f"{self.name}-{container['name']}"

    def port(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        ports = [port for container in self.containers for port in container.get("ports", [])]
        return int(next(port["containerPort"] for port in ports if port["name"] == name))


class Ending(Exception):
    """A container did not end by itself within the pod's time."""


class Kubelet:
    """Of one cluster, whose pods are in one of podman's networks."""

    def __init__(self, podman: Podman, network: str) -> None:
        self._podman = podman
        self._network = network

    def start(
        self,
        pod: Manifest,
        place: PodPlace,
        config_maps: Sequence[Manifest],
        secrets: Sequence[Manifest],
    ) -> RunningPod:
        """Does not wait until the pod is ready."""
        write_volumes(pod, place.files, config_maps, secrets)
        file = place.files / "pod.yaml"
        file.write_text(yaml.safe_dump(for_podman(pod, place)))
        options = ["--network", self._network, "--ip", place.address]
        self._podman.run("play", "kube", *options, str(file))
        return RunningPod(pod, place)

    def update_volumes(
        self, pod: RunningPod, config_maps: Sequence[Manifest], secrets: Sequence[Manifest]
    ) -> None:
        write_volumes(pod.manifest, pod.place.files, config_maps, secrets)

    def wait_until_ready(self, pod: RunningPod) -> None:
        """Until every readiness probe has passed once."""
        until_s = time.monotonic() + HANG_S
        for container in pod.containers:
            while (reason := self.failed_probe(pod, container)) != "":
                if time.monotonic() > until_s:
                    logs = self.logs(pod, container)
                    raise AssertionError(f"{pod.name} is not ready: {reason}\n{logs}")
                time.sleep(POLL_S)

    def failed_probe(
        self, pod: RunningPod, container: Manifest, name: str = "readinessProbe"
    ) -> str:
        """Why the probe fails; empty where it passes."""
        probe = container[name]
        try:
            if "exec" in probe:
                words = probe["exec"]["command"]
                self._podman.run("exec", pod.podman_name(container), *words, within_s=PROBE_S)
            else:
                _get(pod, probe["httpGet"])
        except (Failed, OSError, http.client.HTTPException) as error:
            return str(error)
        return ""

    def stop(self, pod: RunningPod) -> None:
        """As Kubernetes deletes a pod. Raises Ending when a container had to be killed, or ended
        with an error."""
        until_s = time.monotonic() + pod.manifest["spec"]["terminationGracePeriodSeconds"]
        with ThreadPoolExecutor(len(pod.containers)) as pool:
            ends = [pool.submit(self._stop, pod, one, until_s) for one in pod.containers]
        codes = {
            pod.podman_name(one): end.result()
            for one, end in zip(pod.containers, ends, strict=True)
        }
        if any(codes.values()):
            logs = "\n".join(self.logs(pod, container) for container in pod.containers)
            self.kill(pod)
            raise Ending(f"exit codes {codes}\n{logs}")
        self.kill(pod)

    def _stop(self, pod: RunningPod, container: Manifest, until_s: float) -> int:
        """The exit code of the container."""
        name = pod.podman_name(container)
        hook = container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            self._podman.run(
                "exec", name, *hook["exec"]["command"], within_s=until_s - time.monotonic()
            )
        left_s = max(1, int(until_s - time.monotonic()))
        self._podman.run("stop", "--time", str(left_s), name, within_s=left_s + PROBE_S)
        return int(self._podman.inspect("container", name)["State"]["ExitCode"])

    @contextmanager
    def stopped(self, pod: RunningPod, container: Manifest) -> Iterator[None]:
        """The container's process hangs meanwhile."""
        name = pod.podman_name(container)
        self._podman.run("kill", "--signal", "STOP", name)
        try:
            yield
        finally:
            self._podman.run("kill", "--signal", "CONT", name)

    def kill(self, pod: RunningPod) -> None:
        """Ends the pod at once, as the loss of its machine would, and removes it."""
        self._podman.run("pod", "rm", "--force", "--time", "0", pod.name)
        for volume in pod.manifest["spec"]["volumes"]:
            if "emptyDir" in volume:
                self._podman.run("volume", "rm", "--force", f"{pod.name}-{volume['name']}")

    def ids(self, pod: RunningPod) -> dict[str, str]:
        """Changes when a container is started again."""
        found = {}
        for container in pod.containers:
            name = pod.podman_name(container)
            state = self._podman.inspect("container", name)
            found[name] = f"{state['Id']} {state['State']['StartedAt']} {state['RestartCount']}"
        return found

    def run_in(self, pod: RunningPod, container: Manifest, *words: str) -> str:
        return self._podman.run("exec", pod.podman_name(container), *words)

    def logs(self, pod: RunningPod, container: Manifest, lines: int = 30) -> str:
        name = pod.podman_name(container)
        try:
            return f"== {name}\n" + self._podman.logs(name, lines)
        except Failed as error:
            return f"== {name}: {error}"


def _get(pod: RunningPod, probe: Manifest) -> None:
    """Raises OSError where the response is not 200. Like a kubelet it checks no certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    at, port = pod.place.address, pod.port(probe["port"])
    connection = http.client.HTTPSConnection(at, port, timeout=PROBE_S, context=context)
    try:
        connection.request("GET", probe["path"])
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise OSError(f"HTTP {response.status}: {response.read(500)!r}")
    finally:
        connection.close()
