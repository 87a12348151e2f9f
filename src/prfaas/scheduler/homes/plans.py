"""Plans of several PD clusters that share PrfaaS clusters: one `Plan` for each of them.

The planner solves all of them together (`planner.network`). One PD cluster is the special case that
`plan.first_plan` solves. Pure; this module does not know requests or queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prfaas.config.deployment import ReplanSection
from prfaas.errors import InputError
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import (
    Plan,
    Role,
    fill_roles,
    hardware_for,
    plan_for_nodes,
)
from prfaas.types import ClusterId, NodeId

_STATED = "the deployment's stated traffic"


def first_plans(
    network: NetworkProblem,
    nodes: Mapping[ClusterId, Sequence[NodeId]],
    rules: ReplanSection,
    policy: str,
) -> dict[ClusterId, Plan]:
    """The optimum for the traffic that the deployment file states. `nodes` are those of the PD
    clusters."""
    roles = {name: dict.fromkeys(members) for name, members in nodes.items()}
    return plans_for_nodes(network, roles, rules, 0.0, reason=_STATED, policy=policy)


def plans_for_nodes(
    network: NetworkProblem,
    roles: Mapping[ClusterId, Mapping[NodeId, Role | None]],
    rules: ReplanSection,
    now_s: float,
    *,
    reason: str,
    policy: str,
) -> dict[ClusterId, Plan]:
    """Plans for the live nodes, with the rules of `plan_for_nodes`. The network has the live
    instances. A PD cluster without one gets no plan, and the others serve their shares of the rest
    of the traffic. Raises InputError where nothing can be decoded, or where nothing can be served
    with these roles."""
    live = _with_live_homes(network)
    if len(live.homes) == 1 or policy == "local":
        single = {}
        for home in live.homes:
            name, problem = home_name(home), hardware_for(policy, home.problem)
            plan = plan_for_nodes(problem, roles[name], rules, now_s, reason=reason)
            # Others that return later are to be planned together with this one.
            lost = problem.remotes and len(network.homes) > 1
            single[name] = replace(plan, together=(name,)) if lost else plan
        return single
    try:
        solved = solve_network(live)
    except InputError:
        # Together they cannot be served: some have no prefill node and no PrfaaS cluster. Their
        # nodes serve alone.
        names = tuple(sorted(home_name(home) for home in live.homes))
        return {
            home_name(home): replace(
                plan_for_nodes(home.problem, roles[home_name(home)], rules, now_s, reason=reason),
                together=names,
            )
            for home in live.homes
        }
    given: dict[ClusterId, dict[NodeId, Role]] = {}
    splits_differ = False
    for home in live.homes:
        name = home_name(home)
        assert len(roles[name]) == home.problem.local.pool.instances
        given[name], missing = fill_roles(roles[name], solved.home(name).n_prefill)
        splits_differ |= missing != 0
    if splits_differ:
        solved = solve_network(with_splits(live, {n: count_prefill(r) for n, r in given.items()}))
    made = {}
    for home in live.homes:
        name = home_name(home)
        plan = plan_of_home(solved, home.problem, given[name], rules, reason=reason)
        made[name] = replace(plan, made_s=now_s)
    return made


def _with_live_homes(network: NetworkProblem) -> NetworkProblem:
    """The network without the PD clusters that have no instance."""
    live = [home for home in network.homes if home.problem.local.pool.instances]
    if not live:
        names = ", ".join(home.cluster for home in network.homes)
        raise InputError(
            "no PD cluster has a live node, so that no request can be decoded",
            where=names,
            fix="start a node of one of these PD clusters",
        )
    whole = sum(home.share for home in live)
    # Without any traffic at these PD clusters, each of them is as important as the others.
    shares = [home.share / whole if whole > 0 else 1 / len(live) for home in live]
    return NetworkProblem(
        tuple(replace(home, share=share) for home, share in zip(live, shares, strict=True))
    )


def plan_of_home(
    solved: NetworkPlan,
    problem: Problem,
    roles: Mapping[NodeId, Role],
    rules: ReplanSection,
    *,
    reason: str = _STATED,
) -> Plan:
    """One PD cluster's part of the plan."""
    name = problem.local.pool.cluster
    decided = solved.home(name)
    shares = {flow.source: flow.share for flow in solved.flows_to(name)}
    threshold = decided.threshold_tokens
    if threshold is None:  # one side prefills everything
        threshold = problem.workload.max_new_tokens if decided.n_prefill else 0
    return Plan(
        rules=rules,
        problem=problem,
        threshold_tokens=threshold,
        roles=dict(roles),
        # A cluster without a live node has no flow.
        shares=tuple(shares.get(remote.pool.cluster, 0.0) for remote in problem.remotes),
        capacity_rps=decided.rate_rps,
        made_s=0.0,
        converted_s={},
        reason=reason,
        together=tuple(sorted(ClusterId(home.cluster) for home in solved.homes)),
    )


def solve_network(network: NetworkProblem) -> NetworkPlan:
    """Solves under the exact reading, as every plan that routing follows. PrfaaS clusters without
    an instance have no flows."""
    live = network.with_remotes(lambda _, remote: remote if remote.pool.instances else None)
    return NetworkPlanner("exact").solve(live)


def planned_rps(network: NetworkProblem, policy: str) -> float:
    """The total rate that all PD clusters together are planned to serve, at the stated shares of
    traffic."""
    plans = first_plans(network, _any_nodes(network), ReplanSection(), policy)
    return min(plans[home_name(home)].capacity_rps / home.share for home in network.homes)


def home_name(home: Home) -> ClusterId:
    return ClusterId(home.cluster)


def as_network(problem: Problem | NetworkProblem) -> NetworkProblem:
    """One PD cluster as the special case of several."""
    if isinstance(problem, NetworkProblem):
        return problem
    return NetworkProblem((Home(1.0, problem),))


def count_prefill(roles: Mapping[NodeId, Role]) -> int:
    return sum(role == "prefill" for role in roles.values())


def with_splits(network: NetworkProblem, prefills: Mapping[ClusterId, int]) -> NetworkProblem:
    """The network with given numbers of prefill instances. At least one instance decodes."""

    def fixed(problem: Problem) -> Problem:
        pool = problem.local.pool
        split = max(min(prefills[ClusterId(pool.cluster)], pool.instances - 1), 0)
        return replace(problem, local=replace(problem.local, fixed_prefill=split))

    return network.with_homes(fixed)


def _any_nodes(network: NetworkProblem) -> dict[ClusterId, list[NodeId]]:
    return {
        home_name(home): [
            NodeId(f"{home.cluster}-{number}")
            for number in range(home.problem.local.pool.instances)
        ]
        for home in network.homes
    }
