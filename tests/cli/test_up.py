"""`prfaas up` as a person uses it: started, asked, stopped; and what it refuses to start."""

from __future__ import annotations

import os
import signal
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prfaas.cli.up import prepare
from prfaas.config import Deployment, load_deployment
from prfaas.config.write import deployment_toml
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.preparation import (
    LaunchOptions,
    Wan,
    baseline_deployment,
    parse_wan,
    prepare_launch,
)
from prfaas.studies.problem_files import Study
from tests.cli.runner import Result
from tests.node.hosts import Process, call
from tests.waiting import wait_until

Run = Callable[..., Result]
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
TWO_BY_TWO = CASE_STUDY.with_name("two_by_two.toml")
SCALES = ("--time-scale", "0.02", "--byte-scale", "0.002", "--output-scale", "0.02")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The case study with one PrfaaS node, one prefill and one decode node."""
    whole = load_deployment(CASE_STUDY)
    far, near = whole.clusters
    clusters = [
        msgspec.structs.replace(far, gpus=8),
        msgspec.structs.replace(near, gpus=16, prefill=1, decode=1),
    ]
    path = tmp_path / "small.toml"
    path.write_text(deployment_toml(msgspec.structs.replace(whole, clusters=clusters)))
    return path


@pytest.fixture
def up(small: Path, tmp_path: Path) -> Iterator[Process]:
    process = Process(
        "up", str(small), "--engine", "emulated", *SCALES, "--port", "0",
        "--logs", str(tmp_path / "run"),
    )  # fmt: skip
    yield process
    process.kill()  # or what is left of it


def descendants(folder: Path) -> list[int]:
    """Processes whose command line names the run's folder: all that it has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_serves_until_stopped_and_leaves_nothing(
    up: Process, tmp_path: Path, how: signal.Signals
) -> None:
    url = up.find(r"serving \S+ at (http://\S+)")
    assert up.find(r"the console, for a browser: (http://\S+)/") == url
    long = {"prompt": list(range(100)) * 300, "max_tokens": 3, "return_token_ids": True}
    status, answer = call("POST", f"{url}/v1/completions", long)
    assert status == 200 and len(answer["choices"][0]["token_ids"]) == 3
    status, state = call("GET", f"{url}/prfaas/v1/state")
    assert [len(cluster["nodes"]) for cluster in state["clusters"]] == [2, 1]
    log = tmp_path / "run" / "gateway.log"
    wait_until(lambda: '"route":"remote"' in log.read_text())  # 30,000 tokens are long
    assert len(descendants(tmp_path / "run")) >= 5  # kvds, the gateway, itself

    os.kill(up.popen.pid, how)
    assert up.popen.wait(60) == (0 if how == signal.SIGINT else -how)
    wait_until(lambda: not descendants(tmp_path / "run"))
    with pytest.raises(urllib.error.URLError):
        call("GET", f"{url}/health")


@pytest.mark.slow
def test_an_estimated_plan_is_served(tmp_path: Path) -> None:
    """No profile of the H20 is published, and the weights are not of the model's own format."""
    file = tmp_path / "estimated.toml"
    whole = load_deployment(CASE_STUDY.with_name("qwen3.5_h200_h20.toml"))
    clusters = [msgspec.structs.replace(one, gpus=8) for one in whole.clusters]
    file.write_text(deployment_toml(msgspec.structs.replace(whole, clusters=clusters)))
    process = Process(
        "up", str(file), "--engine", "emulated", *SCALES, "--port", "0",
        "--logs", str(tmp_path / "run"),
    )  # fmt: skip
    try:
        url = process.find(r"serving \S+ at (http://\S+)")
        prompt = {"prompt": list(range(100)) * 300, "max_tokens": 3, "return_token_ids": True}
        status, answer = call("POST", f"{url}/v1/completions", prompt)
        assert status == 200 and len(answer["choices"][0]["token_ids"]) == 3
    finally:
        os.kill(process.popen.pid, signal.SIGINT)
        process.popen.wait(60)
        process.kill()
    wait_until(lambda: not descendants(tmp_path / "run"))


