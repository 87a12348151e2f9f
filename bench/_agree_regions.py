"""`bench agree --case two_by_two`: two PD clusters that share two PrfaaS clusters.

The deployment of configs/two_by_two.toml with half of its instances and of the bandwidth between
its clusters, so that one small machine can carry its processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from prfaas.config import Deployment, load_deployment
from prfaas.demo.shared import Check, RelayReader, run_watched
from prfaas.demo.small_case import (
    FirstTokenStats,
    counted_window_s,
    egress_gbps,
    failures,
    first_token_stats,
    with_one_plan,
)
from prfaas.display.console import rounded
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import launched_hosts
from prfaas.launch.scaling import smaller_deployment
from prfaas.scheduler.homes.plans import solve_network
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.sim.arrivals import Arrivals, poisson_at_homes
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas_lab.machine import cpu_times
from prfaas_lab.studies.regions_case import Link, RegionsCase, regions_case, run_regions_load

TWO_BY_TWO = Path(__file__).parents[1] / "configs" / "two_by_two.toml"
SHARE = 0.5  # of the instances and of the bandwidth: 13 hosts
# Offered over planned rate. Above the plan, KV waits for the slow links for longer than kvds wait
# for an answer, and then the request is prefilled elsewhere; the simulator has no such limit.
OVERLOAD = 1.0
QUEUE_S = 600.0  # a request may wait for the whole run: the simulator gives none up
LEAST = 100  # first tokens of each PD cluster to count at least
WITHIN = 0.05
UNUSED = 0.01  # of a link's bandwidth: less is not KV, but connections that are kept open
BUSIEST = 0.6  # share of the cores' time; above it, emulated work waits for a core
MEMORY = "512MiB"  # per kvd: the hand-offs of a whole backlog receive their grants early
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class HomeRow:
    """One PD cluster's results, or those of all, in the seconds of the configuration."""

    home: str
    live: FirstTokenStats
    simulated: FirstTokenStats
    planned_rps: float


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One link's bytes, in those of the configuration."""

    source: str
    target: str
    gbps: float
    live_gbps: float
    simulated_gbps: float

    @property
    def name(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True, slots=True)
class Agreement:
    homes: list[HomeRow]  # the last one is the total
    links: list[LinkRow]
    failures: dict[str, int]
    cpu_share: float


def two_by_two(folder: Path, scales: Scales, policy: str) -> RegionsCase:
    stated = load_deployment(TWO_BY_TWO, [f"scheduler.policy={policy}"])
    return regions_case(smaller_deployment(stated, SHARE), TWO_BY_TWO, folder, scales)


async def measure_regions(
    case: RegionsCase, requests: int, scales: Scales, seed: int, folder: Path, *, together: bool
) -> Agreement:
    relay_reader = RelayReader()
    engines = replace(case.engines, memory=MEMORY)
    planned = solve_network(case.problem)
    arrivals = poisson_at_homes(case.problem, OVERLOAD * planned.rate_rps, requests, seed)
    async with launched_hosts(
        case.deployment, engines, folder, attached_prefix(), on_line=relay_reader.read_line
    ) as hosts:
        click.echo(f"{requests} requests in {arrivals.at_s[-1]:.0f} s", err=True)
        before = cpu_times()
        load = run_regions_load(
            hosts,
            _patient(with_one_plan(case.deployment)),
            case.homes,
            arrivals,
            relay_reader,
            together=together,
        )
        live = await run_watched(hosts.children, load)
        cpu_share = cpu_times().share_since(before)
    result = simulated(case, arrivals)
    rates = {home.cluster: home.rate_rps * scales.time for home in planned.homes}
    failed = [one for home in case.homes for one in live.outcomes[home]]
    return Agreement(
        home_rows(case.homes, rates, arrivals, live.first_token_s, result, scales),
        link_rows(case, live.egress_bps, sent_bps(result, float(arrivals.at_s[-1])), scales),
        failures(failed),
        cpu_share,
    )


def _patient(deployment: Deployment) -> Deployment:
    gateway = deployment.gateway
    timeouts = msgspec.structs.replace(gateway.timeouts, queue_s=QUEUE_S)
    gateway = msgspec.structs.replace(gateway, timeouts=timeouts)
    return msgspec.structs.replace(deployment, gateway=gateway)


def simulated(case: RegionsCase, arrivals: Arrivals) -> Result:
    rules = case.deployment.scheduler
    trips = round_trips(case.deployment) if rules.decode_elsewhere else {}
    return simulate(case.problem, arrivals, SimConfig(scheduler=rules, round_trips=trips))


def home_rows(
    homes: list[str],
    planned_rps: Mapping[str, float],
    arrivals: Arrivals,
    live_first_s: Any,
    result: Result,
    scales: Scales,
) -> list[HomeRow]:
    """A row for each PD cluster, and one for all. All count the same time."""
    assert arrivals.homes is not None
    window_s = counted_window_s(arrivals.at_s)

    def row(name: str, chosen: Any, rps: float) -> HomeRow:
        stats = [
            first_token_stats(arrivals.at_s[chosen], first_s[chosen], scales, window_s)
            for first_s in (live_first_s, result.requests.first_token_s)
        ]
        return HomeRow(name, stats[0], stats[1], rps)

    rows = [row(home, arrivals.homes == n, planned_rps[home]) for n, home in enumerate(homes)]
    everywhere = np.ones(len(arrivals), dtype=bool)
    return [*rows, row(TOTAL, everywhere, sum(planned_rps.values()))]


