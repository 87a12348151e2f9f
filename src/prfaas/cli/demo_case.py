"""The demo's second scene: the paper's case study on emulated accelerators, made small, under three
deployments, beside what the planner and the simulator say of the same requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from prfaas.cli.child import tether
from prfaas.cli.demo_scene import Check, RelayEar, watched
from prfaas.cli.plan_tables import TITLES
from prfaas.cli.up_prepare import Prepared, Wish, prepared
from prfaas.cli.wiring import Study
from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.commands import ways
from prfaas.launch.running import Hosts, launched_gateway, launched_hosts
from prfaas.measure.client import GIVEN_UP, connect
from prfaas.measure.open_loop import Ask, Outcome, offer
from prfaas.measure.prompts import Prompts
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import best_for
from prfaas.sim.arrivals import Arrivals, poisson
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

Array = npt.NDArray[np.float64]

SCALES = Scales(time=0.5, bytes=1 / 576, output=1 / 32)  # 2 bytes per token and MLA layer
LOAD = 0.95  # of what PrfaaS-PD can carry, as planned; more than its baselines can
SECONDS = 20.0  # of this machine, for each deployment
WARM_SHARE = 0.2  # of the arrivals, before anything is counted
SYSTEMS = ("prfaas_pd", "homogeneous", "naive")


@dataclass(frozen=True, slots=True)
class Seen:
    """First tokens of one run, in the seconds of the case study."""

    rps: float
    ttft_mean_s: float
    ttft_p90_s: float


@dataclass(frozen=True, slots=True)
class Row:
    system: str
    live: Seen
    simulated: Seen
    capacity_rps: float  # planned, the exact reading
    egress_gbps: float | None
    failures: dict[str, int]


async def case_scene(
    file: Path, folder: Path, screen: Console, say: Callable[[str], None]
) -> list[Check]:
    deployment = load_deployment(file)
    small = {name: _small(deployment, file, name, folder) for name in SYSTEMS}
    problems = {name: _problem(one, folder) for name, one in small.items()}
    first = problems[SYSTEMS[0]]
    load_rps = LOAD * best_for(first).capacity_rps
    arrivals = poisson(first.workload, load_rps, round(load_rps * SECONDS), seed=0)
    rows = []
    ear = RelayEar()
    most = _most(small)
    async with launched_hosts(
        most.deployment, most.engines, folder, tether(), say=say, heard=ear.heard
    ) as hosts:
        for name, problem in problems.items():
            say(f"{TITLES[name]}: {len(arrivals)} requests in {SECONDS:g} s")
            offered = _offered(hosts, small[name], arrivals, ear)
            outcomes, egress_bps = await watched(hosts.children, offered)
            config = SimConfig(scheduler=small[name].deployment.scheduler, replans=False)
            simulated = simulate(problem, arrivals, config).requests
            rows.append(
                Row(
                    name,
                    seen(arrivals.at_s, _first_tokens_s(arrivals, outcomes)),
                    seen(arrivals.at_s, simulated.first_token_s),
                    best_for(problem).capacity_rps * SCALES.time,
                    _gbps(egress_bps) if problem.remotes else None,
                    _failures(outcomes),
                )
            )
    screen.print(_table(rows, load_rps * SCALES.time, deployment))
    screen.print(
        f"A decode step stands for {1 / SCALES.output:g} tokens and takes as long, so TTFT has more"
        " of it than the case study's, live and simulated alike."
    )
    return _checks(rows)


def _small(deployment: Deployment, file: Path, name: str, folder: Path) -> Prepared:
    baseline = None if name == SYSTEMS[0] else name
    return prepared(deployment, file, Wish("emulated", SCALES, baseline), folder)


def _problem(small: Prepared, folder: Path) -> Problem:
    """Of the small world: what is simulated is what is served."""
    return Study(folder / "deployment.toml", "exact").problem(small.deployment)


def _most(small: dict[str, Prepared]) -> Prepared:
    """Hosts enough for each of them: their deployments take turns on the same processes."""
    first = small[SYSTEMS[0]]
    gpus = {
        cluster.name: max(
            c.gpus
            for one in small.values()
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


async def _offered(
    hosts: Hosts, small: Prepared, arrivals: Arrivals, ear: RelayEar
) -> tuple[list[Outcome], float]:
    """The live run, and the bits per second that it sent over the WAN."""
    clock = MonotonicClock()
    (way,) = ways(hosts.deployment)
    relay = hosts.children.named(way.name)
    async with (
        launched_gateway(hosts, small.deployment) as live,
        connect(live.gateway_url, clock) as target,
    ):
        assert target.model is not None
        ask = Ask(target.model, salt=secrets.token_hex(8))
        until_s = float(arrivals.at_s[-1])
        before = await ear.carried_bytes(relay)
        outcomes = await offer(target, arrivals, ask, Prompts(), clock, give_up_s=until_s)
        carried = await ear.carried_bytes(relay) - before
    return outcomes, carried * 8 / until_s


def _first_tokens_s(arrivals: Arrivals, outcomes: Sequence[Outcome]) -> Array:
    """NaN: none came."""
    first_s = np.full(len(arrivals), np.nan)
    rows = {at_s: row for row, at_s in enumerate(arrivals.at_s.tolist())}
    for one in outcomes:
        if one.ttft_s is not None:
            first_s[rows[one.at_s]] = one.at_s + one.late_s + one.ttft_s
    return first_s


def _gbps(egress_bps: float) -> float:
    """As the case study would have sent it."""
    return egress_bps / 1e9 * SCALES.time / SCALES.bytes


def seen(arrival_s: Array, first_token_s: Array) -> Seen:
    """Of the time from the warm-up's end to the last arrival: first tokens per second, and the TTFT
    of those who arrived and were answered in it. Seconds in are this machine's, seconds out the
    case study's."""
    start_s, stop_s = arrival_s[int(len(arrival_s) * WARM_SHARE)], arrival_s[-1]
    inside = (first_token_s >= start_s) & (first_token_s <= stop_s)
    ttft_s = (first_token_s - arrival_s)[inside & (arrival_s >= start_s)] / SCALES.time
    if not ttft_s.size:
        return Seen(0.0, np.nan, np.nan)
    rps = float(inside.sum() / (stop_s - start_s)) * SCALES.time
    return Seen(rps, float(ttft_s.mean()), float(np.quantile(ttft_s, 0.9)))


