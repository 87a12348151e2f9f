"""The rendered pods serve: as processes, each with an address of its own (`pod_processes`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prfaas.config import load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.kubernetes.options import RenderOptions, RotationStep, parse_instances
from prfaas.launch.kubernetes.rendered_deployment import render_deployment
from prfaas.launch.preparation import LaunchOptions, prepare_launch
from tests.launch.kubernetes.pod_deployment import PodDeployment, gateway_address
from tests.launch.kubernetes.rendered import CONFIGS
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow

CASE_STUDY = CONFIGS / "case_study.toml"
NET = "127.83"  # other tests do not use these addresses
OPTIONS = RenderOptions(gateway_addresses={"pd": gateway_address(NET)})
LONG = [number % 200 + 1 for number in range(60_000)]


class CaseStudyPods(PodDeployment):
    """Three pods and a gateway."""

    def render(self, step: RotationStep | None = None) -> None:
        deployment = parse_instances(["prfaas=1", "pd=2"], load_deployment(CASE_STUDY))
        launch = LaunchOptions("emulated", Scales(0.2, 0.002, 0.02))
        plan = prepare_launch(deployment, CASE_STUDY, launch, self.folder)
        render_deployment(self.k8s, plan, OPTIONS, None, step=step)

    def complete(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": "case-study-1t", "prompt": prompt, "max_tokens": 4}
        return self.call("/v1/completions", "client/tenant-default.key", body)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseStudyPods]:
    made = CaseStudyPods(tmp_path_factory.mktemp("pods"), NET)
    with made.running({"prfaas-0", "pd-0", "pd-1"}):
        yield made


def test_pods_register_themselves_and_serve_what_another_cluster_has_prefilled(
    pods: CaseStudyPods,
) -> None:
    answer = pods.complete(LONG)
    assert answer["usage"]["completion_tokens"] == 4

    def lines() -> list[str]:
        return [x for x in pods.pods["gateway"].log("gateway").splitlines() if '"route"' in x]

    wait_until(lambda: bool(lines()))  # a thread writes the log
    (line,) = lines()
    assert '"prefill":"prfaas-0"' in line.replace(" ", "")
    assert not any(one["listed"] for one in pods.nodes().values())


def test_keys_are_replaced_without_a_restart(pods: CaseStudyPods) -> None:
    before = {name: [p.pid for p in pod.processes.values()] for name, pod in pods.pods.items()}
    steps: tuple[RotationStep, ...] = ("add", "use", "remove")
    for step in steps:
        reads = {
            (name, part): pod.log(part).count("have been read again")
            for name, pod in pods.pods.items()
            for part in pod.processes
        }
        pods.render(step)
        pods.mount_secrets()
        for (name, part), count in reads.items():
            pod = pods.pods[name]
            wait_until(
                lambda pod=pod, part=part, count=count: (
                    pod.log(part).count("have been read again") > count
                )
            )
        assert pods.complete(LONG[:3000])["usage"]["completion_tokens"] == 4
    assert pods.in_use() == {"prfaas-0", "pd-0", "pd-1"}
    after = {name: [p.pid for p in pod.processes.values()] for name, pod in pods.pods.items()}
    assert before == after
    assert all(p.poll() is None for pod in pods.pods.values() for p in pod.processes.values())


def test_a_pod_stops_in_order_and_returns(pods: CaseStudyPods) -> None:
    """The kvd is told to stop when its engine has ended."""
    pod = pods.pods["pd-1"]
    pod.stop()
    assert {name: p.returncode for name, p in pod.processes.items()} == {"kvd": 0, "engine": 0}
    assert "pd-1" not in pods.in_use()
    pod.start()
    wait_until(lambda: "pd-1" in pods.in_use(), within_s=HANG_S)
    assert pods.complete(LONG)["usage"]["completion_tokens"] == 4