def link_rows(
    case: RegionsCase,
    live_bps: Mapping[Link, float],
    simulated_bps: Mapping[Link, float],
    scales: Scales,
) -> list[LinkRow]:
    return [
        LinkRow(
            link.source,
            link.target,
            egress_gbps(link.gbps * 1e9, scales),
            egress_gbps(live_bps[link.source, link.target], scales),
            egress_gbps(simulated_bps.get((link.source, link.target), 0.0), scales),
        )
        for link in case.deployment.links
        if link.source != link.target
    ]


def sent_bps(result: Result, until_s: float) -> dict[Link, float]:
    """Mean rate over each link until the last arrival, whose bin counts in part."""
    series = result.series
    whole, part = divmod(until_s / series.bin_s, 1)
    found: dict[Link, float] = {}
    for (source, target), bits in series.egress_bits.items():
        last = float(bits[int(whole)]) * part if int(whole) < len(bits) else 0.0
        found[str(source), str(target)] = (float(bits[: int(whole)].sum()) + last) / until_s
    return found


# Checks ----------------------------------------------------------------------------------------


def region_checks(found: Agreement) -> list[Check]:
    fewest = min(row.live.counted for row in found.homes)
    checks = [
        Check(
            f"at least {LEAST} first tokens are counted of each PD cluster",
            fewest >= LEAST,
            f"{fewest} of the fewest",
        ),
        Check("no request fails", not found.failures, str(found.failures or "none")),
    ]
    for row in found.homes:
        off = _off(row.live.rps, row.simulated.rps)
        claim = f"{row.home}: throughput within {WITHIN:.0%} of the simulator's"
        checks.append(Check(claim, abs(off) <= WITHIN, f"{off:+.1%}"))
    for link in found.links:
        unused = UNUSED * link.gbps
        if link.simulated_gbps <= unused:
            seen = f"{link.live_gbps / link.gbps:.2%} of its bandwidth"
            claim = f"{link.name}: no KV, as simulated"
            checks.append(Check(claim, link.live_gbps <= unused, seen))
            continue
        off = _off(link.live_gbps, link.simulated_gbps)
        claim = f"{link.name}: egress within {WITHIN:.0%} of the simulator's"
        checks.append(Check(claim, abs(off) <= WITHIN, f"{off:+.1%}"))
    return checks


def _off(live: float, simulated_value: float) -> float:
    return live / simulated_value - 1 if simulated_value else float("inf")


def void_because(found: Agreement) -> str | None:
    if found.cpu_share <= BUSIEST:
        return None
    return (
        f"the machine was busy for {found.cpu_share:.0%} of its cores' time, which is more than "
        f"{BUSIEST:.0%}"
    )


def show_regions(found: Agreement, scales: Scales, screen: Console) -> None:
    title = (
        f"two PD and two PrfaaS clusters, emulated (time x {scales.time:g}, bytes x "
        f"{scales.bytes:.2g}, output x {scales.output:.2g}), offered {OVERLOAD:g} times what is "
        f"planned, cores busy {found.cpu_share:.0%}"
    )
    homes = Table(title=title, title_justify="left")
    homes.add_column("")
    for column in ("first tokens/s: live", "simulated", "planned", "counted", "TTFT (s): live"):
        homes.add_column(column, justify="right")
    homes.add_column("simulated", justify="right")
    for row in found.homes:
        rates = (row.live.rps, row.simulated.rps, row.planned_rps)
        waits = (row.live.ttft_mean_s, row.simulated.ttft_mean_s)
        homes.add_row(
            row.home,
            *(f"{rate:.3f}" for rate in rates),
            str(row.live.counted),
            *(f"{wait:.1f}" for wait in waits),
        )
    screen.print(homes)
    links = Table()
    links.add_column("link")
    for column in ("egress (Gbit/s): live", "simulated", "bandwidth"):
        links.add_column(column, justify="right")
    for link in found.links:
        rates = (link.live_gbps, link.simulated_gbps, link.gbps)
        links.add_row(link.name, *(f"{rate:.3f}" for rate in rates))
    screen.print(links)
    for check in region_checks(found):
        mark = "ok    " if check.held else "FAILED"
        screen.print(f"{mark} {check.claim}: {check.seen}", markup=False)


def regions_json(found: Agreement, requests: int, scales: Scales) -> dict[str, Any]:
    return {
        "case": "two_by_two",
        "cores": os.cpu_count(),
        "requests": requests,
        "scales": asdict(scales),
        "pd_clusters": {row.home: rounded(asdict(row), 4) for row in found.homes},
        "links": {link.name: rounded(asdict(link), 4) for link in found.links},
        "failures": found.failures,
        "cpu_share": rounded(found.cpu_share, 4),
        "checks": [asdict(check) for check in region_checks(found)],
        "void": void_because(found),
    }