def _failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """What the end of the run cut off is no failure."""
    found: dict[str, int] = {}
    for one in outcomes:
        if one.error not in (None, GIVEN_UP):
            assert one.error is not None
            found[one.error] = found.get(one.error, 0) + 1
    return found


def _table(rows: Sequence[Row], load_rps: float, deployment: Deployment) -> Table:
    gpus = sum(cluster.gpus for cluster in deployment.clusters)
    table = Table(
        title=f"the case study's {gpus} GPUs, emulated (time x {SCALES.time:g}, bytes x "
        f"{SCALES.bytes:.2g}, output x {SCALES.output:.2g}), {load_rps:.2f} requests/s offered: "
        "first tokens per second, TTFT mean / P90 in s",
        title_justify="left",
    )
    table.add_column("")
    for column in (
        "live",
        "simulated",
        "at most (plan)",
        "TTFT live",
        "simulated",
        "egress (Gbps)",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            TITLES[row.system],
            f"{row.live.rps:.2f}",
            f"{row.simulated.rps:.2f}",
            f"{row.capacity_rps:.2f}",
            f"{row.live.ttft_mean_s:.2f} / {row.live.ttft_p90_s:.2f}",
            f"{row.simulated.ttft_mean_s:.2f} / {row.simulated.ttft_p90_s:.2f}",
            "-" if row.egress_gbps is None else f"{row.egress_gbps:.1f}",
        )
    return table


def _checks(rows: Sequence[Row]) -> list[Check]:
    first, *others = rows
    ratios = {row.system: first.live.rps / row.live.rps for row in others}
    simulated = {row.system: first.simulated.rps / row.simulated.rps for row in others}
    failures = {row.system: row.failures for row in rows if row.failures}
    said = ", ".join(
        f"{ratios[name]:.2f}x {TITLES[name]} (simulated: {simulated[name]:.2f}x)" for name in ratios
    )
    return [
        Check(
            "no request fails under load",
            not failures,
            f"failures: {failures}" if failures else "none",
        ),
        Check("PrfaaS-PD serves more than its baselines", min(ratios.values()) > 1, said),
    ]
