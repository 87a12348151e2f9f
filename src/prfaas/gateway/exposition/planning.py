"""Metrics of the plans in force: what they say, and whether the deployment follows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import gauge
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.state import ShortTermState
from prfaas.types import ClusterId


def plan_metrics(
    homes: Iterable[ClusterId],
    plans: Mapping[ClusterId, Plan],
    states: Mapping[ClusterId, ShortTermState],
    pending: Mapping[ClusterId, int],
    *,
    plans_here: bool,
) -> Iterator[Metric]:
    """`pending`: nodes of each PD cluster whose role is not that of the plan. `plans_here`: this
    gateway makes the plans."""
    yield gauge(
        "planner",
        "Whether this gateway makes the plans: 1 or 0. The sum over the gateways of a deployment "
        "is 1.",
        value=plans_here,
    )
    in_force = gauge(
        "plan_in_force", "Whether the PD cluster has a plan: 1, or 0 before its first.", "cluster"
    )
    share = gauge(
        "plan_offloaded_ratio",
        "The share of the planned requests that are longer than the plan's threshold.",
        "cluster",
    )
    factor = gauge(
        "threshold_factor", "The factor of the plan's threshold that is in force now.", "cluster"
    )
    threshold = gauge(
        "threshold_tokens",
        "The threshold that is in force now: the plan's, times the factor. The policy `paper` "
        "offloads requests with more uncached tokens.",
        "cluster",
    )
    waiting = gauge(
        "roles_pending", "Nodes of the PD cluster whose role is not that of its plan.", "cluster"
    )
    for home in homes:
        plan, state = plans.get(home), states.get(home)
        in_force.add_metric([home], plan is not None)
        waiting.add_metric([home], pending.get(home, 0))
        if state is not None:
            factor.add_metric([home], state.threshold_factor)
        if plan is not None:
            share.add_metric([home], plan.offloaded_share)
            if state is not None:
                threshold.add_metric([home], plan.threshold_tokens * state.threshold_factor)
    yield from (in_force, share, factor, threshold, waiting)
