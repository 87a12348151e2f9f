"""Plans as the kvds keep them for the gateways (`kept_plans.py`). Pure.

A message has no problem: the receiver has its own, from the same deployment file, and takes only
the live instances from the message. It has no times either, because clocks of two hosts have
nothing in common: ages become times on the receiver's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prfaas.config.deployment import ReplanSection
from prfaas.contracts.gateway_api import (
    MAX_AGE_S,
    MAX_AMOUNT,
    MAX_COUNT,
    MAX_REASON_CHARS,
    HomePlan,
    SharedPlan,
)
from prfaas.errors import InputError
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import Plan, with_instances
from prfaas.types import ClusterId, NodeId

MOST_INSTANCES = 1 << 16  # of one cluster; the planner tries every split of them
_ROUNDING = 1e-6  # of shares that sum to 1


def encode_plans(
    plans: Mapping[ClusterId, Plan],
    epoch: int,
    number: int,
    draining: Iterable[NodeId],
    now_s: float,
    *,
    stated: str = "",
) -> SharedPlan:
    homes = {str(name): _encode(plan, now_s) for name, plan in plans.items()}
    return SharedPlan(epoch, number, homes, tuple(draining), stated)


def decode_plans(
    shared: SharedPlan,
    base: Mapping[ClusterId, Problem],
    rules: ReplanSection,
    now_s: float,
) -> dict[ClusterId, Plan]:
    """The plans of the homes in `base`, which are the receiver's own problems. `now_s`: when the
    message was made. Homes and clusters that the receiver does not have are ignored, and so is a
    home without a live instance and without roles. Raises `InputError` when a value is impossible.
    """
    plans = {}
    for name, problem in base.items():
        found = shared.homes.get(name)
        if found is not None and (found.roles or found.instances.get(name, 0)):
            plans[name] = _decode(found, problem, rules, now_s, f"homes.{name}")
    return plans


def _encode(plan: Plan, now_s: float) -> HomePlan:
    remotes = [remote.pool.cluster for remote in plan.problem.remotes]
    return HomePlan(
        threshold_tokens=plan.threshold_tokens,
        # A share of 1 may be a little more after its division.
        shares={
            name: _within(share, 1.0) for name, share in zip(remotes, plan.shares, strict=True)
        },
        roles={str(node): role for node, role in plan.roles.items()},
        instances={pool.cluster: pool.instances for pool in plan.problem.pools},
        capacity_rps=_within(plan.capacity_rps, MAX_AMOUNT),
        age_s=_within(now_s - plan.made_s, MAX_AGE_S),
        reason=plan.reason[:MAX_REASON_CHARS],
        converted_age_s={
            str(node): _within(now_s - at_s, MAX_AGE_S) for node, at_s in plan.converted_s.items()
        },
        together=tuple(plan.together),
    )


def _decode(
    home: HomePlan, problem: Problem, rules: ReplanSection, now_s: float, where: str
) -> Plan:
    live = {
        pool.cluster: int(
            _checked(
                home.instances.get(pool.cluster, 0),
                MOST_INSTANCES,
                f"{where}.instances.{pool.cluster}",
            )
        )
        for pool in problem.pools
    }
    remotes = [remote.pool.cluster for remote in problem.remotes]
    shares = tuple(
        _checked(home.shares.get(name, 0.0), 1.0, f"{where}.shares.{name}") for name in remotes
    )
    if sum(shares) > 1 + _ROUNDING:
        raise InputError(f"they sum to {sum(shares):g}, which is above 1", where=f"{where}.shares")
    age_s = _checked(home.age_s, MAX_AGE_S, f"{where}.age_s")
    converted_s = {
        NodeId(node): now_s - _checked(age_s, MAX_AGE_S, f"{where}.converted_age_s")
        for node, age_s in home.converted_age_s.items()
    }
    return Plan(
        rules=rules,
        problem=with_instances(
            problem, [live[name] for name in remotes], live[problem.local.pool.cluster]
        ),
        threshold_tokens=int(
            _checked(home.threshold_tokens, MAX_COUNT, f"{where}.threshold_tokens")
        ),
        roles={NodeId(node): role for node, role in home.roles.items()},
        shares=shares,
        capacity_rps=_checked(home.capacity_rps, MAX_AMOUNT, f"{where}.capacity_rps"),
        made_s=now_s - age_s,
        converted_s=converted_s,
        reason=home.reason,
        together=tuple(ClusterId(name) for name in home.together),
    )


def _within(value: float, most: float) -> float:
    """A value of this process as the message may have it."""
    assert not math.isnan(value)
    return min(max(value, 0.0), most)


def _checked(value: float, most: float, where: str) -> float:
    """A value of another process. Not a number is refused, too."""
    if not 0 <= value <= most:
        raise InputError(f"{value!r} is not between 0 and {most:g}", where=where)
    return value
