"""The rendered pods of vLLM servers, as processes of this machine: mutual TLS, keys that are
replaced while the servers run, and a server that leaves before it stops."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.config import load_deployment
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.launch.commands import VLLM_MAX_TOKENS
from prfaas.launch.kubernetes.credentials import certificate_names
from prfaas.launch.kubernetes.members import SECRET
from prfaas.launch.kubernetes.options import RenderOptions, RotationStep
from prfaas.launch.kubernetes.pod_places import NODE_PORT
from prfaas.launch.kubernetes.rendered_deployment import render_deployment
from prfaas.launch.new_deployment.folder import read_authority
from prfaas.launch.preparation import LaunchOptions, prepare_launch
from prfaas.security.shared_key import bearer
from prfaas.security.tls import client_context
from tests.launch.kubernetes.pod_deployment import PodDeployment, gateway_address
from tests.launch.kubernetes.pod_processes import Pod
from tests.secret_files import write_secret
from tests.security.deployments import send, write_catalog
from tests.vllm.on_a_cpu import SETTINGS, on_a_cpu
from tests.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.grid, pytest.mark.timeout(1800)]  # servers start and stop within it

NAME = "falcon"
NET = "127.84"  # other tests do not use these addresses
MEMBERS = {"prfaas-0", "pd-0"}
ADDRESSES = {"prfaas": f"{NET}.1.1", "pd": f"{NET}.1.2"}
START_S = 600.0  # of both servers, on a busy machine
OPTIONS = RenderOptions(gateway_addresses={"pd": gateway_address(NET)}, model_claim="models")
STEPS: tuple[RotationStep, ...] = ("add", "use", "remove")
DEPLOYMENT = f"""
catalog = ["toy.toml"]
[model]
name = "{NAME}"
config = "{NAME}/config.json"
[workload]
kind = "lognormal"
mu = 6.0
sigma = 0.5
min_tokens = 16
max_tokens = {VLLM_MAX_TOKENS - 64}
output_tokens = 16
[slo]
output_tokens_per_s = 5
[scheduler]
policy = "remote"
[gateway]
tokenizer = "{NAME}"
[[clusters]]
name = "prfaas"
kind = "prfaas"
accelerator = "chip"
gpus = 1
gpus_per_instance = 1
[[clusters]]
name = "pd"
kind = "pd"
accelerator = "chip"
gpus = 1
gpus_per_instance = 1
[[links]]
from = "prfaas"
to = "pd"
gbps = 10
rtt_ms = 1
"""


class VllmPods(PodDeployment):
    """Two pods and a gateway."""

    def render(self, step: RotationStep | None = None) -> None:
        file = self.folder / "deployment.toml"
        if not file.exists():
            file.write_text(DEPLOYMENT)
            write_catalog(self.folder, NAME)
            make_checkpoint(self.folder / NAME, "falcon-h1")
        plan = prepare_launch(load_deployment(file), file, LaunchOptions("vllm"), self.folder)
        is_new = not self.k8s.exists()
        render_deployment(self.k8s, plan, OPTIONS, "256MiB", step=step)
        if is_new:
            self._issue_for_addresses()

    def _issue_for_addresses(self) -> None:
        """Probes of pods ask 127.0.0.1, which is another address for each of these pods. The next
        renderings keep the certificates."""
        authority = read_authority(self.k8s)
        for cluster, address in ADDRESSES.items():
            names = certificate_names(SECRET, cluster, OPTIONS)
            issued = authority.issue(address, OPTIONS.days, more=names)
            at = self.k8s / cluster / "overlay" / "secrets" / SECRET
            (at / "cert.pem").write_bytes(issued.pem)
            write_secret(at / "key.pem", issued.key_pem)

    def mount_models(self) -> None:
        for pod in self.pods.values():
            pod.vllm = on_a_cpu
            (pod.folder / "models" / NAME).symlink_to(self.folder / NAME)

    def complete(self, seed: int) -> dict[str, Any]:
        """The prompt of each seed is another one."""
        prompt = random.Random(seed).choices(range(32, 127), k=1000)
        body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        return self.call("/v1/completions", "client/tenant-default.key", body)

    def accepts(self, pod: Pod, key: str) -> bool:
        """Whether a vLLM server answers a member with this key."""
        at = pod.folder / "secrets"
        context = client_context(at / "ca.pem", at / "cert.pem", at / "key.pem")
        url = f"https://{pod.address}:{NODE_PORT}"
        answer = send(url, "/v1/models", context, headers=bearer(key))
        assert answer is not None and answer.status in (200, 401)
        return answer.status == 200


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPods]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        made = VllmPods(tmp_path_factory.mktemp("pods"), NET)
        made.mount_models()
        with made.running(MEMBERS, START_S):
            yield made


def prefills(pods: VllmPods) -> list[str]:
    """The line of every request that was prefilled in the other cluster."""
    lines = pods.pods["gateway"].log("gateway").splitlines()
    return [line for line in lines if '"prefill":"prfaas-0"' in line.replace(" ", "")]


def test_servers_register_themselves_and_hand_off(pods: VllmPods) -> None:
    assert pods.complete(seed=0)["usage"]["completion_tokens"] == 4
    wait_until(lambda: bool(prefills(pods)))  # a thread writes the log
    (line,) = prefills(pods)
    assert '"outcome":"completed"' in line.replace(" ", "")


def test_the_probes_of_a_server_pass(pods: VllmPods) -> None:
    for name in MEMBERS:
        pod = pods.pods[name]
        for container in pod.spec["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                words = pod.command(container[probe]["exec"]["command"])
                done = subprocess.run(words, capture_output=True, timeout=HANG_S, check=False)
                assert done.returncode == 0, done.stderr


def test_keys_are_replaced_while_the_servers_run(pods: VllmPods) -> None:
    processes = {name: [p.pid for p in pod.processes.values()] for name, pod in pods.pods.items()}
    key = pods.k8s / "keys" / "member.key"
    old = key.read_text().split()[0]
    for number, step in enumerate(STEPS, 1):
        pods.render(step)
        pods.mount_secrets()
        new = key.read_text().split()[-1 if step == "add" else 0]
        for name in MEMBERS:
            wait_until(lambda pod=pods.pods[name], key=new: pods.accepts(pod, key))
        assert pods.complete(number)["usage"]["completion_tokens"] == 4
    for name in MEMBERS:
        wait_until(lambda pod=pods.pods[name]: not pods.accepts(pod, old))
    assert len(prefills(pods)) == 1 + len(STEPS)
    assert processes == {
        name: [p.pid for p in pod.processes.values()] for name, pod in pods.pods.items()
    }


def test_a_server_leaves_before_it_stops_and_returns(pods: VllmPods) -> None:
    pod = pods.pods["prfaas-0"]
    pod.stop()
    assert pod.processes["kvd"].returncode == 0
    assert "prfaas-0" not in pods.in_use()
    assert pods.complete(seed=10)["usage"]["completion_tokens"] == 4  # prefilled at home
    pod.start()
    wait_until(lambda: pods.in_use() == MEMBERS, within_s=START_S)
    before = len(prefills(pods))
    assert pods.complete(seed=11)["usage"]["completion_tokens"] == 4
    assert len(prefills(pods)) == before + 1
