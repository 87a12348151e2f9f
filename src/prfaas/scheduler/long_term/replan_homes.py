"""Long-term re-optimisation of several PD clusters that share PrfaaS clusters.

The same rules as for one PD cluster (`replan`), but the planner solves all of them together, for
the lengths and the shares of traffic that each has observed. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from prfaas.errors import InputError
from prfaas.planner.network.plan import NetworkPlan
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import (
    count_prefill,
    plan_of_home,
    solve_network,
    with_splits,
)
from prfaas.scheduler.long_term.replan import (
    THRESHOLD_STEP,
    convert_roles,
    describe_change,
    replan,
    steady_traffic,
)
from prfaas.scheduler.long_term.traffic import TrafficWindow
from prfaas.scheduler.plan import Plan, Role, with_instances, with_paces
from prfaas.types import ClusterId, NodeId

_LEAST_SHARE = 1e-3  # of a PD cluster without traffic: it keeps a plan
# Flows move to another PrfaaS cluster when a share is off by more than this, of all offloaded
# requests of the PD cluster.
_SHARE_STEP = 0.02


class _Observed(NamedTuple):
    """A live PD cluster with its observed traffic."""

    problem: Problem
    roles: Mapping[NodeId, Role]
    requests: float  # that the lengths come from; infinite: those of the plan are kept
    steady: bool  # two blocks of requests are alike
    hardware_changed: bool
    pace_changed: bool

    @property
    def n_prefill(self) -> int:
        return count_prefill(self.roles)


def replan_homes(
    windows: Mapping[ClusterId, TrafficWindow],
    plans: Mapping[ClusterId, Plan],
    stated_shares: Mapping[ClusterId, float] | None = None,
) -> dict[ClusterId, Plan]:
    """Better plans, of the PD clusters whose plan changes. A PD cluster without a live node keeps
    its plan, and the others are planned without it until it returns. `stated_shares`: of traffic,
    as the deployment file states them. They count until a PD cluster has a block of requests, as
    the lengths of the present plan do."""
    if len(plans) == 1 or not any(plan.problem.remotes for plan in plans.values()):
        found = {name: replan(windows[name], plan) for name, plan in plans.items()}
        return {name: plan for name, plan in found.items() if plan is not None}
    seen = {
        name: _observe(window, plans[name]) for name, window in windows.items() if window.live_local
    }
    if not seen:
        return {}
    live = tuple(sorted(seen))
    # A PD cluster that is lost or returns is a change of hardware for all that share with it.
    for name, home in seen.items():
        if plans[name].together not in ((), live):
            seen[name] = home._replace(hardware_changed=True)
    hardware_changed = any(home.hardware_changed for home in seen.values())
    fitted = [home.requests for home in seen.values() if math.isfinite(home.requests)]
    if not fitted and not hardware_changed:
        return {}
    noise = 1 / math.sqrt(min(fitted)) if fitted else 0.0
    network = _network(seen, windows, None if fitted else stated_shares)
    splits = {name: home.n_prefill for name, home in seen.items()}
    try:
        here = solve_network(with_splits(network, splits))
    except InputError:
        here = None  # with these roles nothing can be served: the best roles are found below
    roles = {name: dict(home.roles) for name, home in seen.items()}
    changed: dict[ClusterId, dict[NodeId, Role]] = {name: {} for name in seen}
    # As for one PD cluster, roles wait for steady traffic and hardware.
    steady = all(home.steady for home in seen.values()) and not hardware_changed
    if steady or here is None:
        try:
            best = solve_network(network)
        except InputError:
            return {}
        worth = max(max(plans[name].rules.min_gain for name in seen), noise)
        if here is None or best.rate_rps > here.rate_rps * (1 + worth):
            for name, home in seen.items():
                step = best.home(name).n_prefill - home.n_prefill
                now_s = windows[name].now_s
                changed[name] = convert_roles(home.roles, step, plans[name], now_s)
                roles[name] |= changed[name]
    if any(changed.values()):
        splits = {name: count_prefill(given) for name, given in roles.items()}
        try:
            here = solve_network(with_splits(network, splits))
        except InputError:
            return {}
    if here is None:
        return {}
    new = {}
    for name, home in seen.items():
        plan = _changed_plan(here, home, plans[name], roles[name], changed[name], windows[name])
        if plan is not None:
            new[name] = plan
    return new


def _observe(window: TrafficWindow, plan: Plan) -> _Observed:
    problem = with_instances(plan.problem, window.live_remotes, len(window.live_local))
    hardware_changed = problem.pools != plan.problem.pools
    before, problem = problem, with_paces(problem, window.paces)
    pace_changed = problem.pools != before.pools
    blocks, fitted = steady_traffic(window, plan.rules)
    requests = math.inf
    if fitted is not None:
        problem = replace(problem, workload=fitted)
        requests = len(fitted.new)
    roles = {node: role for node, role in plan.roles.items() if node in window.live_local}
    return _Observed(problem, roles, requests, blocks >= 2, hardware_changed, pace_changed)


def _network(
    seen: Mapping[ClusterId, _Observed],
    windows: Mapping[ClusterId, TrafficWindow],
    stated_shares: Mapping[ClusterId, float] | None,
) -> NetworkProblem:
    counts: dict[ClusterId, float]
    if stated_shares is None:
        counts = {name: len(windows[name].at_s) for name in seen}
    else:
        counts = {name: stated_shares[name] for name in seen}
    total = sum(counts.values()) or 1.0
    shares = {name: max(count / total, _LEAST_SHARE) for name, count in counts.items()}
    whole = sum(shares.values())
    return NetworkProblem(
        tuple(Home(shares[name] / whole, home.problem) for name, home in seen.items())
    )


def _changed_plan(
    solved: NetworkPlan,
    home: _Observed,
    plan: Plan,
    roles: Mapping[NodeId, Role],
    changed: Mapping[NodeId, Role],
    window: TrafficWindow,
) -> Plan | None:
    """The new plan of a PD cluster. None where it does not differ by more than chance explains."""
    made = plan_of_home(solved, home.problem, roles, plan.rules)
    noise = 1 / math.sqrt(home.requests)
    off = abs(made.threshold_tokens - plan.threshold_tokens) / max(plan.threshold_tokens, 1)
    moved = bool(home.problem.remotes) and off > max(THRESHOLD_STEP, noise)
    flows = zip(made.shares, plan.shares, strict=True)
    moved |= any(abs(one - other) > max(_SHARE_STEP, noise) for one, other in flows)
    if not (changed or moved or home.hardware_changed):
        return None
    return replace(
        made,
        roles={**plan.roles, **roles},
        made_s=window.now_s,
        converted_s={**plan.converted_s, **dict.fromkeys(changed, window.now_s)},
        reason=describe_change(changed, moved, home.hardware_changed, home.pace_changed),
    )
