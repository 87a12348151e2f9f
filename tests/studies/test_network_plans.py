"""Files with several PD clusters are planned; their tables say what the plan says."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prfaas.config import Deployment, load_deployment, parse_deployment
from prfaas.display.flow_tables import network_tables
from prfaas.errors import InputError
from prfaas.planner.network.comparison import NetworkComparison
from prfaas.studies.network_plans import NetworkStudy

CONFIGS = Path(__file__).parents[2] / "configs"
TWO_BY_TWO = CONFIGS / "two_by_two.toml"


@pytest.fixture(scope="module")
def comparison() -> NetworkComparison:
    study = NetworkStudy(TWO_BY_TWO, "exact")
    return study.plan_network(load_deployment(TWO_BY_TWO))


def test_the_report_has_clusters_flows_and_what_binds(comparison: NetworkComparison) -> None:
    report = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert [c["cluster"] for c in report["clusters"]] == ["east", "west"]
    assert [c["traffic_share"] for c in report["clusters"]] == [0.6, 0.4]
    assert {(f["from"], f["to"]) for f in report["flows"]} == {
        ("north", "east"),
        ("north", "west"),
        ("south", "east"),
        ("south", "west"),
    }
    assert {"stage": "PrfaaS egress", "from": "south", "to": "west"} in report["binding"]
    # `west` has shorter prompts of its own, so its threshold is another one.
    east, west = report["clusters"]
    assert east["threshold_tokens"] > west["threshold_tokens"]
    assert all(ratio > 1 for ratio in report["ratios"].values())


def test_the_tables_show_the_plan(comparison: NetworkComparison) -> None:
    plan = comparison.plan
    text = shown(comparison, load_deployment(TWO_BY_TWO))
    assert f"{plan.rate_rps:.3f} requests/s in total" in text
    for home in plan.homes:
        assert f"{home.threshold_tokens:,d}" in text
    assert "the link south -> west" in text and "of 3 Gbit/s (100%)" in text
    assert "instance at north" in text
    assert "the PD clusters alone" in text
    assert "extrapolated" in text
    assert "slo.ttft_s" not in text


def test_a_target_of_ttft_that_the_plan_does_not_use_is_named(
    comparison: NetworkComparison,
) -> None:
    deployment = load_deployment(TWO_BY_TWO, ["slo.ttft_s=2.0"])
    assert "slo.ttft_s does not change it" in shown(comparison, deployment)


def shown(comparison: NetworkComparison, deployment: Deployment) -> str:
    out = Console(width=160, file=io.StringIO())
    out.print(network_tables(comparison, deployment))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_a_pd_cluster_that_cannot_prefill_is_named_with_the_file() -> None:
    raw: Any = tomllib.loads(TWO_BY_TWO.read_text())
    raw["clusters"][1]["gpus"] = 8
    raw["links"] = [link for link in raw["links"] if link["to"] != "west"]
    with pytest.raises(InputError, match=r"two_by_two\.toml: clusters: .* for west with"):
        NetworkStudy(TWO_BY_TWO, "paper").plan_network(parse_deployment(raw, TWO_BY_TWO))


def test_an_unknown_profile_is_named_by_its_place_in_the_file() -> None:
    raw: Any = tomllib.loads(TWO_BY_TWO.read_text())
    raw["clusters"][1]["accelerator"] = "no-such-accelerator"
    deployment = parse_deployment(raw, TWO_BY_TWO)
    with pytest.raises(InputError, match=r"two_by_two\.toml: clusters\.1\.accelerator: "):
        NetworkStudy(TWO_BY_TWO, "paper").network(deployment)
