"""One home sends too much: does the other one keep its rate and its times to first tokens?

\b
    python -m prfaas_lab bench flood HOME [--policy adaptive|paper] [--seconds 280]

The deployment is that of `bench agree --case two_by_two`, with emulated engines: two PD clusters
that share two PrfaaS clusters, a gateway for each PD cluster and a relay for each link. Requests
are Poisson. Each home first sends 0.9 of its planned rate, and then HOME sends 3 times of it. At
the planned rate itself a queue grows without a bound, and no quantile of its waits has a meaning.
The other home sends the same requests at the same times in both phases. Its first tokens per second
have to be at least 0.9 of those of the calm phase, their P90 TTFT at most 1.5 times as long, and no
request of it may fail. The first fifth of a phase does not count, because the queues settle. A run
with fewer than 100 counted first tokens of that home in a phase is void.

Prints JSON. Exit code 1: a goal was missed.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
import uvloop

from _agree_regions import MEMORY, two_by_two
from prfaas.clock import MonotonicClock
from prfaas.config.deployment import SchedulerSection
from prfaas.demo.shared import Check, run_watched
from prfaas.display.console import print_json, rounded, run_benchmark
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import launched_gateway, launched_hosts
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestResult, RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.planner.workload import Workload
from prfaas.scheduler.homes.plans import solve_network
from prfaas.sim.arrivals import Arrivals, poisson
from prfaas_lab.machine import cpu_times
from prfaas_lab.studies.regions_case import RegionsCase

HOMES = ("east", "west")
CALM = 0.9  # of its planned rate, which a calm home sends
FLOOD = 3.0  # times its planned rate, which the flooding home sends
KEPT_RATE = 0.9  # of the first tokens per second of the calm phase
KEPT_TTFT = 1.5
SETTLES = 0.2  # of a phase: its requests do not count, the queues settle
LEAST = 100  # first tokens of a home that are counted in a phase; with fewer, chance decides
PHASE_S = 280.0  # for that many of the smaller home
LIMIT_S = 180.0  # after a phase, for its requests to end; one that has not by then has failed


@dataclass(frozen=True, slots=True)
class HomePhase:
    """One home in one phase, without the seconds in which queues settle."""

    home: str
    planned_rps: float
    offered_rps: float
    first_tokens: int
    first_tokens_rps: float
    p90_ttft_s: float
    failures: dict[str, int]  # of all its requests in the phase, by what their clients saw


@dataclass(frozen=True, slots=True)
class Flood:
    home: str  # that floods
    phase_s: float
    calm: list[HomePhase]
    flood: list[HomePhase]

    def others(self, phase: list[HomePhase]) -> list[HomePhase]:
        return [one for one in phase if one.home != self.home]


# Judgement ----------------------------------------------------------------------------------------


def flood_checks(found: Flood) -> list[Check]:
    void = void_lines(found)
    checks = [Check("the run is void", False, line) for line in void]
    for calm, flood in zip(found.others(found.calm), found.others(found.flood), strict=True):
        failures = dict(Counter(calm.failures) + Counter(flood.failures))
        kept = _ratio(flood.first_tokens_rps, calm.first_tokens_rps)
        of_planned = _ratio(flood.first_tokens_rps, flood.planned_rps)
        slower = _ratio(flood.p90_ttft_s, calm.p90_ttft_s)
        checks += [
            Check(f"{calm.home}: no request fails", not failures, str(failures or "none")),
            Check(
                f"{calm.home} keeps its rate within {1 - KEPT_RATE:.0%} while {found.home} floods",
                None if void else kept >= KEPT_RATE,
                f"{kept:.1%} of the calm phase, {of_planned:.1%} of the planned rate",
            ),
            Check(
                f"{calm.home}: P90 TTFT within {KEPT_TTFT:g}x of the calm phase",
                None if void else slower <= KEPT_TTFT,
                f"{slower:.2f}x ({calm.p90_ttft_s:.1f} s, then {flood.p90_ttft_s:.1f} s)",
            ),
        ]
    return checks


def void_lines(found: Flood) -> list[str]:
    """Why the run shows nothing: a phase had too few first tokens of a home that does not flood."""
    return [
        f"{one.home} has {one.first_tokens} first tokens in the {name} phase, and {LEAST} are "
        f"needed: give --seconds {_needed_s(found.phase_s, one.first_tokens)} or more"
        for name, phase in (("calm", found.calm), ("flood", found.flood))
        for one in found.others(phase)
        if one.first_tokens < LEAST
    ]


def _needed_s(phase_s: float, first_tokens: int) -> int:
    """The length of a phase with enough first tokens, at the same rate; with none, twice as long
    a phase."""
    return math.ceil(phase_s * LEAST / first_tokens if first_tokens else 2 * phase_s)


def _ratio(value: float, of: float) -> float:
    return value / of if of else math.nan


def home_phase(
    home: str,
    planned_rps: float,
    arrivals: Arrivals,
    results: Sequence[RequestResult],
    phase_s: float,
) -> HomePhase:
    from_s = SETTLES * phase_s
    counted_s = phase_s - from_s
    sent = [one for one in results if from_s < one.at_s + one.late_s <= phase_s]
    waits = [one.ttft_s for one in sent if one.ttft_s is not None]
    first = sum(
        one.ttft_s is not None and from_s < one.at_s + one.late_s + one.ttft_s <= phase_s
        for one in results
    )
    return HomePhase(
        home,
        planned_rps,
        offered_rps=len(sent) / counted_s,
        first_tokens=first,
        first_tokens_rps=first / counted_s,
        p90_ttft_s=float(np.quantile(waits, 0.9)) if waits else math.nan,
        failures=_failures(arrivals, results),
    )


def _failures(arrivals: Arrivals, results: Sequence[RequestResult]) -> dict[str, int]:
    """Also of answers with another number of tokens than was asked for."""
    asked = dict(zip(arrivals.at_s.tolist(), arrivals.output_tokens.tolist(), strict=True))
    found: Counter[str] = Counter()
    for one in results:
        if one.error is not None:
            found[one.error] += 1
        elif one.output_tokens != max(1, asked[one.at_s]):
            found["another number of tokens"] += 1
    return dict(found)


# Phases -------------------------------------------------------------------------------------------


def arrivals_until(workload: Workload, rps: float, phase_s: float, seed: int) -> Arrivals:
    """The requests of a phase. With the same rate and seed they are the same."""
    drawn = poisson(workload, rps, int(rps * phase_s * 1.5) + 20, seed)  # more than arrive
    count = int(np.searchsorted(drawn.at_s, phase_s, side="right"))
    return Arrivals(
        drawn.at_s[:count],
        drawn.prompt_tokens[:count],
        drawn.cached_tokens[:count],
        drawn.output_tokens[:count],
    )


async def measure(case: RegionsCase, folder: Path, home: str, phase_s: float, seed: int) -> Flood:
    engines = replace(case.engines, memory=MEMORY)
    planned = {one.cluster: one.rate_rps for one in solve_network(case.problem).homes}
    calm = {name: CALM * rps for name, rps in planned.items()}
    flood = {**calm, home: FLOOD * planned[home]}
    async with (
        launched_hosts(case.deployment, engines, folder, attached_prefix()) as hosts,
        launched_gateway(hosts, case.deployment) as live,
    ):
        phases = []
        for rates_rps in (calm, flood):
            click.echo(f"a phase of {phase_s:g} s", err=True)
            work = _phase(case, live.gateway_urls, rates_rps, planned, phase_s, seed)
            phases.append(await run_watched(hosts.children, work))
    return Flood(home, phase_s, *phases)


async def _phase(
    case: RegionsCase,
    urls: Mapping[str, str],
    rates_rps: Mapping[str, float],
    planned: Mapping[str, float],
    phase_s: float,
    seed: int,
) -> list[HomePhase]:
    """Every phase begins with empty queues, and shares no cached prefix with another one."""
    template = RequestTemplate(case.deployment.model.name, salt=secrets.token_hex(8))

    async def of_home(number: int, home: str) -> HomePhase:
        workload = case.problem.homes[number].problem.workload
        arrivals = arrivals_until(workload, rates_rps[home], phase_s, seed + number)
        clock = MonotonicClock()
        async with connect(urls[home], clock) as target:
            results = await offer_load(
                target,
                arrivals,
                template,
                PromptGenerator(),
                clock,
                seed=number,  # so that no two homes have the same prompts
                give_up_s=phase_s + LIMIT_S,
            )
        return home_phase(home, planned[home], arrivals, results, phase_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(of_home(*each)) for each in enumerate(case.homes)]
    return [task.result() for task in tasks]


@click.command(help=__doc__)
@click.argument("home", type=click.Choice(HOMES))
@click.option(
    "--seconds", "phase_s", default=PHASE_S, show_default=True, help="Length of each phase."
)
@click.option(
    "--policy",
    type=click.Choice(["adaptive", "paper"]),
    default=SchedulerSection().policy,
    show_default=True,
    help="Routing policy.",
)
@click.option("--time-scale", default=2.5, show_default=True, help="Factor on all times.")
@click.option(
    "--byte-scale",
    default=1 / 32,
    show_default=True,
    help="Factor on KV bytes. With few bytes, the least that a sender has in flight would be "
    "seconds of a slow link, which no real one has.",
)
@click.option(
    "--output-scale", default=1 / 32, show_default=True, help="Factor on the tokens per answer."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
def main(
    home: str,
    phase_s: float,
    policy: str,
    time_scale: float,
    byte_scale: float,
    output_scale: float,
    seed: int,
) -> None:
    if not 10 <= phase_s <= 3600:
        raise InputError(f"{phase_s:g} is out of range", where="--seconds", fix="give 10 to 3600")
    scales = Scales(time_scale, byte_scale, output_scale)
    before = cpu_times()
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-flood-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        case = two_by_two(Path(folder), scales, policy)
        found = runner.run(measure(case, Path(folder), home, phase_s, seed))
    checks = flood_checks(found)
    print_json(
        {
            "cores": os.cpu_count(),
            "cpu_share": rounded(cpu_times().share_since(before), 4),
            "policy": policy,
            "scales": asdict(scales),
            "seed": seed,
            "flooding_home": home,
            "phase_s": phase_s,
            "calm": [rounded(asdict(row), 4) for row in found.calm],
            "flood": [rounded(asdict(row), 4) for row in found.flood],
            "goals": [asdict(check) for check in checks],
        }
    )
    sys.exit(0 if all(check.held for check in checks) else 1)


if __name__ == "__main__":
    run_benchmark(main)
