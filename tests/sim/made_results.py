"""Results made by hand, for what is computed from them."""

from __future__ import annotations

import numpy as np

from prfaas.config.deployment import ReplanSection
from prfaas.scheduler.plan import first_plan
from prfaas.sim.config import node_names
from prfaas.sim.results.result import (
    ClusterName,
    PlanChange,
    Requests,
    Result,
    RoleUse,
    Series,
    StageBacklog,
    TimelineSpan,
)
from prfaas.types import ClusterId
from tests.planner.builders import problem

LINK = (ClusterId("far"), ClusterId("near"))


def result(
    ttft_s: list[float],
    *,
    wait_s: float = 0.0,
    slot_wait_s: float = 0.0,
    growth: float = 0.0,
    egress_bits: list[float] | None = None,
    spans: tuple[TimelineSpan, ...] = (),
    plans: int = 1,
) -> Result:
    """One request a second, 11 tokens at 20 ms each; the first tenth is not measured."""
    count = len(ttft_s)
    arrival = np.arange(count, dtype=float)
    first = arrival + np.array(ttft_s)
    given = problem()
    pool = given.local.pool
    plan = first_plan(given, node_names(pool.cluster, pool.instances), ReplanSection())
    bits = np.array(egress_bits or [0.0] * count)
    return Result(
        requests=Requests(
            arrival_s=arrival,
            first_token_s=first,
            last_token_s=first + 10 * 0.020,
            wait_s=np.full(count, wait_s),
            prefill_s=np.full(count, 0.1),
            transfer_s=np.zeros(count),
            slot_wait_s=np.full(count, slot_wait_s),
            prompt_tokens=np.full(count, 1000),
            output_tokens=np.full(count, 11),
            hit_tokens=np.full(count, 250),
            offloaded=np.arange(count) % 4 == 0,
            retries=np.zeros(count, dtype=np.int64),
            home=np.zeros(count, dtype=np.int64),
            prefill_cluster=(np.arange(count) % 4 == 0).astype(np.int64),
            decode_cluster=np.zeros(count, dtype=np.int64),
        ),
        clusters=(ClusterName("near", "pd"), ClusterName("far", "prfaas")),
        link_bps={LINK: 1e9},
        series=Series(1.0, {LINK: bits}, {"far": np.zeros(count)}, np.zeros(len(bits))),
        roles=(RoleUse("far", 0.5), RoleUse("decode", 0.25)),
        stages=(StageBacklog("far", growth), StageBacklog("pd_d", growth / 2)),
        plans=tuple(PlanChange(10.0 * k, plan) for k in range(plans)),
        copies=3,
        copied_bytes=2_000_000_000,
        alone=5,
        alone_s=2.5,
        spans=spans,
        window_s=(count / 10, float(count - 1)),
    )
