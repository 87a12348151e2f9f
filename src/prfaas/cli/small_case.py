"""A deployment on emulated accelerators, made small, and the baselines of the same hardware: what
the demo's second scene, `bench agree` and `bench episode` serve, plan and simulate.

All of them take turns on one set of hosts. The problem is the small world's own, so that what is
planned and simulated is what is served.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.cli.demo_scene import RelayEar
from prfaas.cli.up_prepare import Prepared, Wan, Wish, prepared
from prfaas.cli.wiring import Study
from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.commands import Engines, ways
from prfaas.launch.running import Hosts, launched_gateway
from prfaas.measure.client import GIVEN_UP, connect
from prfaas.measure.open_loop import Ask, Outcome, offer
from prfaas.measure.prompts import Prompts
from prfaas.planner.problem import Problem
from prfaas.sim.arrivals import Arrivals

Array = npt.NDArray[np.float64]

AS_STATED = Wan()
WARM_SHARE = 0.2  # of the arrivals, before anything is counted
SYSTEMS = ("prfaas_pd", "homogeneous", "naive")


@dataclass(frozen=True, slots=True)
class SmallCase:
    deployment: Deployment
    engines: Engines
    problem: Problem


def small_case(
    deployment: Deployment,
    file: Path,
    folder: Path,
    scales: Scales,
    system: str = SYSTEMS[0],
    wan: Wan = AS_STATED,
) -> SmallCase:
    """`deployment` is what `file` says. What engines read is written into `folder`."""
    baseline = None if system == SYSTEMS[0] else system
    made = prepared(deployment, file, Wish("emulated", scales, baseline, wan), folder)
    problem = Study(folder / "deployment.toml", "exact").problem(made.deployment)
    return SmallCase(made.deployment, made.engines, problem)


def hosts_enough(cases: Mapping[str, SmallCase]) -> Prepared:
    """For each of them: their deployments take turns on the same processes."""
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
    return Prepared(deployment, first.engines)


@dataclass(frozen=True, slots=True)
class Offered:
    """What became of a load, live."""

    outcomes: list[Outcome]
    egress_bps: float  # over the WAN, until the last arrival


async def offered(
    hosts: Hosts, deployment: Deployment, arrivals: Arrivals, ear: RelayEar
) -> Offered:
    """A gateway over the hosts, and the arrivals at it. What is under way at the last arrival is
    given up: a run's end would count for nothing."""
    clock = MonotonicClock()
    (way,) = ways(hosts.deployment)
    relay = hosts.children.named(way.name)
    async with (
        launched_gateway(hosts, deployment) as live,
        connect(live.gateway_url, clock) as target,
    ):
        assert target.model is not None
        ask = Ask(target.model, salt=secrets.token_hex(8))
        until_s = float(arrivals.at_s[-1])
        before = await ear.carried_bytes(relay)
        outcomes = await offer(target, arrivals, ask, Prompts(), clock, give_up_s=until_s)
        carried = await ear.carried_bytes(relay) - before
    return Offered(outcomes, carried * 8 / until_s)


@dataclass(frozen=True, slots=True)
class Seen:
    """First tokens of one run, in the seconds of the deployment that was made small."""

    counted: int
    rps: float
    ttft_mean_s: float
    ttft_p90_s: float


def seen(arrival_s: Array, first_token_s: Array, scales: Scales) -> Seen:
    """Of the time from the warm-up's end to the last arrival: first tokens per second, and the TTFT
    of those who arrived and were answered in it. Seconds in are this machine's."""
    start_s, stop_s = arrival_s[int(len(arrival_s) * WARM_SHARE)], arrival_s[-1]
    inside = (first_token_s >= start_s) & (first_token_s <= stop_s)
    ttft_s = (first_token_s - arrival_s)[inside & (arrival_s >= start_s)] / scales.time
    if not ttft_s.size:
        return Seen(0, 0.0, np.nan, np.nan)
    rps = float(inside.sum() / (stop_s - start_s)) * scales.time
    return Seen(int(inside.sum()), rps, float(ttft_s.mean()), float(np.quantile(ttft_s, 0.9)))


def egress_gbps(egress_bps: float, scales: Scales) -> float:
    """As the deployment that was made small would have sent it."""
    return egress_bps / 1e9 * scales.time / scales.bytes


def first_tokens_s(arrivals: Arrivals, outcomes: Iterable[Outcome]) -> Array:
    """Since the beginning of the load, in the order of the arrivals. NaN: none came."""
    first_s = np.full(len(arrivals), np.nan)
    rows = {at_s: row for row, at_s in enumerate(arrivals.at_s.tolist())}
    for one in outcomes:
        if one.ttft_s is not None:
            first_s[rows[one.at_s]] = one.at_s + one.late_s + one.ttft_s
    return first_s


def failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """By kind. What the end of a run cut off is no failure."""
    found: dict[str, int] = {}
    for one in outcomes:
        if one.error is not None and one.error != GIVEN_UP:
            found[one.error] = found.get(one.error, 0) + 1
    return found
