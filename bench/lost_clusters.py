"""Clusters and a gateway are lost and return, under load: what do clients notice?

\b
    python -m prfaas_lab bench lost_clusters                  a PrfaaS cluster, a PD cluster, then
                                                              the gateway that plans are killed,
                                                              and started again
    python -m prfaas_lab bench lost_clusters --drain CLUSTER  a cluster is drained and returned
    python -m prfaas_lab bench lost_clusters --flood HOME     a home sends 3 times its planned rate

The deployment is that of `bench agree --case two_by_two`, with emulated engines: two PD clusters
that share two PrfaaS clusters, a gateway for each PD cluster and a relay for each link. Poisson
requests arrive at 60% of the rate that the clusters can serve which are left.

Every request is accounted for by the gateways' log lines: it is excused only if the gateway that it
was at, or the node that decoded it, was killed meanwhile. One that is sent to a dead node more than
5 s after the kill is not excused, and one without an outcome has failed. Service is back when all
gateways follow one plan of the clusters that live, and when first tokens keep up with the requests
from then on: in windows of 20 s that begin after the kill or the return, they are 0.9 of the
requests, less two standard deviations of the number of requests.

With --flood, each home first sends 0.9 of its planned rate, and then HOME floods. At the planned
rate itself a queue grows without a bound, and no quantile of its waits has a meaning. The other
home sends the same requests at the same times in both phases. Its first tokens per second have to
be at least 0.9 of those of the calm phase; their ratio to the planned rate is shown beside it. A
run with fewer than 100 counted first tokens of that home in a phase is void.

Prints a table, then JSON. Exit code 1: a goal was missed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.table import Table

from _agree_regions import two_by_two
from _lost_flood import Flood, flood_checks, flood_from
from _lost_modes import (
    Drain,
    Step,
    drain_checks,
    drain_cluster,
    lose_cluster,
    lose_planner,
    step_checks,
)
from _lost_processes import World, running_world
from prfaas.config.deployment import SchedulerSection
from prfaas.demo.shared import Check
from prfaas.display.console import console, print_json, rounded, run_benchmark
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas_lab.machine import cpu_times
from prfaas_lab.studies.regions_case import RegionsCase

LOST_S = 60.0  # how long a cluster is lost or drained
PHASE_S = 280.0  # of --flood: 100 first tokens of the smaller home
# Factors on times and on bytes. With --flood the waits on links are compared. With few bytes the
# least that a sender has in flight would be seconds of a slow link, which no real one has.
SCALES = (2.0, 1 / 128)
FLOOD_SCALES = (2.5, 1 / 32)


@click.command(help=__doc__)
@click.option("--prfaas", default="north", show_default=True, help="PrfaaS cluster to kill.")
@click.option("--pd", default="west", show_default=True, help="PD cluster to kill.")
@click.option(
    "--steps",
    default="prfaas,pd,gateway",
    show_default=True,
    help="What is killed, in this order.",
)
@click.option("--drain", metavar="CLUSTER", help="Drain this cluster instead.")
@click.option("--flood", metavar="HOME", help="Let this home flood instead.")
@click.option(
    "--seconds",
    type=float,
    help="How long something is lost or drained, or a phase of --flood.  [default: 60; 280]",
)
@click.option(
    "--policy",
    type=click.Choice(["adaptive", "paper"]),
    default=SchedulerSection().policy,
    show_default=True,
    help="Routing policy.",
)
@click.option(
    "--time-scale", type=float, help="Factor on all times.  [default: 2; 2.5 with --flood]"
)
@click.option(
    "--byte-scale", type=float, help="Factor on KV bytes.  [default: 1/128; 1/32 with --flood]"
)
@click.option(
    "--output-scale", default=1 / 32, show_default=True, help="Factor on the tokens per answer."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Folder for logs.  [default: none are kept]"
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON, no table.")
def main(
    prfaas: str,
    pd: str,
    steps: str,
    drain: str | None,
    flood: str | None,
    seconds: float | None,
    policy: str,
    time_scale: float | None,
    byte_scale: float | None,
    output_scale: float,
    seed: int,
    logs: Path | None,
    as_json: bool,
) -> None:
    if drain is not None and flood is not None:
        raise InputError("only one mode can run", where="--flood", fix="leave out --drain")
    if seconds is not None and not 10 <= seconds <= 3600:
        raise InputError(f"{seconds:g} is out of range", where="--seconds", fix="give 10 to 3600")
    times, nbytes = SCALES if flood is None else FLOOD_SCALES
    scales = Scales(
        times if time_scale is None else time_scale,
        nbytes if byte_scale is None else byte_scale,
        output_scale,
    )
    with tempfile.TemporaryDirectory(prefix="prfaas-lost-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        case = two_by_two(folder, scales, policy)
        _check_names(case, {"--prfaas": prfaas, "--pd": pd, "--drain": drain, "--flood": flood})
        killed = _chosen_steps(steps, prfaas, pd)
        before = cpu_times()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if drain is not None:
                found: Any = runner.run(_drain(case, folder, drain, seconds or LOST_S, seed))
                checks = drain_checks(found)
            elif flood is not None:
                found = runner.run(_flood(case, folder, flood, seconds or PHASE_S, seed))
                checks = flood_checks(found)
            else:
                found = runner.run(_lose(case, folder, killed, seconds or LOST_S, seed))
                checks = [check for step in found for check in step_checks(step)]
        cpu_share = cpu_times().share_since(before)
    if not as_json:
        _show(found, checks, cpu_share)
    print_json(
        {
            "cores": os.cpu_count(),
            "cpu_share": rounded(cpu_share, 4),
            "policy": policy,
            "scales": asdict(scales),
            "seconds": seconds,
            "seed": seed,
            **_results(found),
            "goals": [asdict(check) for check in checks],
        }
    )
    sys.exit(0 if all(check.held for check in checks) else 1)


def _check_names(case: RegionsCase, given: dict[str, str | None]) -> None:
    kinds = {cluster.name: cluster.kind for cluster in case.deployment.clusters}
    wanted = {"--prfaas": ("prfaas",), "--pd": ("pd",), "--flood": ("pd",)}
    for flag, name in given.items():
        allowed = [n for n, kind in kinds.items() if kind in wanted.get(flag, ("pd", "prfaas"))]
        if name is not None and name not in allowed:
            fix = f"give one of: {', '.join(allowed)}"
            raise InputError(f"{name!r} is not such a cluster", where=flag, fix=fix)


def _chosen_steps(steps: str, prfaas: str, pd: str) -> list[str | None]:
    """The clusters to kill, in order; None stands for the gateway that plans."""
    known = {"prfaas": prfaas, "pd": pd, "gateway": None}
    names = steps.split(",")
    if any(name not in known for name in names):
        fix = f"give some of {', '.join(known)}, separated by commas"
        raise InputError(f"{steps!r} are not steps", where="--steps", fix=fix)
    return [known[name] for name in names]


# Runs ---------------------------------------------------------------------------------------------


async def _lose(
    case: RegionsCase, folder: Path, killed: Sequence[str | None], lost_s: float, seed: int
) -> list[Step]:
    async def work(world: World) -> list[Step]:
        found = []
        for number, cluster in enumerate(killed):
            each = seed + 1000 * number
            click.echo(f"killing {cluster or 'the gateway that plans'}", err=True)
            if cluster is None:
                found.append(await lose_planner(world, lost_s, each))
            else:
                found.append(await lose_cluster(world, cluster, lost_s, each))
        return found

    async with running_world(case, folder) as world:
        return await world.run(work(world))


async def _drain(case: RegionsCase, folder: Path, cluster: str, for_s: float, seed: int) -> Drain:
    async with running_world(case, folder) as world:
        click.echo(f"draining {cluster}", err=True)
        return await world.run(drain_cluster(world, cluster, for_s, seed))


async def _flood(case: RegionsCase, folder: Path, home: str, phase_s: float, seed: int) -> Flood:
    async with running_world(case, folder) as world:
        click.echo(f"two phases of {phase_s:g} s", err=True)
        return await world.run(flood_from(world, home, phase_s, seed))


# Display ------------------------------------------------------------------------------------------


def _results(found: list[Step] | Drain | Flood) -> dict[str, Any]:
    if isinstance(found, Drain):
        return {"drain": rounded(asdict(found), 3)}
    if isinstance(found, Flood):
        phases = {"calm": found.calm, "flood": found.flood}
        rows = {name: [rounded(asdict(row), 4) for row in rows] for name, rows in phases.items()}
        return {"flooding_home": found.home, "phase_s": found.phase_s, **rows}
    return {"steps": [rounded(asdict(step), 3) for step in found]}


def _show(found: list[Step] | Drain | Flood, checks: Sequence[Check], cpu_share: float) -> None:
    screen = console()
    title = f"two PD and two PrfaaS clusters, emulated, cores busy {cpu_share:.0%}"
    table = Table(title=title, title_justify="left")
    if isinstance(found, Flood):
        for column in ("phase", "home", "planned/s", "offered/s", "first tokens/s", "P90 TTFT (s)"):
            table.add_column(column)
        for name, rows in (("calm", found.calm), ("flood", found.flood)):
            for row in rows:
                rates = (row.planned_rps, row.offered_rps, row.first_tokens_rps)
                shown = (f"{rate:.3f}" for rate in rates)
                table.add_row(name, row.home, *shown, f"{row.p90_ttft_s:.1f}")
    elif isinstance(found, Drain):
        for column in ("drained", "requests", "failed", "empty (s)", "plan of the rest (s)"):
            table.add_column(column)
        table.add_column("full plan (s)")
        times = (found.empty_s, found.left_plan_s, found.full_plan_s)
        counts = (found.tally.requests, len(found.tally.failed))
        table.add_row(found.cluster, *map(str, counts), *map(_seconds, times))
    else:
        for column in (
            *("killed", "requests", "excused", "failed", "plan of the rest (s)", "rate (s)"),
            *("started in (s)", "full plan (s)", "rate (s)", "planner (s)"),
        ):
            table.add_column(column)
        for step in found:
            counts3 = (step.tally.requests, step.tally.excused, len(step.tally.failed))
            times5 = (step.left_plan_s, step.left_rate_s, step.started_s, step.full_plan_s)
            table.add_row(
                step.name,
                *map(str, counts3),
                *map(_seconds, (*times5, step.full_rate_s)),
                _seconds(step.planner_s) if step.is_of_planner else "-",
            )
    screen.print(table)
    for check in checks:
        screen.print(f"{check.mark:6} {check.claim}: {check.seen}", markup=False)
    for text in _failed(found):
        screen.print(text, markup=False)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def _failed(found: list[Step] | Drain | Flood) -> list[str]:
    if isinstance(found, Flood):
        phases = (found.calm, found.flood)
        return [text for rows in phases for row in found.others(rows) for text in row.failures]
    tallies = [found.tally] if isinstance(found, Drain) else [step.tally for step in found]
    return [text for one in tallies for text in (*one.failed, *one.unclear)]


if __name__ == "__main__":
    run_benchmark(main)
