"""`bench/gateway.py`: what it makes of the rounds that it has measured."""

from __future__ import annotations

from typing import Any

import click
import pytest

from prfaas.config.deployment import SchedulerSection
from tests.benches import bench

gateway = bench("gateway")


def run(requests_per_s: float) -> dict[str, float]:
    return {"requests_per_s": requests_per_s, "ttft_p50_ms": 2.0, "ttft_p99_ms": 3.0}


def summary(policies: list[str], **runs: list[float]) -> dict[str, Any]:
    rounds = {name: [run(rate) for rate in rates] for name, rates in runs.items()}
    found: dict[str, Any] = gateway._summary(rounds, policies)
    return found


def test_the_default_policy_is_measured_beside_paper() -> None:
    option = next(one for one in gateway.main.params if one.name == "named")
    assert option.default == (SchedulerSection().policy, "paper")


def test_policies_are_repeated_or_separated_by_commas() -> None:
    assert gateway._policies(["adaptive,paper", "local", "paper"]) == ["adaptive", "paper", "local"]
    with pytest.raises(click.BadParameter, match="'fast' is not one of paper, adaptive"):
        gateway._policies(["fast"])


def test_ratios_are_of_one_round_so_that_a_slower_machine_slows_both() -> None:
    # From the second round on the machine has half of its speed.
    found = summary(
        ["adaptive", "paper"],
        direct=[1000.0, 500.0, 500.0],
        adaptive=[90.0, 45.0, 45.0],
        paper=[100.0, 50.0, 50.0],
        gateways=[180.0, 45.0, 90.0],
        router=[200.0, 100.0, 100.0],
    )
    assert found["rate_of_paper"] == {"adaptive": 0.9}
    assert found["rate_of_router"] == {"adaptive": 0.45, "paper": 0.5}
    assert found["rate_of_one"] == 2.0
    assert found["adaptive"]["requests_per_s"] == 45.0


def test_a_policy_alone_has_no_ratio() -> None:
    found = summary(["paper"], direct=[1000.0], paper=[100.0])
    assert not [key for key in found if key.startswith("rate_of")]


def test_a_policy_that_answers_nothing_has_the_ratio_nought() -> None:
    found = summary(["adaptive", "paper"], direct=[1.0], adaptive=[0.0], paper=[100.0])
    assert found["rate_of_paper"] == {"adaptive": 0.0}
