from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prfaas.config import load_deployment
from prfaas.config.deployment import ReplanSection
from prfaas.planner import baselines
from prfaas.planner.alone import alone_rps
from prfaas.planner.comparison import Planner
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import (
    Plan,
    Role,
    Solver,
    find_optimum,
    first_plan,
    hardware_for,
    plan_for_nodes,
    with_instances,
)
from prfaas.studies.problem_files import Study
from prfaas.types import NodeId
from tests.planner.builders import CASE_STUDY, case_study, problem


def plan_of(problem: Problem) -> Plan:
    nodes = [NodeId(f"pd-{index}") for index in range(problem.local.pool.instances)]
    return first_plan(problem, nodes, ReplanSection())


@pytest.mark.parametrize("system", ["prfaas_pd", "homogeneous", "naive"])
def test_the_first_plan_is_the_exact_readings_optimum(system: str) -> None:
    given = case_study()
    if system != "prfaas_pd":
        made = getattr(baselines, system)(given)
        assert made is not None
        given = made
    solution = Planner(given, "exact").solve(given)
    plan = plan_of(given)
    assert (plan.n_prefill, plan.n_decode) == (solution.n_prefill, solution.n_decode)
    assert plan.capacity_rps == pytest.approx(solution.lambda_max_rps)
    if solution.threshold_tokens is not None:
        assert plan.threshold_tokens == solution.threshold_tokens
    # Nothing is left to a prefill node that does not exist, and nothing sent to a cluster.
    if system == "naive":
        assert plan.threshold_tokens == 0
    if system == "homogeneous":
        assert plan.threshold_tokens == given.workload.max_new_tokens


def test_policy_local_is_planned_as_if_there_were_no_prfaas_cluster() -> None:
    deployment = load_deployment(CASE_STUDY)
    alone = msgspec.structs.replace(
        deployment,
        clusters=[cluster for cluster in deployment.clusters if cluster.kind == "pd"],
        links=[link for link in deployment.links if link.source == link.target],
    )
    study = Study(CASE_STUDY, "exact")
    whole = study.problem(deployment)
    local = plan_of(hardware_for("local", whole))
    assert local == plan_of(study.problem(alone))
    for policy in ("paper", "adaptive", "remote"):
        assert hardware_for(policy, whole) == whole
    assert local.n_prefill > plan_of(whole).n_prefill, "it has no help with its prefills"


def test_a_given_split_keeps_its_nodes_and_chooses_the_threshold() -> None:
    given = problem()
    fixed = Solver(given).best(n_prefill=1)
    free = find_optimum(given)
    assert fixed.n_prefill == 1
    assert fixed.capacity_rps <= free.capacity_rps


def test_without_a_live_prfaas_instance_every_prefill_is_local() -> None:
    given = problem()
    dead = tuple(replace(r, pool=replace(r.pool, instances=0)) for r in given.remotes)
    best = find_optimum(replace(given, remotes=dead))
    assert best.shares == (0.0,)
    assert best.threshold_tokens == given.workload.max_new_tokens


@pytest.mark.parametrize(("pd", "fixed"), [(1, None), (3, None), (3, 0), (4, 2)])
def test_a_plan_without_a_live_prfaas_node_has_what_the_local_nodes_serve(
    pd: int, fixed: int | None
) -> None:
    """Also of a single node, which prefills and decodes, and with a fixed threshold."""
    for threshold in (None, 500):
        given = problem(pd=pd, fixed_prefill=fixed, fixed_threshold=threshold)
        lost = with_instances(given, [0], pd)
        best = find_optimum(lost)
        assert best.shares == (0.0,)
        if fixed:
            assert best.n_prefill == fixed and not best.alone
            assert best.capacity_rps == find_optimum(replace(given, remotes=())).capacity_rps
            continue
        assert best.capacity_rps >= 0.9 * alone_rps(lost)
        assert best.alone == (best.n_prefill == 0)


def test_a_homogeneous_deployment_is_planned_as_a_split() -> None:
    """It is the paper's baseline, whatever its nodes would serve alone."""
    best = find_optimum(problem(prfaas=0))
    assert best.n_prefill > 0 and not best.alone


NODES = [NodeId(f"pd-{index}") for index in range(8)]


def test_nodes_keep_their_roles_and_new_nodes_get_the_missing_ones() -> None:
    given = case_study()
    wanted = plan_of(given)
    roles: dict[NodeId, Role | None] = dict.fromkeys(NODES)
    roles[NODES[-1]] = "prefill"  # where a first plan would have put it last
    plan = plan_for_nodes(given, roles, ReplanSection(), 0.0, reason="test")
    assert plan.roles[NODES[-1]] == "prefill"
    assert (plan.n_prefill, plan.threshold_tokens) == (wanted.n_prefill, wanted.threshold_tokens)
    alike = plan_for_nodes(
        given, dict.fromkeys(NODES, "prefill"), ReplanSection(), 0.0, reason="test"
    )
    assert alike.n_prefill == len(NODES), "no node is converted here"
    assert alike.threshold_tokens == Solver(given).best(len(NODES)).threshold_tokens


@pytest.mark.parametrize(("local", "remote"), [(1, 0), (1, 2), (3, 0), (12, 5)])
def test_a_plan_follows_the_number_of_nodes(local: int, remote: int) -> None:
    problem = with_instances(case_study(), (remote,), local)
    nodes = [NodeId(str(index)) for index in range(local)]
    plan = plan_for_nodes(problem, dict.fromkeys(nodes), ReplanSection(), 0.0, reason="test")
    assert [pool.instances for pool in plan.problem.pools] == [remote, local]
    assert plan.n_decode >= 1
    if remote == 0 and plan.n_prefill:
        assert plan.threshold_tokens == problem.workload.max_new_tokens, "nothing leaves"


def test_a_fixed_split_gives_way_when_nodes_are_missing() -> None:
    given = case_study()
    given = replace(given, local=replace(given.local, fixed_prefill=3))
    assert with_instances(given, (4,), 8).local.fixed_prefill == 3
    assert with_instances(given, (4,), 2).local.fixed_prefill == 1
    assert with_instances(given, (4,), 1).local.fixed_prefill == 0
