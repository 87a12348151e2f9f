"""Flows: balanced, and within the capacity of PrfaaS clusters and links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Path, Remote
from tests.planner.builders import FAST, SLOW, pool, problem


def remote(name: str, instances: int, bps: float = 1e12, slow: bool = False) -> Remote:
    return Remote(pool(name, instances, SLOW if slow else FAST), Path(bps, 0.01))


def network(first: tuple[Remote, ...], second: tuple[Remote, ...]) -> NetworkProblem:
    """Two equal PD clusters; decode limits the rate, so that the flows have a choice."""
    one = problem(bs_max=1, pd=4)
    other = replace(one, local=replace(one.local, pool=replace(one.local.pool, cluster="other")))
    homes = (Home(0.5, replace(one, remotes=first)), Home(0.5, replace(other, remotes=second)))
    return NetworkProblem(homes)


def test_requests_go_where_there_is_room() -> None:
    """One PD cluster reaches a small and a large PrfaaS cluster, the other only the small one."""
    small, large = remote("small", 4), remote("large", 36)
    plan = NetworkPlanner("exact").solve(network((small, large), (small,)))
    used = {prfaas.cluster: prfaas.utilisation for prfaas in plan.prfaas}
    to_near = {flow.source: flow.share for flow in plan.flows_to("near")}
    assert used["small"] < 1
    assert to_near["large"] > 0.9  # it leaves the small one to the PD cluster that needs it
    assert plan.flows_to("other")[0].share == pytest.approx(1)


def test_flows_are_balanced_over_equal_clusters() -> None:
    a, b = remote("a", 2), remote("b", 4)
    plan = NetworkPlanner("exact").solve(network((a, b), (a, b)))
    first, second = plan.prfaas
    assert first.utilisation == pytest.approx(second.utilisation, rel=1e-6)


def test_a_slow_link_receives_what_it_bears() -> None:
    fast, slow = remote("fast", 3), remote("slow", 3, bps=2e6)
    limited = replace(problem(bs_max=50, pd=4), remotes=(fast, slow))
    plan = NetworkPlanner("exact").solve(NetworkProblem((Home(1.0, limited),)))
    by_source = {flow.source: flow for flow in plan.flows}
    assert by_source["slow"].utilisation == pytest.approx(1, abs=1e-3)
    assert by_source["slow"].bps <= 2e6 * (1 + 1e-8)
    stages = {(b.stage, b.cluster, b.target) for b in plan.binding}
    assert ("PrfaaS egress", "slow", "near") in stages
    assert ("PrfaaS prefill", "fast", None) in stages


def test_a_prfaas_cluster_without_instances_receives_nothing() -> None:
    gone, there = remote("gone", 0), remote("there", 2)
    plan = NetworkPlanner("exact").solve(network((gone, there), (gone, there)))
    without = NetworkPlanner("exact").solve(network((there,), (there,)))
    assert plan.rate_rps == pytest.approx(without.rate_rps, rel=1e-9)
    assert [flow.rps for flow in plan.flows if flow.source == "gone"] == [0.0, 0.0]
    assert np.isfinite([prfaas.utilisation for prfaas in plan.prfaas]).all()
