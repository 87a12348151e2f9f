"""History of the long-term loop: plans that were made, advice that is not followed, role changes.

Bookkeeping only: the long-term loop writes it; status and metrics read it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prfaas.scheduler.plan import Plan, Role
from prfaas.types import NodeId

log = logging.getLogger(__name__)

KEPT = 64  # plans, the latest


class Conversion(NamedTuple):
    at_s: float
    node: NodeId
    role: Role


class PlanHistory:
    def __init__(self, *, advises: bool) -> None:
        self.advises = advises  # plans after the first are logged, not followed
        self.plans: deque[Plan] = deque(maxlen=KEPT)
        self.conversions: deque[Conversion] = deque(maxlen=KEPT)
        self.advice: Plan | None = None  # the plan that the loop would follow
        self._made = 0
        self._converted: Counter[Role] = Counter({"prefill": 0, "decode": 0})

    def record_plan(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._made += 1
        log.info("new plan: %s", describe(plan))

    def record_advice(self, plan: Plan | None) -> None:
        """None: the plan in force is good. The same advice is logged once."""
        before, self.advice = self.advice, plan
        if plan is None:
            if before is not None:
                log.info("advice withdrawn: the plan in force is good")
        elif before is None or _essence(plan) != _essence(before):
            log.info("advice, not followed: %s", describe(plan))

    def record_conversion(self, node: NodeId, role: Role, at_s: float) -> None:
        """The node has drained and has its new role."""
        self.conversions.append(Conversion(at_s, node, role))
        self._converted[role] += 1
        log.info("%s: its role is %s now", node, role)

    def metrics(self, plan: Plan | None) -> Iterator[Metric]:
        plans = CounterMetricFamily("prfaas_gateway_plans", "Plans made.")
        plans.add_metric([], self._made)
        converted = CounterMetricFamily(
            "prfaas_gateway_conversions", "Completed changes of a node's role.", labels=["role"]
        )
        for role, count in self._converted.items():
            converted.add_metric([role], count)
        yield from (plans, converted)
        yield from _gauges(plan, "plan", "the plan in force")
        yield from _gauges(self.advice, "advice", "the advised plan; absent without advice")


def describe(plan: Plan) -> str:
    return (
        f"threshold {plan.threshold_tokens} tokens, {plan.n_prefill} prefill and "
        f"{plan.n_decode} decode nodes ({plan.reason})"
    )


def _essence(plan: Plan) -> tuple[object, ...]:
    """What an operator would act on."""
    return plan.threshold_tokens, dict(plan.roles)


def _gauges(plan: Plan | None, name: str, which: str) -> Iterator[Metric]:
    prefix = f"prfaas_gateway_{name}"
    threshold = GaugeMetricFamily(
        f"{prefix}_threshold_tokens", f"Offloading threshold of {which}.", labels=[]
    )
    capacity = GaugeMetricFamily(
        f"{prefix}_capacity_rps", f"Requests per second that fit {which}.", labels=[]
    )
    nodes = GaugeMetricFamily(f"{prefix}_nodes", f"PD nodes by role in {which}.", labels=["role"])
    if plan is not None:
        threshold.add_metric([], plan.threshold_tokens)
        capacity.add_metric([], plan.capacity_rps)
        nodes.add_metric(["prefill"], plan.n_prefill)
        nodes.add_metric(["decode"], plan.n_decode)
    yield from (threshold, capacity, nodes)
