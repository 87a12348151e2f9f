"""Long-term re-optimisation: threshold and split follow the traffic (paper, section 3.4.3).

`replan(window, plan)` is pure. It fits the newest stretch of steady traffic, solves for threshold
and split, and moves towards them. The threshold moves as soon as it is off by more than chance
explains. A node's role changes only when the gain is worth a drain and the traffic is steady.
Queues are not considered: they lag the traffic and swing with every burst, and bursts belong to the
short-term loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from prfaas.config.deployment import ReplanSection
from prfaas.planner.alone import SPLIT_SHARE
from prfaas.planner.workload import Workload
from prfaas.scheduler.long_term.traffic import TrafficWindow
from prfaas.scheduler.plan import Plan, Role, Solver, with_instances, with_paces
from prfaas.types import NodeId

Array = npt.NDArray[np.float64]

# Critical value of the two-sample Kolmogorov-Smirnov test at a level of one in a thousand.
_DIFFERS = math.sqrt(-math.log(0.001 / 2) / 2)
THRESHOLD_STEP = 0.02  # a threshold that is off by a smaller share makes no new plan
_QUANTILES = 64  # fine enough for blocks of some hundred requests


def replan(window: TrafficWindow, plan: Plan) -> Plan | None:
    """A better plan, or None to keep the present one. At most an eighth of the PD nodes change
    their role at a time, and no node changes twice within `dwell_s`."""
    if not window.live_local:
        return None
    rules = plan.rules
    problem = with_instances(plan.problem, window.live_remotes, len(window.live_local))
    hardware_changed = problem.pools != plan.problem.pools
    before, problem = problem, with_paces(problem, window.paces)
    pace_changed = problem.pools != before.pools
    blocks, fitted = steady_traffic(window, rules)
    if fitted is not None:
        problem = replace(problem, workload=fitted)
    elif not hardware_changed:
        return None
    requests = math.inf if fitted is None else len(fitted.new)
    roles = {node: role for node, role in plan.roles.items() if node in window.live_local}
    n_prefill = sum(role == "prefill" for role in roles.values())
    solver = Solver(problem)
    here = solver.best(n_prefill)

    # Traffic that has just changed may change further, and a node that has just left may return. So
    # roles wait until two blocks agree, and until the replanning after a change of hardware.
    step = 0
    if blocks >= 2 and not hardware_changed:
        best = solver.best()
        worth = max(rules.min_gain, 1 / math.sqrt(requests))
        # Nodes that serve alone serve as much as any split, but a split that comes close to it
        # keeps the speed of the output.
        to_split = here.alone and not best.alone
        if to_split or best.capacity_rps > here.capacity_rps * (1 + worth):
            step = best.n_prefill - n_prefill
    changed = convert_roles(roles, step, plan, window.now_s)
    if changed:
        after = solver.best(sum(role == "prefill" for role in (roles | changed).values()))
        if here.alone and after.capacity_rps < SPLIT_SHARE * here.capacity_rps:
            changed = {}  # a split with so few prefill nodes serves less
        else:
            roles, here = roles | changed, after

    off = abs(here.threshold_tokens - plan.threshold_tokens) / max(plan.threshold_tokens, 1)
    live = any(remote.pool.instances for remote in problem.remotes)
    moved = live and off > max(THRESHOLD_STEP, 1 / math.sqrt(requests))
    if not (changed or moved or hardware_changed):
        return None
    return Plan(
        rules=rules,
        problem=problem,
        threshold_tokens=here.threshold_tokens,
        roles={**plan.roles, **roles},
        shares=here.shares,
        capacity_rps=here.capacity_rps,
        made_s=window.now_s,
        converted_s={**plan.converted_s, **dict.fromkeys(changed, window.now_s)},
        reason=describe_change(changed, moved, hardware_changed, pace_changed),
        together=plan.together,
    )


# Fitting -----------------------------------------------------------------------------------------


def steady_traffic(window: TrafficWindow, rules: ReplanSection) -> tuple[int, Workload | None]:
    """The number of newest blocks of requests that look alike, and the traffic of all of them."""
    warm = int(np.searchsorted(window.at_s, window.started_s + rules.warmup_s))
    total = len(window.at_s) - warm
    size = rules.block_requests
    if total < size:
        return 0, None
    count = total // size
    chosen = slice(len(window.at_s) - count * size, None)
    alike = _like_newest(window.new_tokens[chosen], size)
    alike &= _like_newest(window.output_tokens[chosen], size)
    different = np.flatnonzero(~alike)
    blocks = count - 1 - int(different[-1]) if different.size else count
    return blocks, _fit(window, slice(len(window.at_s) - blocks * size, None))


def _like_newest(values: Array, size: int) -> npt.NDArray[np.bool_]:
    """For every block of `size` values, whether it and the last block may come from the same
    distribution, by the Kolmogorov-Smirnov distance at quantiles of the last block."""
    edges = np.quantile(values[-size:], np.linspace(0, 1, _QUANTILES))
    place = np.searchsorted(edges, values)
    count = len(values) // size
    block = np.repeat(np.arange(count), size)
    bins = len(edges) + 1
    counts = np.bincount(block * bins + place, minlength=count * bins).reshape(count, bins)
    below = np.cumsum(counts, axis=1) / size
    distance = np.abs(below - below[-1]).max(axis=1)
    return np.asarray(distance <= _DIFFERS * math.sqrt(2 / size))


def _fit(window: TrafficWindow, chosen: slice) -> Workload:
    """The requests themselves with equal weights, as the planner treats a trace."""
    order = np.argsort(window.new_tokens[chosen], kind="stable")
    output = window.output_tokens[chosen]
    mean = float(output.mean())
    return Workload(
        new=window.new_tokens[chosen][order],
        cached=window.cached_tokens[chosen][order],
        weight=np.full(len(output), 1 / len(output)),
        output_tokens=mean,
        output_cv2=float(output.var()) / mean**2,
    )


# Roles -------------------------------------------------------------------------------------------


def convert_roles(
    roles: Mapping[NodeId, Role], step: int, plan: Plan, now_s: float
) -> dict[NodeId, Role]:
    """New roles for up to `step` nodes (negative: towards decode). Nodes whose latest change is
    oldest come first."""
    if step == 0:
        return {}
    old: Role = "decode" if step > 0 else "prefill"
    new: Role = "prefill" if step > 0 else "decode"
    last = {node: plan.converted_s.get(node, -math.inf) for node in roles}
    rested = [n for n in roles if roles[n] == old and last[n] + plan.rules.dwell_s <= now_s]
    rested.sort(key=lambda node: last[node])  # the sort is stable: equals keep their order
    at_once = max(1, len(roles) // 8)
    return dict.fromkeys(rested[: min(abs(step), at_once)], new)


def describe_change(
    changed: Mapping[NodeId, Role], moved: bool, hardware_changed: bool, pace_changed: bool
) -> str:
    parts = [f"{node} to {role}" for node, role in changed.items()]
    if moved:
        also = " and the observed pace of prefills" if pace_changed else ""
        parts.append(f"threshold follows the traffic{also}")
    if hardware_changed:
        parts.append("nodes came or went")
    return ", ".join(parts)
