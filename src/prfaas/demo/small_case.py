"""A scaled-down deployment on emulated accelerators, and its baselines.

The demo's second part and `bench agree` serve, plan and simulate these deployments, one after
another on the same hosts. The problem is that of the scaled-down deployment, so that the plan and
the simulation are about the deployment that is served.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.demo.cpu_probe import probe_cpu
from prfaas.demo.disturbance import Counters, Disturbance, disturbance
from prfaas.demo.shared import RelayReader
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.children import Child
from prfaas.launch.commands import relayed_links
from prfaas.launch.deployment import RunningDeployment, RunningHosts, launched_gateway
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, Wan, prepare_launch
from prfaas.launch.services.hosts import EngineSpec
from prfaas.launch.step_timing import step_timing
from prfaas.measure.client import TIMED_OUT, connect
from prfaas.measure.open_loop import RequestResult, RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.planner.problem import Problem
from prfaas.sim.arrivals import Arrivals
from prfaas.studies.problem_files import Study

Array = npt.NDArray[np.float64]

AS_STATED = Wan()
WARM_SHARE = 0.2  # of the arrivals, which are not counted
NEVER_S = 1e9
SYSTEMS = ("prfaas_pd", "homogeneous", "naive")


@dataclass(frozen=True, slots=True)
class SmallCase:
    deployment: Deployment
    engines: EngineSpec
    problem: Problem


def small_case(
    deployment: Deployment,
    file: Path,
    folder: Path,
    scales: Scales,
    system: str = SYSTEMS[0],
    wan: Wan = AS_STATED,
) -> SmallCase:
    """`deployment` is the content of `file`. The files that engines read are written to
    `folder`."""
    baseline = None if system == SYSTEMS[0] else system
    made = prepare_launch(
        deployment, file, LaunchOptions("emulated", scales, baseline, wan), folder
    )
    problem = Study(folder / "deployment.toml", "exact").problem(made.deployment)
    return SmallCase(made.deployment, made.engines, problem)


def shared_hosts(cases: Mapping[str, SmallCase]) -> LaunchPlan:
    """Hosts for every case: their deployments run one after another on the same processes."""
    first = cases[SYSTEMS[0]]
    gpus = {
        cluster.name: max(
            c.gpus
            for one in cases.values()
            for c in one.deployment.clusters
            if c.name == cluster.name
        )
        for cluster in first.deployment.clusters
    }
    clusters = [
        msgspec.structs.replace(c, gpus=gpus[c.name], prefill=None, decode=None)
        for c in first.deployment.clusters
    ]
    deployment = msgspec.structs.replace(first.deployment, clusters=clusters)
    return LaunchPlan(deployment, first.engines)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results of one load on live processes."""

    outcomes: list[RequestResult]
    egress_bps: float  # over the WAN, until the last arrival
    disturbance: Disturbance  # until then, too


async def run_load(
    hosts: RunningHosts,
    deployment: Deployment,
    arrivals: Arrivals,
    relay_reader: RelayReader,
    *,
    first_tokens_s: float = 0.0,
) -> LoadResult:
    """Starts a gateway for the hosts and sends it the arrivals. Requests that have not ended at the
    last arrival are cancelled, and are not counted. With `first_tokens_s` they are cancelled when
    each of them has a first token, and at most this many seconds later; a request without a first
    token is then lost."""
    clock = MonotonicClock()
    (link,) = relayed_links(hosts.deployment)
    relay = hosts.children.named(link.name)
    async with (
        launched_gateway(hosts, deployment) as live,
        connect(live.gateway_url, clock) as target,
    ):
        assert target.model is not None
        ask = RequestTemplate(target.model, salt=secrets.token_hex(8))
        until_s = float(arrivals.at_s[-1])
        before = await _counters(live, relay, relay_reader)
        load = asyncio.create_task(
            offer_load(
                target,
                arrivals,
                ask,
                PromptGenerator(),
                clock,
                give_up_s=until_s,
                first_tokens_s=first_tokens_s,
            )
        )
        try:
            async with probe_cpu() as probe:
                await asyncio.sleep(until_s)
            after = await _counters(live, relay, relay_reader)
            outcomes = await load
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    carried_bytes = after.relay.to_target_bytes - before.relay.to_target_bytes
    late_s = float(np.mean([max(0.0, one.late_s) for one in outcomes]))
    disturbed = disturbance(before, after, late_s, probe.mean_late_s)
    return LoadResult(outcomes, carried_bytes * 8 / until_s, disturbed)


