"""Studies on a Ray cluster: results, errors, lost workers (`make test-cluster`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from prfaas.errors import CaseFailed, InputError
from prfaas.studies.parallel import run_all as module
from prfaas.studies.parallel.packed_case import installed_versions
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import Workers, parse_cluster
from tests.studies.clusters.services import ROOT, RayCluster, ray_cluster
from tests.studies.parallel.cases import bad_input, broken, deadly, draw, numeric_threads
from tests.waiting import HANG_S, wait_until

# Starting a cluster on a busy machine, and everything in the one test that starts it.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SEEDS = {f"seed {seed}": seed for seed in range(5)}


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="ray is not installed; run `make test-cluster`")
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["ray", "ray client"])
def workers(request: pytest.FixtureRequest, ray: RayCluster) -> Workers:
    address = ray.client if "client" in request.param else ray.address
    return Workers(cluster=parse_cluster(address))


def node_when_all_run(folder: Path, number: int) -> str:
    """The node of a Ray cluster that runs this case, when the other one has begun, too."""
    import ray

    (folder / str(number)).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2, within_s=HANG_S)
    return str(ray.get_runtime_context().get_node_id())


def test_both_nodes_of_a_ray_cluster_run_cases(ray: RayCluster, tmp_path: Path) -> None:
    some = Workers(cluster=parse_cluster(ray.address))
    nodes = run_all(partial(node_when_all_run, tmp_path), {"one": 1, "other": 2}, some)
    assert len(set(nodes.values())) == 2


def test_results_are_those_of_one_process(workers: Workers) -> None:
    shown: list[float] = []
    found = run_all(draw, SEEDS, workers, progress=shown.append)
    assert list(found.items()) == list(run_all(draw, SEEDS).items())
    assert shown == [1, 2, 3, 4, 5]


def test_numeric_libraries_have_one_thread(workers: Workers) -> None:
    for threads in run_all(numeric_threads, SEEDS, workers).values():
        assert threads and set(threads) == {1}


def test_errors_name_their_case(workers: Workers) -> None:
    with pytest.raises(InputError) as caught:
        run_all(bad_input, SEEDS, workers)
    assert str(caught.value) == "the case 'seed 3': seed: is 3; give another one"
    with pytest.raises(CaseFailed, match="the case 'seed 3' failed: .*OwnError: this and that"):
        run_all(broken, SEEDS, workers)


def test_a_dead_worker_ends_the_study_and_names_its_case(workers: Workers) -> None:
    with pytest.raises(CaseFailed, match="the case 'seed 3' failed"):
        run_all(deadly, SEEDS, workers)
    assert len(run_all(draw, SEEDS, workers)) == len(SEEDS), "the next study has new workers"


def test_machines_with_other_code_are_refused(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {**installed_versions(), "prfaas": "0.0.9 (0123456789ab)"}
    monkeypatch.setattr(module, "installed_versions", lambda: here)
    with pytest.raises(InputError, match=r"has prfaas .* and this machine has 0\.0\.9"):
        run_all(draw, SEEDS, workers)


@pytest.mark.parametrize("address", ["ray:127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there(address: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed; run `make test-cluster`")
    with pytest.raises(InputError, match="cannot be used"):
        run_all(draw, SEEDS, Workers(cluster=parse_cluster(address)))


def test_a_simulation_on_a_ray_cluster(ray: RayCluster, tmp_path: Path) -> None:
    """The same study on this machine alone and on two nodes: identical results."""
    rows = [
        {
            "timestamp": 3000 * (k // 8),
            "input_length": 512 * (6 + 9 * (k % 5)),
            "output_length": 60,
            "hash_ids": [1000 * (k % 50) + block for block in range(6 + 9 * (k % 5))],
        }
        for k in range(60)
    ]
    trace = tmp_path / "tiny.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    def study(*options: str) -> str:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "prfaas", "simulate"),
                *(str(ROOT / "configs" / "case_study.toml"), "--trace", str(trace), "--json"),
                *("--policy", "paper", "adaptive", "--baseline", "homogeneous", *options),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        del found["wall_s"]
        return json.dumps(found)

    assert study("--workers", "1") == study("--cluster", ray.address)
