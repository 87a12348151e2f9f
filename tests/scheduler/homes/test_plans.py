from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.config.deployment import ReplanSection
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.scheduler.homes.plans import as_network, first_plans, planned_rps, solve_network
from prfaas.scheduler.plan import find_optimum, first_plan
from prfaas.types import ClusterId
from tests.planner.builders import problem
from tests.scheduler.homes.networks import EAST, NETWORK, NODES, PLANS, SOUTH


def test_one_pd_cluster_has_the_plan_it_always_had() -> None:
    given, nodes = problem(), NODES[EAST]
    near = ClusterId("near")
    made = first_plans(as_network(given), {near: nodes}, ReplanSection(), "paper")
    assert made == {near: first_plan(given, nodes, ReplanSection())}
    assert planned_rps(as_network(given), "paper") == find_optimum(given).capacity_rps


def test_every_pd_cluster_has_its_part_of_the_common_plan() -> None:
    solved = NetworkPlanner("exact").solve(NETWORK)
    for name, plan in PLANS.items():
        decided = solved.home(name)
        assert plan.n_prefill == decided.n_prefill
        assert plan.threshold_tokens == decided.threshold_tokens
        assert plan.capacity_rps == decided.rate_rps
        assert plan.shares == tuple(flow.share for flow in solved.flows_to(name))
    assert planned_rps(NETWORK, "paper") == pytest.approx(solved.rate_rps)


def test_policy_local_plans_each_pd_cluster_alone() -> None:
    made = first_plans(NETWORK, NODES, ReplanSection(), "local")
    assert all(not plan.problem.remotes for plan in made.values())


def test_a_prfaas_cluster_without_an_instance_gets_nothing() -> None:
    lost = NETWORK.with_remotes(
        lambda _, remote: (
            replace(remote, pool=replace(remote.pool, instances=0))
            if remote.pool.cluster == SOUTH
            else remote
        )
    )
    assert all(flow.source != SOUTH for flow in solve_network(lost).flows)
