"""History of the long-term loop: plans that were made, advice that is not followed, role changes.

Bookkeeping only: the long-term loop writes it; status and metrics read it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import counter, gauge
from prfaas.scheduler.plan import Plan, Role
from prfaas.service.logging import with_fields
from prfaas.types import ClusterId, NodeId

log = logging.getLogger(__name__)

KEPT = 64  # plans, the latest


class Conversion(NamedTuple):
    at_s: float
    node: NodeId
    role: Role


class MadePlan(NamedTuple):
    home: ClusterId
    plan: Plan


class PlanHistory:
    def __init__(self, *, advises: bool) -> None:
        self.advises = advises  # plans after the first are logged, not followed
        self.plans: deque[MadePlan] = deque(maxlen=KEPT)
        self.conversions: deque[Conversion] = deque(maxlen=KEPT)
        self.advice: Mapping[ClusterId, Plan] = {}  # the plans that the loop would follow
        self._made = 0
        self._no_plan = ""  # why the nodes that are left have no plan; empty: they have one
        self._converted: Counter[Role] = Counter({"prefill": 0, "decode": 0})

    def record_plan(self, home: ClusterId, plan: Plan) -> None:
        self.plans.append(MadePlan(home, plan))
        self._made += 1
        self._no_plan = ""
        log.info("new plan of %s: %s", home, describe(plan), extra=_fields("plan", home, plan))

    def record_no_plan(self, reason: str) -> None:
        """No plan exists for the nodes that are left, and the one before stays in force. The same
        reason is logged once."""
        if reason != self._no_plan:
            self._no_plan = reason
            fields = with_fields(event="no plan", reason=reason)
            log.warning("no plan for the nodes that are left: %s", reason, extra=fields)

    def record_advice(self, advice: Mapping[ClusterId, Plan]) -> None:
        """The plan of a PD cluster without advice is good. The same advice is logged once."""
        before, self.advice = self.advice, advice
        for home in before.keys() - advice.keys():
            fields = with_fields(event="advice withdrawn", home=home)
            log.info("advice withdrawn: the plan in force of %s is good", home, extra=fields)
        for home, plan in advice.items():
            if home not in before or _essence(plan) != _essence(before[home]):
                fields = _fields("advice", home, plan)
                log.info("advice for %s, not followed: %s", home, describe(plan), extra=fields)

    def record_conversion(self, node: NodeId, role: Role, at_s: float) -> None:
        """The node has drained and has its new role."""
        self.conversions.append(Conversion(at_s, node, role))
        self._converted[role] += 1
        fields = with_fields(event="conversion", node=node, role=role)
        log.info("%s: its role is %s now", node, role, extra=fields)

    def metrics(self, in_force: Mapping[ClusterId, Plan]) -> Iterator[Metric]:
        yield counter("plans", "Plans that this gateway has made or followed.", value=self._made)
        converted = counter(
            "conversions", "Changes of a node's role that were completed, by the new role.", "role"
        )
        for role, count in self._converted.items():
            converted.add_metric([role], count)
        yield converted
        yield gauge(
            "plan_outdated",
            "Whether no plan exists for the nodes that are left, so that an earlier plan stays in "
            "force: 1 or 0.",
            value=bool(self._no_plan),
        )
        yield from _gauges(in_force, "plan", "the plan in force")
        yield from _gauges(self.advice, "advice", "the advised plan, absent without advice")


def describe(plan: Plan) -> str:
    return (
        f"threshold {plan.threshold_tokens} tokens, {plan.n_prefill} prefill and "
        f"{plan.n_decode} decode nodes ({plan.reason})"
    )


def _fields(event: str, home: ClusterId, plan: Plan) -> dict[str, Any]:
    return with_fields(
        event=event,
        home=home,
        threshold_tokens=plan.threshold_tokens,
        prefill_nodes=plan.n_prefill,
        decode_nodes=plan.n_decode,
        reason=plan.reason,
    )


def _essence(plan: Plan) -> tuple[object, ...]:
    """What an operator would act on."""
    return plan.threshold_tokens, dict(plan.roles)


def _gauges(plans: Mapping[ClusterId, Plan], name: str, which: str) -> Iterator[Metric]:
    threshold = gauge(
        f"{name}_threshold_tokens",
        f"The threshold of {which}: uncached tokens of a request.",
        "cluster",
    )
    capacity = gauge(
        f"{name}_capacity_requests_per_second",
        f"The requests per second that the PD cluster can serve with {which}.",
        "cluster",
    )
    nodes = gauge(
        f"{name}_nodes", f"Nodes of the PD cluster by their role in {which}.", "cluster", "role"
    )
    for home, plan in plans.items():
        threshold.add_metric([home], plan.threshold_tokens)
        capacity.add_metric([home], plan.capacity_rps)
        nodes.add_metric([home, "prefill"], plan.n_prefill)
        nodes.add_metric([home, "decode"], plan.n_decode)
    yield from (threshold, capacity, nodes)
