"""A deployment survives being written and read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from prfaas.config import Deployment, load_deployment, parse_deployment
from prfaas.config.deployment import GatewayEntry, Node, SchedulerSection
from prfaas.config.gateway import ApiKey, TenantSection
from prfaas.config.write import deployment_toml, toml

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
MIXED = """
catalog = ["a b.toml"]
[model]
name = 'qu"ote'
[workload]
kind = "mixture"
output_tokens = 5
components = [
  { weight = 1, mu = 3.0, sigma = 0.5, min_tokens = 1, max_tokens = 9 },
  { weight = 2.5, mu = 4.0, sigma = 0.5, min_tokens = 1, max_tokens = 99 },
]
[slo]
output_tokens_per_s = 1e-05
[[clusters]]
name = "near"
kind = "pd"
accelerator = "h20"
gpus = 2
gpus_per_instance = 1
[scheduler.replan]
min_gain = 0.5
"""


def again(deployment: Deployment) -> Deployment:
    return parse_deployment(tomllib.loads(deployment_toml(deployment)), "again.toml")


def test_the_case_study_and_a_mixture() -> None:
    for deployment in (load_deployment(CASE_STUDY), parse_deployment(tomllib.loads(MIXED), "x")):
        assert again(deployment) == deployment


def test_workloads_of_pd_clusters() -> None:
    deployment = load_deployment(CASE_STUDY.with_name("two_by_two.toml"))
    assert again(deployment) == deployment
    mixed = parse_deployment(tomllib.loads(MIXED), "x").workload
    east, west, *others = deployment.clusters
    clusters = [east, msgspec.structs.replace(west, workload=mixed), *others]
    changed = msgspec.structs.replace(deployment, clusters=clusters)
    assert again(changed) == changed


def test_gateways_and_relays_by_cluster() -> None:
    deployment = load_deployment(CASE_STUDY.with_name("two_by_two.toml"))
    entries = [GatewayEntry("east", "http://127.0.0.1:1"), GatewayEntry("west", "http://b:2")]
    east, *others = deployment.clusters
    node = Node("http://e:1", "http://k:1", {"north": "r:1", "south": "r:2"})
    clusters = [msgspec.structs.replace(east, nodes=[node]), *others]
    changed = msgspec.structs.replace(deployment, gateways=entries, clusters=clusters)
    assert again(changed) == changed


def test_nodes_and_keys() -> None:
    deployment = load_deployment(CASE_STUDY)
    nodes = [Node("http://a:1", "http://a:2", "r:1"), Node("http://b:1", "http://b:2")]
    clusters = [msgspec.structs.replace(c, nodes=nodes) for c in deployment.clusters]
    gateway = msgspec.structs.replace(
        deployment.gateway,
        keys=[ApiKey("k", tenant="t")],
        plans=False,
        tenants={"t": TenantSection(weight=2.0, max_in_flight=3)},
    )
    running = msgspec.structs.replace(deployment, clusters=clusters, gateway=gateway)
    assert again(running) == running


def test_what_has_its_default_is_left_out() -> None:
    deployment = load_deployment(CASE_STUDY)
    assert "[scheduler]" in deployment_toml(deployment), "it names its policy"
    text = deployment_toml(msgspec.structs.replace(deployment, scheduler=SchedulerSection()))
    assert "scheduler" not in text and "via" not in text and "from = " in text


@pytest.mark.parametrize("value", [True, 1, 0.1, 1e300, "ü\n", [1, 2], [], {"a": {"b": [1]}}])
def test_values(value: object) -> None:
    assert tomllib.loads(toml({"table": {"key": value}})) == {"table": {"key": value}}
