"""What several PD clusters serve, for the same shares of traffic, without one PrfaaS cluster."""

from __future__ import annotations

from dataclasses import replace

from prfaas.planner.alone import local_only
from prfaas.planner.lost_sites import LostSite, left_home
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner


def lost_in_network(
    planner: NetworkPlanner, problem: NetworkProblem, plan: NetworkPlan
) -> tuple[LostSite, ...]:
    """The loss of each PrfaaS cluster. `plan` is that of the problem."""
    return tuple(_lost(planner, problem, plan, name) for name in problem.prfaas_pools)


def _lost(
    planner: NetworkPlanner, problem: NetworkProblem, plan: NetworkPlan, name: str
) -> LostSite:
    """PD clusters that have no PrfaaS cluster left may serve alone. The others are planned again,
    and the slowest for its share limits the total."""
    affected = {flow.target for flow in plan.flows if flow.source == name}
    left = problem.with_remotes(
        lambda home, remote: None if remote.pool.cluster == name else remote
    )
    alone, planned, limits = set(), [], []
    for home in left.homes:
        if home.cluster in affected and not home.problem.remotes:
            found = local_only(home.problem, planner.curves(home))
            if found.alone:
                alone.add(home.cluster)
                limits.append(found.rps / home.share)
                continue
        planned.append(home)
    splits = dict.fromkeys(alone, 0)
    if planned:
        share = sum(home.share for home in planned)
        homes = tuple(replace(home, share=home.share / share) for home in planned)
        again = planner.solve(NetworkProblem(homes))
        limits.append(again.rate_rps / share)
        splits |= {home.cluster: home.n_prefill for home in again.homes}
    homes_left = tuple(
        left_home(
            home.problem,
            splits[home.cluster],
            plan.home(home.cluster).n_prefill,
            alone=home.cluster in alone,
        )
        for home in left.homes
        if home.cluster in affected
    )
    return LostSite(name, min(limits), plan.rate_rps, homes_left)
