"""A deployment served live, simulated and planned with the same requests: do all three agree?

\b
    make agree
    python -m prfaas_lab bench agree [--case case_study|two_by_two] [--requests N] [--time-scale X]
                                     [--byte-scale 0.0078125] [--output-scale 0.03125] [--json]

Processes stand in for the paper's hardware: emulated engines, kvds, a relay for the WAN and a
gateway. Three scale factors make it small. Three deployments run: PrfaaS-PD, homogeneous PD and
naive. Each deployment receives the same requests faster than it can serve them, and the simulator
receives the same list. The benchmark counts first tokens from a fifth of the arrivals to the last
one, which excludes the time in which queues fill and empty. A run that uses more than 80% of the
cores' time is void, because emulated work then waits for a core.

The case two_by_two has two PD clusters that share two PrfaaS clusters, a gateway for each PD
cluster and a relay for each link. Each request is sent to the gateway of the PD cluster at which it
arrives. First tokens per second are compared for each PD cluster and in total, and egress for each
link.

Prints a table, then JSON. Exit code 1: the run is void, or a check did not hold.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import uvloop
from rich.console import Console
from rich.table import Table

import _agree_regions
from _agree_regions import two_by_two
from prfaas.config import load_deployment
from prfaas.demo.shared import Check, RelayReader, run_watched
from prfaas.demo.small_case import (
    SYSTEMS,
    FirstTokenStats,
    SmallCase,
    egress_gbps,
    failures,
    first_token_stats,
    first_tokens_s,
    run_load,
    shared_hosts,
    small_case,
    with_one_plan,
)
from prfaas.display.console import console, print_json, rounded, run_benchmark
from prfaas.display.plan_tables import TITLES
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import RunningHosts, launched_hosts
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson
from prfaas.sim.config import SimConfig, link_id
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.studies.plan_comparison import read_published
from prfaas_lab.machine import cpu_times
from prfaas_lab.studies.regions_case import RegionsCase

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
PUBLISHED = CASE_STUDY.with_suffix(".published.toml")
OVERLOAD = 1.2  # offered over planned rate: every stage has a backlog after the warm-up
LEAST = 300  # first tokens to count at least: fewer are not significant
WITHIN = 0.1
BUSIEST = 0.8  # share of the cores' time; above it, emulated work waits for a core
MEMORY = "512MiB"  # per kvd: the hand-offs of a whole backlog receive their grants early


class Usual(NamedTuple):
    """What a case has unless a flag says otherwise."""

    requests: int
    time: float
    bytes: float


# At this speed the processes of two_by_two use about half of the time of two cores. With fewer
# bytes, the buffers of sockets and relays, which are not scaled, would hold the KV of many seconds
# of its slowest link.
DEFAULTS = {"case_study": Usual(450, 1.0, 1 / 128), "two_by_two": Usual(600, 2.5, 1 / 32)}


@dataclass(frozen=True, slots=True)
class Row:
    """One deployment's results, in the seconds and bytes of the case study."""

    system: str
    live: FirstTokenStats
    simulated: FirstTokenStats
    planned_rps: float
    live_egress_gbps: float | None
    simulated_egress_gbps: float | None
    failures: dict[str, int]
    cpu_share: float


async def measure(
    cases: Mapping[str, SmallCase], requests: int, scales: Scales, seed: int, folder: Path
) -> list[Row]:
    relay_reader = RelayReader()
    most = shared_hosts(cases)
    engines = replace(most.engines, memory=MEMORY)
    rows = []
    async with launched_hosts(
        most.deployment, engines, folder, attached_prefix(), on_line=relay_reader.read_line
    ) as hosts:
        for name, case in cases.items():
            offered_rps = OVERLOAD * find_optimum(case.problem).capacity_rps
            arrivals = poisson(case.problem.workload, offered_rps, requests, seed)
            lasts_s = float(arrivals.at_s[-1])
            click.echo(f"{TITLES[name]}: {requests} requests in {lasts_s:.0f} s", err=True)
            rows.append(await _row(name, case, hosts, arrivals, relay_reader, scales))
    return rows


