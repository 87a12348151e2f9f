from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from prfaas.config.deployment import ReplanSection
from prfaas.errors import InputError
from prfaas.planner.alone import alone_rps
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.scheduler.homes.plans import (
    as_network,
    first_plans,
    home_name,
    planned_rps,
    plans_for_nodes,
    solve_network,
    with_splits,
)
from prfaas.scheduler.plan import Plan, Role, find_optimum, first_plan, plan_for_nodes
from prfaas.types import ClusterId, NodeId
from tests.planner.builders import problem
from tests.scheduler.homes.networks import (
    EAST,
    NETWORK,
    NODES,
    NORTH,
    PLANS,
    SOUTH,
    WEST,
    network_with,
)

RULES = ReplanSection()


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


# Plans for live nodes ----------------------------------------------------------------------------


def no_roles(network: NetworkProblem = NETWORK) -> dict[ClusterId, dict[NodeId, Role | None]]:
    sizes = {home_name(home): home.problem.local.pool.instances for home in network.homes}
    return {name: dict.fromkeys(NODES[name][:count]) for name, count in sizes.items()}


def planned_for(
    network: NetworkProblem,
    roles: Mapping[ClusterId, Mapping[NodeId, Role | None]],
    policy: str = "paper",
) -> dict[ClusterId, Plan]:
    return plans_for_nodes(network, roles, RULES, 7.0, reason="nodes", policy=policy)


def test_live_nodes_without_roles_get_the_first_plans() -> None:
    made = planned_for(NETWORK, no_roles())
    for name, plan in made.items():
        assert (plan.made_s, plan.reason) == (7.0, "nodes")
        assert replace(plan, made_s=0.0, reason=PLANS[name].reason) == PLANS[name]


def test_one_pd_cluster_is_planned_for_its_nodes_as_ever() -> None:
    given, near = problem(), ClusterId("near")
    roles: dict[NodeId, Role | None] = dict.fromkeys(NODES[EAST], "decode")
    roles[NODES[EAST][0]] = None
    made = planned_for(as_network(given), {near: roles})
    assert made == {near: plan_for_nodes(given, roles, RULES, 7.0, reason="nodes")}


def test_nodes_keep_their_roles_and_the_plan_is_solved_for_them() -> None:
    """`west` has one prefill node more than the best split."""
    best = PLANS[WEST].n_prefill
    roles = no_roles()
    roles[WEST] = {n: "prefill" if k <= best else "decode" for k, n in enumerate(NODES[WEST])}
    made = planned_for(NETWORK, roles)
    assert made[WEST].roles == roles[WEST]
    assert made[EAST].n_prefill == PLANS[EAST].n_prefill
    solved = solve_network(with_splits(NETWORK, {n: made[n].n_prefill for n in made}))
    assert {n: plan.capacity_rps for n, plan in made.items()} == {
        n: solved.home(n).rate_rps for n in made
    }


def test_a_lost_pd_cluster_has_no_plan_and_leaves_its_part_to_the_others() -> None:
    lost = network_with(NETWORK, {WEST: 0})
    made = planned_for(lost, no_roles(lost))
    alone = as_network(NETWORK.homes[0].problem)
    expected = planned_for(alone, {EAST: no_roles()[EAST]})[EAST]
    assert made == {EAST: replace(expected, together=(EAST,))}
    assert made[EAST].capacity_rps > PLANS[EAST].capacity_rps


def test_lost_prfaas_nodes_are_planned_without() -> None:
    lost = network_with(NETWORK, {SOUTH: 0, EAST: 3})
    made = planned_for(lost, no_roles(lost))
    assert all(plan.shares[1] == 0.0 for plan in made.values())
    assert len(made[EAST].roles) == 3 and len(made[WEST].roles) == 4


def test_policy_local_plans_the_live_nodes_of_each_pd_cluster_alone() -> None:
    made = planned_for(NETWORK, no_roles(), "local")
    assert set(made) == {EAST, WEST}
    assert all(not plan.problem.remotes for plan in made.values())


def test_without_a_live_pd_cluster_the_error_names_them() -> None:
    lost = network_with(NETWORK, {EAST: 0, WEST: 0})
    with pytest.raises(InputError, match="no PD cluster has a live node"):
        planned_for(lost, no_roles(lost))


def test_a_pd_cluster_that_no_other_node_can_prefill_for_serves_alone() -> None:
    lost = network_with(NETWORK, {EAST: 1, NORTH: 0, SOUTH: 0})
    made = planned_for(lost, no_roles(lost))
    assert made[EAST].n_decode == 1 and made[EAST].capacity_rps == pytest.approx(
        alone_rps(lost.homes[0].problem)
    )
    assert made[WEST].capacity_rps > 0
    assert all(plan.together == (EAST, WEST) for plan in made.values())
