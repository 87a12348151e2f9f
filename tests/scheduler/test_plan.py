from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.config.deployment import ReplanSection
from prfaas.planner import baselines
from prfaas.planner.plan import Planner
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import Plan, Solver, best_for, first_plan
from prfaas.types import NodeId
from tests.planner.builders import case_study, problem


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


def test_a_given_split_keeps_its_nodes_and_chooses_the_threshold() -> None:
    given = problem()
    fixed = Solver(given).best(n_prefill=1)
    free = best_for(given)
    assert fixed.n_prefill == 1
    assert fixed.capacity_rps <= free.capacity_rps


def test_no_prfaas_instance_alive_means_no_share_and_all_local() -> None:
    given = problem()
    dead = tuple(replace(r, pool=replace(r.pool, instances=0)) for r in given.remotes)
    best = best_for(replace(given, remotes=dead))
    assert best.shares == (0.0,)
    assert best.threshold_tokens == given.workload.max_new_tokens