async def _row(
    name: str,
    case: SmallCase,
    hosts: RunningHosts,
    arrivals: Arrivals,
    relay_reader: RelayReader,
    scales: Scales,
) -> Row:
    before = cpu_times()
    load = run_load(hosts, with_one_plan(case.deployment), arrivals, relay_reader)
    live = await run_watched(hosts.children, load)
    cpu_share = cpu_times().share_since(before)
    config = SimConfig(scheduler=case.deployment.scheduler, replans=False)
    result = simulate(case.problem, arrivals, config)
    crosses = bool(case.problem.remotes)
    return Row(
        system=name,
        live=first_token_stats(arrivals.at_s, first_tokens_s(arrivals, live.outcomes), scales),
        simulated=first_token_stats(arrivals.at_s, result.requests.first_token_s, scales),
        planned_rps=find_optimum(case.problem).capacity_rps * scales.time,
        live_egress_gbps=egress_gbps(live.egress_bps, scales) if crosses else None,
        simulated_egress_gbps=(
            egress_gbps(sent_bps(case, result, float(arrivals.at_s[-1])), scales)
            if crosses
            else None
        ),
        failures=failures(live.outcomes),
        cpu_share=cpu_share,
    )


def sent_bps(case: SmallCase, result: Result, until_s: float) -> float:
    """Mean rate over the WAN until the last arrival, whose bin counts in part."""
    series = result.series
    whole, part = divmod(until_s / series.bin_s, 1)
    bits = series.egress_bits[link_id(case.problem, 0)]
    last = float(bits[int(whole)]) * part if int(whole) < len(bits) else 0.0
    return (float(bits[: int(whole)].sum()) + last) / until_s


# Checks ----------------------------------------------------------------------------------------