@pytest.mark.slow  # one more start of everything
def test_a_child_that_dies_is_named_with_its_last_words(up: Process, tmp_path: Path) -> None:
    up.find(r"serving \S+ at (http://\S+)")
    (pid,) = [
        pid
        for pid in descendants(tmp_path / "run")
        if b"kvd\0--socket" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"prfaas-0.sock" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(pid, signal.SIGKILL)
    assert up.popen.wait(60) == 1
    wait_until(lambda: "kvd-prfaas-0 was killed by signal 9" in up.output)
    wait_until(lambda: not descendants(tmp_path / "run"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--wan", "fast"], "--wan: 'fast' is not a WAN; give gbps=X,rtt_ms=Y"),
        (["/nowhere.toml"], "/nowhere.toml"),
        ([str(CASE_STUDY)], "model.config: a real engine needs the model's checkpoint"),
        ([str(CASE_STUDY), "--time-scale", "0.5"], "only emulated engines can be scaled"),
        ([str(CASE_STUDY), "--engine", "emulated", "--byte-scale", "1e-5"], "--byte-scale"),
        (["--engine", "vllm", "--vllm-python", "/nowhere/python"], "--vllm-python"),
        (["--port", "65536"], "--port: 65536 is out of range; give a port from 1 to 65535"),
        (["--port", "-1"], "--port: -1 is out of range"),
        (
            [str(TWO_BY_TWO), "--engine", "emulated", "--port", "65535"],
            "--port: 65535 is out of range with 2 gateways, which take consecutive ports; "
            "give a port from 1 to 65534, or 0",
        ),
    ],
)
def test_mistakes_are_one_line(prfaas: Run, arguments: list[str], says: str) -> None:
    result = prfaas("up", *arguments)
    assert result.code == 2
    assert says in result.err and result.err.count("\n") == 1


def test_the_last_port_is_enough_for_one_gateway(tmp_path: Path) -> None:
    options = LaunchOptions("emulated", Scales(0.5, 1 / 64, 1 / 32), port=65_535)
    ready = prepare(TWO_BY_TWO, options, tmp_path, print, one_gateway=True)
    assert ready.deployment.gateway.port == 65_535
    two = replace(options, port=65_534)
    assert prepare(TWO_BY_TWO, two, tmp_path, print).deployment.gateway.port == 65_534


def test_the_wan_in_words() -> None:
    assert parse_wan("gbps=0.5") == Wan(gbps=0.5)
    assert parse_wan("rtt_ms=80,gbps=1") == Wan(1.0, 80.0)
    for wrong in ("gbps=0", "rtt_ms=-1", "gbps", "speed=1"):
        with pytest.raises(InputError, match="--wan"):
            parse_wan(wrong)


def solved(deployment: Deployment, tmp_path: Path) -> tuple[int, int, int]:
    file = tmp_path / "baseline.toml"
    file.write_text(deployment_toml(deployment))
    study = Study(file, "exact")
    problem = study.problem(load_deployment(file))
    found = study.planner(problem).solve(problem, 1.0)
    return found.n_prfaas, found.n_prefill, found.n_decode


def test_baselines_are_those_of_the_planner(tmp_path: Path) -> None:
    deployment = load_deployment(CASE_STUDY)
    study = Study(CASE_STUDY, "exact")
    homogeneous = baseline_deployment(deployment, study, "homogeneous")
    assert solved(homogeneous, tmp_path) == (0, 9, 3) and homogeneous.scheduler.policy == "local"
    assert [link.source for link in homogeneous.links] == ["pd"]
    naive = baseline_deployment(deployment, study, "naive")
    assert solved(naive, tmp_path) == (4, 0, 8) and naive.scheduler.policy == "remote"


def test_a_wan_of_ones_own_and_no_relay_of_the_files(tmp_path: Path) -> None:
    options = LaunchOptions("emulated", Scales(), wan=Wan(2.0, 7.0))
    made = prepare_launch(load_deployment(CASE_STUDY), CASE_STUDY, options, tmp_path)
    between, within = made.deployment.links
    assert (between.gbps, between.rtt_ms) == (2.0, 7.0) and within.gbps == 800


def test_several_pd_clusters_have_no_baseline_and_all_their_workloads_are_scaled(
    tmp_path: Path,
) -> None:
    file = TWO_BY_TWO
    deployment = load_deployment(file)
    scales = Scales(0.5, 1 / 64, 1 / 32)
    with pytest.raises(InputError, match="--baseline: baselines have one pd cluster"):
        prepare_launch(deployment, file, LaunchOptions("emulated", scales, "naive"), tmp_path)
    made = prepare_launch(deployment, file, LaunchOptions("emulated", scales), tmp_path).deployment
    outputs = [made.workload_of(pd).output_tokens for pd in made.of_kind("pd")]
    assert outputs == [1024 / 32, 768 / 32]