async def _counters(
    live: RunningDeployment, relay: Child[Any], relay_reader: RelayReader
) -> Counters:
    engines = await step_timing(live.http, live.hosts.engine_urls.values())
    return Counters(engines, await relay_reader.stats(relay))


@dataclass(frozen=True, slots=True)
class FirstTokenStats:
    """First tokens of one run, in seconds of the original deployment (not scaled down)."""

    counted: int
    rps: float
    ttft_mean_s: float
    ttft_p90_s: float


def counted_window_s(arrival_s: Array) -> tuple[float, float]:
    """From the end of the warm-up to the last arrival."""
    return float(arrival_s[int(len(arrival_s) * WARM_SHARE)]), float(arrival_s[-1])


def first_token_stats(
    arrival_s: Array,
    first_token_s: Array,
    scales: Scales,
    window_s: tuple[float, float] | None = None,
) -> FirstTokenStats:
    """First tokens per second between the end of the warm-up and the last arrival, and the TTFT of
    the requests that arrived and got a first token in that time. The arguments are in real
    seconds. `window_s` is that time, where the requests are a part of all."""
    start_s, stop_s = window_s or counted_window_s(arrival_s)
    inside = (first_token_s >= start_s) & (first_token_s <= stop_s)
    ttft_s = (first_token_s - arrival_s)[inside & (arrival_s >= start_s)] / scales.time
    if not ttft_s.size:
        return FirstTokenStats(0, 0.0, np.nan, np.nan)
    rps = float(inside.sum() / (stop_s - start_s)) * scales.time
    return FirstTokenStats(
        int(inside.sum()), rps, float(ttft_s.mean()), float(np.quantile(ttft_s, 0.9))
    )


def egress_gbps(egress_bps: float, scales: Scales) -> float:
    """Egress of the original deployment (not scaled down)."""
    return egress_bps / 1e9 * scales.time / scales.bytes


def first_tokens_s(arrivals: Arrivals, outcomes: Iterable[RequestResult]) -> Array:
    """Times of the first tokens since the start of the load, in the order of the arrivals. NaN
    where none came."""
    first_s = np.full(len(arrivals), np.nan)
    rows = {at_s: row for row, at_s in enumerate(arrivals.at_s.tolist())}
    for one in outcomes:
        if one.ttft_s is not None:
            first_s[rows[one.at_s]] = one.at_s + one.late_s + one.ttft_s
    return first_s


def failures(outcomes: Sequence[RequestResult]) -> dict[str, int]:
    """Failed requests by kind. A request that the end of a run cancelled has not failed."""
    return dict(Counter(one.error for one in outcomes if one.error not in (None, TIMED_OUT)))


def lost_requests(outcomes: Sequence[RequestResult]) -> int:
    """Requests without a first token in a run that waited for first tokens."""
    return sum(one.error == TIMED_OUT and one.ttft_s is None for one in outcomes)


def with_one_plan(deployment: Deployment) -> Deployment:
    """The same deployment without the long-term loop, so that its plan stays the one that is
    compared."""
    rules = deployment.scheduler
    replan = msgspec.structs.replace(rules.replan, every_s=NEVER_S)
    return msgspec.structs.replace(
        deployment, scheduler=msgspec.structs.replace(rules, replan=replan)
    )