def ratios(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    """Each baseline -> PrfaaS-PD's throughput over the baseline's."""
    published = read_published(PUBLISHED).ratios
    first, *others = rows
    return {
        f"prfaas_over_{row.system}": {
            "live": first.live.rps / row.live.rps,
            "simulated": first.simulated.rps / row.simulated.rps,
            "published": published.get(f"prfaas_over_{row.system}"),
        }
        for row in others
        if row.live.rps and row.simulated.rps
    }


def checks(rows: list[Row]) -> list[Check]:
    def off(live: float, simulated: float) -> float:
        return live / simulated - 1 if simulated else float("inf")

    counted = min(row.live.counted for row in rows)
    found = [
        Check(
            f"at least {LEAST} first tokens are counted of each",
            counted >= LEAST,
            f"{counted} of the fewest",
        )
    ]
    found += [
        Check(
            f"{TITLES[row.system]}: no request fails",
            not row.failures,
            str(row.failures) if row.failures else "none",
        )
        for row in rows
    ]
    for row in rows:
        throughput = off(row.live.rps, row.simulated.rps)
        found.append(
            Check(
                f"{TITLES[row.system]}: throughput within {WITHIN:.0%} of the simulator's",
                abs(throughput) <= WITHIN,
                f"{throughput:+.1%}",
            )
        )
        if row.live_egress_gbps is not None and row.simulated_egress_gbps is not None:
            egress = off(row.live_egress_gbps, row.simulated_egress_gbps)
            found.append(
                Check(
                    f"{TITLES[row.system]}: egress within {WITHIN:.0%} of the simulator's",
                    abs(egress) <= WITHIN,
                    f"{egress:+.1%}",
                )
            )
    return found


def void_because(rows: list[Row]) -> str | None:
    busy = {TITLES[row.system]: row.cpu_share for row in rows if row.cpu_share > BUSIEST}
    if not busy:
        return None
    shares = ", ".join(f"{share:.0%} during {name}" for name, share in busy.items())
    return f"the machine was busy for more than {BUSIEST:.0%} of its cores' time: {shares}"


def show(rows: list[Row], scales: Scales, screen: Console) -> None:
    table = Table(
        title=f"the case study, emulated (time x {scales.time:g}, bytes x {scales.bytes:.2g}, "
        f"output x {scales.output:.2g}), offered {OVERLOAD:g} times what is planned",
        title_justify="left",
    )
    table.add_column("")
    for column in (
        *("first tokens/s: live", "simulated", "planned", "counted"),
        *("egress (Gbps): live", "simulated", "cores busy"),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        egress = (row.live_egress_gbps, row.simulated_egress_gbps)
        table.add_row(
            TITLES[row.system],
            f"{row.live.rps:.3f}",
            f"{row.simulated.rps:.3f}",
            f"{row.planned_rps:.3f}",
            f"{row.live.counted}",
            *("-" if value is None else f"{value:.2f}" for value in egress),
            f"{row.cpu_share:.0%}",
        )
    screen.print(table)
    for name, values in ratios(rows).items():
        shown = ", ".join(f"{source} {v:.2f}" for source, v in values.items() if v is not None)
        screen.print(f"{name}: {shown}", markup=False)
    for check in checks(rows):
        mark = "ok    " if check.held else "FAILED"
        screen.print(f"{mark} {check.claim}: {check.seen}", markup=False)


@click.command(help=__doc__)
@click.option(
    "--case",
    type=click.Choice(list(DEFAULTS)),
    default="case_study",
    show_default=True,
    help="The deployment: configs/CASE.toml.",
)
@click.option(
    "--requests",
    type=int,
    help="Requests for each deployment.  [default: 450; two_by_two: 600]",
)
@click.option(
    "--time-scale", type=float, help="Factor on all times.  [default: 1; two_by_two: 2.5]"
)
@click.option(
    "--byte-scale",
    type=float,
    help="Factor on KV bytes.  [default: 0.0078125; two_by_two: 0.03125]",
)
@click.option(
    "--output-scale", default=1 / 32, show_default=True, help="Factor on the tokens per answer."
)
@click.option(
    "--policy",
    type=click.Choice(["paper", "adaptive"]),
    default="paper",
    show_default=True,
    help="Routing policy of two_by_two.",
)
@click.option(
    "--one-gateway", is_flag=True, help="two_by_two: one gateway serves both PD clusters."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Folder for logs.  [default: none are kept]"
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON, no table.")
def main(
    case: str,
    requests: int | None,
    time_scale: float | None,
    byte_scale: float | None,
    output_scale: float,
    policy: str,
    one_gateway: bool,
    seed: int,
    logs: Path | None,
    as_json: bool,
) -> None:
    usual = DEFAULTS[case]
    requests = usual.requests if requests is None else requests
    if requests < 10:
        raise InputError("too few requests to measure", where="--requests", fix="give more")
    time_scale = usual.time if time_scale is None else time_scale
    byte_scale = usual.bytes if byte_scale is None else byte_scale
    scales = Scales(time_scale, byte_scale, output_scale)
    with tempfile.TemporaryDirectory(prefix="prfaas-agree-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if case == "case_study":
            void, found = _case_study(requests, scales, seed, folder, as_json)
        else:
            void, found = _two_by_two(
                two_by_two(folder, scales, policy),
                (requests, seed),
                scales,
                folder,
                as_json=as_json,
                together=one_gateway,
            )
    if void is not None:
        click.echo(f"void: {void}", err=True)
    sys.exit(0 if void is None and all(check.held for check in found) else 1)


def _two_by_two(
    case: RegionsCase,
    load: tuple[int, int],
    scales: Scales,
    folder: Path,
    *,
    as_json: bool,
    together: bool,
) -> tuple[str | None, list[Check]]:
    """`load` is the number of requests and the seed of their arrivals. Returns why the run is void,
    and the checks."""
    requests, seed = load
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(
            _agree_regions.measure_regions(case, requests, scales, seed, folder, together=together)
        )
    if not as_json:
        _agree_regions.show_regions(found, scales, console())
    print_json(_agree_regions.regions_json(found, requests, scales))
    return _agree_regions.void_because(found), _agree_regions.region_checks(found)


def _case_study(
    requests: int, scales: Scales, seed: int, folder: Path, as_json: bool
) -> tuple[str | None, list[Check]]:
    """Returns why the run is void, and the checks."""
    stated = load_deployment(CASE_STUDY)
    cases = {system: small_case(stated, CASE_STUDY, folder, scales, system) for system in SYSTEMS}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(cases, requests, scales, seed, folder))
    if not as_json:
        show(rows, scales, console())
    found, void = checks(rows), void_because(rows)
    print_json(
        {
            "case": "case_study",
            "cores": os.cpu_count(),
            "requests": requests,
            "scales": asdict(scales),
            "systems": {row.system: rounded(asdict(row), 4) for row in rows},
            "ratios": rounded(ratios(rows), 4),
            "checks": [asdict(check) for check in found],
            "void": void,
        }
    )
    return void, found


if __name__ == "__main__":
    run_benchmark(main)
