"""The long-term loop's book: plans that were made, advice that is not followed, roles that changed.

Bookkeeping only: `planning` writes it; state and metrics read it.
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
        self.advises = advises  # plans behind the first are said, not followed
        self.plans: deque[Plan] = deque(maxlen=KEPT)
        self.conversions: deque[Conversion] = deque(maxlen=KEPT)
        self.advice: Plan | None = None  # what would be done
        self._made = 0
        self._converted: Counter[Role] = Counter({"prefill": 0, "decode": 0})

    def followed(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._made += 1
        log.info("plan: %s", said(plan))

    def advised(self, plan: Plan | None) -> None:
        """None: the plan that is followed is good. Said once, however often it is found again."""
        before, self.advice = self.advice, plan
        if plan is None:
            if before is not None:
                log.info("advice: none any more")
        elif before is None or _wish(plan) != _wish(before):
            log.info("advice, not followed: %s", said(plan))

    def converted(self, node: NodeId, role: Role, at_s: float) -> None:
        """It has drained, and does the other work from now on."""
        self.conversions.append(Conversion(at_s, node, role))
        self._converted[role] += 1
        log.info("%s: converted, %s from now on", node, role)

    def metrics(self, plan: Plan | None) -> Iterator[Metric]:
        plans = CounterMetricFamily("prfaas_gateway_plans", "Plans made.")
        plans.add_metric([], self._made)
        converted = CounterMetricFamily(
            "prfaas_gateway_conversions", "Changes of a node's role, done.", labels=["role"]
        )
        for role, count in self._converted.items():
            converted.add_metric([role], count)
        yield from (plans, converted)
        for wish, name, says in (
            (plan, "plan", "Of the plan that is followed."),
            (self.advice, "advice", "Of what would be planned; absent: nothing else."),
        ):
            yield from _gauges(wish, f"prfaas_gateway_{name}", says)


def said(plan: Plan) -> str:
    return (
        f"threshold {plan.threshold_tokens} tokens, {plan.n_prefill} prefill and "
        f"{plan.n_decode} decode nodes ({plan.reason})"
    )


def _wish(plan: Plan) -> tuple[object, ...]:
    return plan.threshold_tokens, dict(plan.roles)


def _gauges(plan: Plan | None, name: str, says: str) -> Iterator[Metric]:
    threshold = GaugeMetricFamily(f"{name}_threshold_tokens", says, labels=[])
    capacity = GaugeMetricFamily(f"{name}_capacity_rps", says, labels=[])
    nodes = GaugeMetricFamily(f"{name}_nodes", says, labels=["role"])
    if plan is not None:
        threshold.add_metric([], plan.threshold_tokens)
        capacity.add_metric([], plan.capacity_rps)
        nodes.add_metric(["prefill"], plan.n_prefill)
        nodes.add_metric(["decode"], plan.n_decode)
    yield from (threshold, capacity, nodes)
