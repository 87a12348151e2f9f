"""What routing follows until the next plan: threshold, roles, shares, and what they rest on.

Plain data. `first_plan` solves a deployment's stated traffic; `long_term.replan` follows what is
observed. Knows nothing of requests or queues. Paper: sections 3.4.2 and 3.4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from prfaas.config.deployment import ReplanSection
from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Pool, Problem
from prfaas.types import ClusterId, NodeId

Role: TypeAlias = Literal["prefill", "decode"]


class Optimum(NamedTuple):
    """Threshold and split of largest throughput, true mean service times counted."""

    threshold_tokens: int
    n_prefill: int
    capacity_rps: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A wish, not a state: a node that is to change its role drains first."""

    rules: ReplanSection  # how the next plan may differ from this one
    problem: Problem  # the hardware that lives, and the traffic this plan was solved for
    threshold_tokens: int  # a request with more uncached tokens than this is offloaded
    roles: Mapping[NodeId, Role]  # of every node of the PD cluster
    shares: tuple[float, ...]  # of the offloaded requests, one per `problem.remotes`
    capacity_rps: float
    made_s: float
    converted_s: Mapping[NodeId, float]  # when nodes that changed their role last did so
    reason: str

    @property
    def n_prefill(self) -> int:
        return sum(role == "prefill" for role in self.roles.values())

    @property
    def n_decode(self) -> int:
        return len(self.roles) - self.n_prefill


def first_plan(
    problem: Problem, nodes: Sequence[NodeId], rules: ReplanSection, now_s: float = 0.0
) -> Plan:
    """The optimum for the traffic the deployment file states, on the hardware that the policy uses
    (`hardware_for`). `nodes`: of the PD cluster."""
    return plan_for_nodes(
        problem, dict.fromkeys(nodes), rules, now_s, reason="the deployment's stated traffic"
    )


def plan_for_nodes(
    problem: Problem,
    roles: Mapping[NodeId, Role | None],
    rules: ReplanSection,
    now_s: float,
    *,
    reason: str,
) -> Plan:
    """A plan for the nodes that are there: those with a role keep it, the others get what the best
    split lacks, prefill first."""
    assert len(roles) == problem.local.pool.instances
    solver = Solver(problem)
    best = solver.best()
    lacking = best.n_prefill - sum(role == "prefill" for role in roles.values())
    given: dict[NodeId, Role] = {}
    for node, role in roles.items():
        if role is None:
            role = "prefill" if lacking > 0 else "decode"
            lacking -= role == "prefill"
        given[node] = role
    if lacking:  # more prefill than wanted, or nobody new to take it
        best = solver.best(sum(role == "prefill" for role in given.values()))
    return Plan(
        rules=rules,
        problem=problem,
        threshold_tokens=best.threshold_tokens,
        roles=given,
        shares=best.shares,
        capacity_rps=best.capacity_rps,
        made_s=now_s,
        converted_s={},
        reason=reason,
    )


def hardware_for(policy: str, problem: Problem) -> Problem:
    """What a plan for `policy` counts on. Under `local` the PD cluster prefills everything itself,
    so its split is that of the PD cluster alone, as if there were no PrfaaS cluster. Every other
    policy uses all clusters."""
    return replace(problem, remotes=()) if policy == "local" else problem


def with_instances(problem: Problem, remotes: Sequence[int], local: int) -> Problem:
    """The problem with the instances that answer. They may also be more than before: nodes come
    back, and others join. One that is alone decodes, whatever split is fixed."""
    pools = tuple(
        replace(remote, pool=replace(remote.pool, instances=live))
        for remote, live in zip(problem.remotes, remotes, strict=True)
    )
    fixed = problem.local.fixed_prefill
    if fixed is not None:
        fixed = min(fixed, max(local - 1, 0))
    pool = replace(problem.local.pool, instances=local)
    here = replace(problem.local, pool=pool, fixed_prefill=fixed)
    return replace(problem, remotes=pools, local=here)


def with_paces(problem: Problem, paces: Mapping[ClusterId, float]) -> Problem:
    """The problem with prefill times as observed: a factor per cluster, 1 where none is given."""

    def paced(pool: Pool) -> Pool:
        return replace(pool, profile=pool.profile.paced(paces.get(ClusterId(pool.cluster), 1.0)))

    return replace(
        problem,
        remotes=tuple(replace(remote, pool=paced(remote.pool)) for remote in problem.remotes),
        local=replace(problem.local, pool=paced(problem.local.pool)),
    )


def find_optimum(problem: Problem) -> Optimum:
    return Solver(problem).best()


class Solver:
    """One problem, with every split that is asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        work = problem.workload
        self._curves = WorkCurves(cut_workload(work), Atoms(work, problem.spec), reading="exact")

    def best(self, n_prefill: int | None = None) -> Optimum:
        """With `n_prefill` the split is given, and only the threshold is chosen."""
        problem, curves = self._problem, self._curves
        if n_prefill is not None:
            problem = replace(problem, local=replace(problem.local, fixed_prefill=n_prefill))
        choice = optimise(problem, curves)
        at = stage_rates(problem, curves, choice)
        # Dead PrfaaS clusters alone: no share of nothing.
        shares = tuple(theta / at.prfaas if at.prfaas else 0.0 for theta in at.each_prfaas)
        threshold = int(curves.cuts.threshold[choice.row])
        return Optimum(threshold, choice.n_prefill, at.lambda_max, shares)
