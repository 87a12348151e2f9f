from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.config import load_deployment
from prfaas.config.deployment import SLO, Cluster, Deployment, Lognormal, ModelSection
from prfaas.errors import InputError
from prfaas.studies.network_plans import NetworkStudy
from prfaas_lab.faults import preparation
from prfaas_lab.faults.clusters.sizes import FASTEST_GBPS, small_clusters, tiny_clusters
from prfaas_lab.faults.preparation import EMULATED, prepare_fault_deployment

FILE = Path(__file__).parents[3] / "configs" / "two_by_two.toml"
TINY = Deployment(
    model=ModelSection("tiny"),
    workload=Lognormal(6.0, 1.2, min_tokens=16, max_tokens=4096, output_tokens=32),
    slo=SLO(output_tokens_per_s=2.0),
    clusters=[
        Cluster("far", "prfaas", "cpu", gpus=1, gpus_per_instance=1),
        Cluster("near", "pd", "cpu", gpus=2, gpus_per_instance=1),
    ],
    links=[],
)


def instances(deployment: Deployment) -> dict[str, int]:
    return {cluster.name: cluster.instances for cluster in deployment.clusters}


def test_every_pd_cluster_can_prefill_and_decode() -> None:
    found = instances(small_clusters(load_deployment(FILE)))
    assert found == {"east": 3, "west": 2, "north": 1, "south": 1}


def test_real_engines_have_the_tiny_model_on_the_same_clusters() -> None:
    given = load_deployment(FILE)
    made = tiny_clusters(given, TINY)
    assert made.model == TINY.model and made.workload == TINY.workload
    assert instances(made) == instances(small_clusters(given))
    assert {cluster.accelerator for cluster in made.clusters} == {"cpu"}
    assert all(cluster.workload is None for cluster in made.clusters)
    rates = {(link.source, link.target): link.gbps for link in made.links}
    assert rates["north", "east"] == FASTEST_GBPS
    assert rates["south", "east"] == pytest.approx(FASTEST_GBPS * 5 / 100)


async def test_real_engines_need_no_deployment_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without configs/, only emulated engines miss a file."""
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []

    async def tiny(cache: Path, *_: object) -> tuple[Deployment, Path]:
        made.append(cache)
        raise InputError("the tiny model is made next")

    monkeypatch.setattr(preparation, "tiny_deployment", tiny)
    with pytest.raises(InputError, match="tiny model"):
        await prepare_fault_deployment("hf", None, tmp_path, tmp_path, print)
    assert made == [tmp_path]
    with pytest.raises(InputError, match=r"missing\.toml: no such file"):
        await prepare_fault_deployment("hf", Path("missing.toml"), tmp_path, tmp_path, print)
    with pytest.raises(InputError, match=r"case_study\.toml: no such file"):
        await prepare_fault_deployment("emulated", None, tmp_path, tmp_path, print)
    assert made == [tmp_path]


async def test_the_prepared_deployment_can_be_planned(tmp_path: Path) -> None:
    ready, lengths = await prepare_fault_deployment("emulated", FILE, tmp_path, tmp_path, print)
    assert lengths == EMULATED
    network = NetworkStudy(tmp_path / "deployment.toml", "exact").network(ready.deployment)
    assert [home.cluster for home in network.homes] == ["east", "west"]
    threshold = ready.deployment.scheduler.threshold_tokens
    assert threshold is not None and lengths.short < threshold < lengths.long
