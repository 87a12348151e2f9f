"""The plan that routing follows: threshold, roles and shares, and the problem they were solved for.

Plain data. `first_plan` solves for a deployment's stated traffic; `long_term.replan` follows the
observed traffic. This module does not know requests or queues. Paper: sections 3.4.2 and 3.4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from prfaas.config.deployment import ReplanSection
from prfaas.planner.alone import local_only
from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.optimise import optimise, stage_rates
from prfaas.planner.problem import Pool, Problem
from prfaas.types import ClusterId, NodeId

Role: TypeAlias = Literal["prefill", "decode"]


class Optimum(NamedTuple):
    """Threshold and split of largest throughput, under the planner's exact reading."""

    threshold_tokens: int
    n_prefill: int
    capacity_rps: float
    shares: tuple[float, ...]
    alone: bool = False  # every local node prefills and decodes its own requests


@dataclass(frozen=True, slots=True)
class Plan:
    """The target, not the present state: a node drains before it changes its role."""

    rules: ReplanSection  # limits of the next change of plan
    problem: Problem  # the live hardware and the traffic that this plan was solved for
    threshold_tokens: int  # a request with more uncached tokens than this is offloaded
    roles: Mapping[NodeId, Role]  # of every node of the PD cluster
    shares: tuple[float, ...]  # of the offloaded requests, one per `problem.remotes`
    capacity_rps: float
    made_s: float
    converted_s: Mapping[NodeId, float]  # time of each node's latest change of role
    reason: str
    # The PD clusters that this plan was solved together with, itself included, in order of their
    # names. Empty: alone, or unknown.
    together: tuple[ClusterId, ...] = ()

    @property
    def content(self) -> tuple[object, ...]:
        """What routing and the next plan depend on: two plans with the same content are one."""
        return (
            self.threshold_tokens,
            tuple(sorted(self.roles.items())),
            self.shares,
            self.capacity_rps,
            self.reason,
            self.together,
        )

    @property
    def n_prefill(self) -> int:
        return sum(role == "prefill" for role in self.roles.values())

    @property
    def n_decode(self) -> int:
        return len(self.roles) - self.n_prefill

    @property
    def offloaded_share(self) -> float:
        """The share of the requests whose uncached tokens exceed the threshold; 0 where no PrfaaS
        cluster takes them."""
        if not self.problem.remotes:
            return 0.0
        workload = self.problem.workload
        _, longer = workload.divided(self.threshold_tokens)
        return float(workload.weight[longer].sum() / workload.weight.sum())


def first_plan(
    problem: Problem, nodes: Sequence[NodeId], rules: ReplanSection, now_s: float = 0.0
) -> Plan:
    """The optimum for the traffic that the deployment file states, on the hardware that the policy
    uses (`hardware_for`). `nodes` are those of the PD cluster."""
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
    """A plan for the live nodes. A node with a role keeps it; the others get the roles that the
    best split lacks, prefill first."""
    assert len(roles) == problem.local.pool.instances
    solver = Solver(problem)
    best = solver.best()
    given, missing = fill_roles(roles, best.n_prefill)
    if missing:  # more prefill nodes than the best split has, or too few new nodes
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


def fill_roles(
    roles: Mapping[NodeId, Role | None], n_prefill: int
) -> tuple[dict[NodeId, Role], int]:
    """Roles for the nodes that have none: those that a split with `n_prefill` prefill nodes lacks,
    prefill first. Also returns how many prefill nodes are missing then; below 0: there are more
    than the split has."""
    missing = n_prefill - sum(role == "prefill" for role in roles.values())
    given: dict[NodeId, Role] = {}
    for node, role in roles.items():
        if role is None:
            role = "prefill" if missing > 0 else "decode"
            missing -= role == "prefill"
        given[node] = role
    return given, missing


def hardware_for(policy: str, problem: Problem) -> Problem:
    """The hardware that a plan for `policy` uses. Under `local` the PD cluster prefills every
    request, so its split is planned as if there were no PrfaaS cluster. Every other policy uses all
    clusters."""
    return replace(problem, remotes=()) if policy == "local" else problem


def with_instances(problem: Problem, remotes: Sequence[int], local: int) -> Problem:
    """The problem with the live instances. There may also be more than before: nodes return, and
    others join. A single local instance decodes, whatever split is fixed."""
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
    """The problem with observed prefill times: a factor per cluster, 1 where none is given."""

    def paced(pool: Pool) -> Pool:
        return replace(pool, profile=pool.profile.paced(paces.get(ClusterId(pool.cluster), 1.0)))

    return replace(
        problem,
        remotes=tuple(replace(remote, pool=paced(remote.pool)) for remote in problem.remotes),
        local=replace(problem.local, pool=paced(problem.local.pool)),
    )


def find_optimum(problem: Problem) -> Optimum:
    """The best threshold and split."""
    return Solver(problem).best()


class Solver:
    """Solves one problem, for the best split or for a given one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        work = problem.workload
        self._curves = WorkCurves(cut_workload(work), Atoms(work, problem.spec), reading="exact")

    def best(self, n_prefill: int | None = None) -> Optimum:
        """With `n_prefill` the split is given, and only the threshold is optimised. Where all
        PrfaaS clusters are lost, the local nodes may serve most if each of them serves alone."""
        problem, curves = self._problem, self._curves
        if n_prefill is not None:
            problem = replace(problem, local=replace(problem.local, fixed_prefill=n_prefill))
        if not any(remote.pool.instances for remote in problem.remotes):
            problem = replace(problem, fixed_threshold=None)  # no request can be offloaded
            # Nodes are not planned to serve alone where a split was asked for: by the deployment
            # file, or by a deployment without PrfaaS clusters that has two nodes.
            pool = problem.local.pool
            if not problem.local.fixed_prefill and (problem.remotes or pool.instances == 1):
                local = local_only(problem, curves)
                if local.alone:
                    everything = int(curves.cuts.threshold[-1])
                    shares = (0.0,) * len(problem.remotes)
                    return Optimum(everything, 0, local.rps, shares, alone=True)
        choice = optimise(problem, curves)
        at = stage_rates(problem, curves, choice)
        # Without a live PrfaaS node, every share is 0.
        shares = tuple(theta / at.prfaas if at.prfaas else 0.0 for theta in at.each_prfaas)
        threshold = int(curves.cuts.threshold[choice.row])
        return Optimum(threshold, choice.n_prefill, at.lambda_max, shares)
