"""Plans of several PD clusters that share PrfaaS clusters: one `Plan` for each of them.

The planner solves all of them together (`planner.network`). One PD cluster is the special case that
`plan.first_plan` solves. Pure; this module does not know requests or queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prfaas.config.deployment import ReplanSection
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import Plan, Role, first_plan, hardware_for
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
    problems = {home_name(home): hardware_for(policy, home.problem) for home in network.homes}
    if len(problems) == 1 or policy == "local":
        return {name: first_plan(problem, nodes[name], rules) for name, problem in problems.items()}
    solved = solve_network(network)
    plans = {}
    for name, problem in problems.items():
        decided = solved.home(name)
        roles: dict[NodeId, Role] = {
            node: "prefill" if number < decided.n_prefill else "decode"
            for number, node in enumerate(nodes[name])
        }
        plans[name] = plan_of_home(solved, problem, roles, rules)
    return plans


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


def with_splits(network: NetworkProblem, prefills: Mapping[str, int]) -> NetworkProblem:
    """The network with given numbers of prefill instances. At least one instance decodes."""

    def fixed(problem: Problem) -> Problem:
        pool = problem.local.pool
        split = max(min(prefills[pool.cluster], pool.instances - 1), 0)
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
