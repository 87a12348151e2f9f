"""The short-term loop against a static threshold while the WAN slows to a twentieth under load.

\b
    python -m prfaas_lab bench episode [--policy adaptive] [--gbps 10] [--load 0.4] [--share 0.05]

Processes stand in for the case study's hardware (emulated engines, kvds, a relay for the WAN, a
gateway). Times are not scaled; bytes and output tokens are. Every run serves the same list of
requests: one run keeps the plan's threshold (`static`: the loop is off), and one run uses each
--policy. In each run the relay drops to --share of its rate for --seconds. The link has --gbps
instead of the case study's 100 Gbps, which are ten times what the load needs. Prints a table, then
JSON:

\b
  runs      offloaded shares before, during (from 2 s on) and after (from 10 s on) the episode; TTFT
            of the requests that arrived during it; when the gateway's verdict on the link changed
  verdicts  per policy, compared with the static run
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from prfaas.clock import Clock, MonotonicClock
from prfaas.config import Deployment, load_deployment
from prfaas.config.deployment import SchedulerSection
from prfaas.demo.shared import run_watched
from prfaas.demo.small_case import SmallCase, failures, small_case
from prfaas.display.console import console, print_json, rounded, run_benchmark
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import Child
from prfaas.launch.commands import relayed_links
from prfaas.launch.deployment import (
    RunningDeployment,
    RunningHosts,
    launched_gateway,
    launched_hosts,
)
from prfaas.launch.preparation import Wan
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.measure.summary import LatencySummary, summarise_latencies
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
SCALES = Scales(time=1.0, bytes=1 / 128, output=1 / 32)
STATIC = "static"
CALM_S = 30.0  # load before and after the episode
DROPS_S = 2.0
RESUMES_S = 10.0
RESUMED_SHARE = 0.75  # of the share offloaded before the episode
LESS = 0.4  # share of the static run's P90 TTFT that the loop must save
LOOK_S = 0.1
LOG_LINE_S = 10.0  # timeout for the gateway's log line about a request


@dataclass(frozen=True, slots=True)
class Look:
    """The gateway's state of the WAN at one moment."""

    at_s: float
    verdict: int
    believed_bps: float | None
    threshold_factor: float


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    ttft_s: float | None
    offloaded: bool


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    requests: list[Request]
    looks: list[Look]
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Episode:
    """When the WAN is slow, in seconds since the load began, and the share of its rate then."""

    start_s: float
    stop_s: float
    share: float


def rules_of(name: str, stated: SchedulerSection) -> SchedulerSection:
    if name == STATIC:
        fixed = msgspec.structs.replace(stated.paper, limit=1.0)
        return msgspec.structs.replace(stated, policy="paper", paper=fixed)
    return msgspec.structs.replace(stated, policy=name)


async def measure(
    case: SmallCase, names: Sequence[str], arrivals: Arrivals, episode: Episode, folder: Path
) -> list[Run]:
    runs = []
    async with launched_hosts(case.deployment, case.engines, folder, attached_prefix()) as hosts:
        for name in names:
            click.echo(f"{name}: {len(arrivals)} requests", err=True)
            rules = rules_of(name, case.deployment.scheduler)
            changed = msgspec.structs.replace(case.deployment, scheduler=rules)
            runs.append(
                await run_watched(hosts.children, served(name, hosts, changed, arrivals, episode))
            )
    return runs


async def served(
    name: str, hosts: RunningHosts, deployment: Deployment, arrivals: Arrivals, episode: Episode
) -> Run:
    clock = MonotonicClock()
    logged = RequestOutcomes()
    (link,) = relayed_links(hosts.deployment)
    relay = hosts.children.named(link.name)
    looks: list[Look] = []
    async with (
        launched_gateway(hosts, deployment, on_line=logged.read_line) as live,
        connect(live.gateway_url, clock) as target,
    ):
        assert target.model is not None
        ask = RequestTemplate(target.model, salt=secrets.token_hex(8))
        began_s = clock.now()
        slowing = asyncio.create_task(slowed(relay, link.link.gbps, episode, began_s, clock))
        watching = asyncio.create_task(watch(live, looks, began_s, clock))
        try:
            outcomes = await offer_load(target, arrivals, ask, PromptGenerator(), clock)
            await slowing
            async with asyncio.timeout(LOG_LINE_S):
                routed = [await logged.of(one.request_id) for one in outcomes]
        finally:
            slowing.cancel()
            watching.cancel()
            await asyncio.gather(slowing, watching, return_exceptions=True)
    requests = [
        Request(one.at_s, one.ttft_s, outcome.route == "remote")
        for one, outcome in zip(outcomes, routed, strict=True)
    ]
    return Run(name, requests, looks, failures(outcomes))


async def slowed(
    relay: Child[Any], gbps: float, episode: Episode, began_s: float, clock: Clock
) -> None:
    for at_s, share in ((episode.start_s, episode.share), (episode.stop_s, 1.0)):
        await asyncio.sleep(max(0.0, began_s + at_s - clock.now()))
        relay.write_line(f"gbps {gbps * share:g}")


async def watch(live: RunningDeployment, looks: list[Look], began_s: float, clock: Clock) -> None:
    while True:
        state = await live.state()
        (link,) = (link for link in state["links"] if link["from"] != link["to"])
        at_s = clock.now() - began_s
        looks.append(Look(at_s, link["verdict"], link["believed_bps"], state["threshold_factor"]))
        await asyncio.sleep(LOOK_S)


# Results -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one run. `noticed_s` counts from the start of the episode, `cleared_s` and
    `resumed_s` count from its end."""

    requests: int
    failures: dict[str, int]
    offloaded_before: float  # share of the requests that arrived in that time
    offloaded_during: float
    offloaded_after: float
    ttft_before_s: LatencySummary | None
    ttft_during_s: LatencySummary | None  # of the requests that arrived during the episode
    noticed_s: float | None  # until the gateway's verdict was worse than clear
    cleared_s: float | None  # until the verdict was clear again
    resumed_s: float | None  # until a request that arrived after the episode was offloaded


def figures(run: Run, episode: Episode) -> Figures:
    def arrived(start_s: float, stop_s: float) -> list[Request]:
        return [one for one in run.requests if start_s <= one.at_s < stop_s]

    def share(requests: Sequence[Request]) -> float:
        return sum(one.offloaded for one in requests) / max(1, len(requests))

    start_s, stop_s = episode.start_s, episode.stop_s
    before = arrived(0.0, start_s)
    noticed = [look.at_s for look in run.looks if look.at_s >= start_s and look.verdict]
    clear = [look.at_s for look in run.looks if look.at_s >= stop_s and not look.verdict]
    again = [one.at_s for one in run.requests if one.at_s >= stop_s and one.offloaded]
    return Figures(
        requests=len(run.requests),
        failures=run.failures,
        offloaded_before=share(before),
        offloaded_during=share(arrived(start_s + DROPS_S, stop_s)),
        offloaded_after=share(arrived(stop_s + RESUMES_S, np.inf)),
        ttft_before_s=summarise_latencies(one.ttft_s for one in before),
        ttft_during_s=summarise_latencies(one.ttft_s for one in arrived(start_s, stop_s)),
        noticed_s=min(noticed) - start_s if noticed else None,
        cleared_s=min(clear) - stop_s if clear else None,
        resumed_s=min(again) - stop_s if again else None,
    )


def verdicts(loop: Figures, static: Figures) -> dict[str, bool]:
    assert loop.ttft_during_s is not None and static.ttft_during_s is not None
    saved = 1 - loop.ttft_during_s.p90 / static.ttft_during_s.p90
    return {
        f"offloading drops within {DROPS_S:g} s": loop.offloaded_during
        <= loop.offloaded_before / 2,
        "no request fails": not loop.failures and not static.failures,
        f"P90 TTFT is at least {LESS:.0%} lower": saved >= LESS,
        f"offloading resumes within {RESUMES_S:g} s": loop.offloaded_after
        >= loop.offloaded_before * RESUMED_SHARE
        and loop.resumed_s is not None
        and loop.resumed_s <= RESUMES_S,
    }


def show(screen: Console, found: dict[str, Figures], held: dict[str, dict[str, bool]]) -> None:
    table = Table(
        title=f"offloaded: before, from {DROPS_S:g} s into the episode, from {RESUMES_S:g} s after "
        "it; TTFT of the requests that arrived during it (s)",
        title_justify="left",
    )
    for column in ("", "before", "during", "after", "TTFT mean", "P50", "P90", "noticed", "clear"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seen in found.items():
        assert seen.ttft_during_s is not None
        ttft = seen.ttft_during_s
        shares = (seen.offloaded_before, seen.offloaded_during, seen.offloaded_after)
        moments = (seen.noticed_s, seen.cleared_s)
        table.add_row(
            name,
            *(f"{share:.0%}" for share in shares),
            *(f"{value:.1f}" for value in (ttft.mean, ttft.p50, ttft.p90)),
            *("-" if value is None else f"{value:.1f} s" for value in moments),
        )
    screen.print(table)
    for name, claims in held.items():
        for claim, holds in claims.items():
            screen.print(f"{'ok    ' if holds else 'FAILED'} {name}: {claim}", markup=False)


@click.command(help=__doc__)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["adaptive"],
    show_default=True,
    type=click.Choice(["adaptive", "paper"]),
    help="Policy to compare with the static threshold; repeatable.",
)
@click.option("--gbps", default=10.0, show_default=True, help="Rate of the WAN.")
@click.option(
    "--load", default=0.4, show_default=True, help="Load as a share of the planned capacity."
)
@click.option(
    "--share", default=0.05, show_default=True, help="Share of the rate that the slow WAN keeps."
)
@click.option("--seconds", default=30.0, show_default=True, help="Seconds that the WAN is slow.")
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Folder for logs.  [default: none are kept]"
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON, no table.")
def main(
    policies: tuple[str, ...],
    gbps: float,
    load: float,
    share: float,
    seconds: float,
    seed: int,
    logs: Path | None,
    as_json: bool,
) -> None:
    if not (0 < share < 1 and seconds > DROPS_S and load > 0):
        raise InputError(
            "an option is out of range", fix="give a share between 0 and 1, a load, a few seconds"
        )
    stated = load_deployment(CASE_STUDY)
    episode = Episode(CALM_S, CALM_S + seconds, share)
    with tempfile.TemporaryDirectory(prefix="prfaas-episode-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        case = small_case(stated, CASE_STUDY, folder, SCALES, wan=Wan(gbps=gbps))
        rps = load * find_optimum(case.problem).capacity_rps
        count = round(rps * (episode.stop_s + CALM_S))
        arrivals = poisson(case.problem.workload, rps, count, seed)
        names = [STATIC, *policies]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs = runner.run(measure(case, names, arrivals, episode, folder))
    found = {run.name: figures(run, episode) for run in runs}
    held = {name: verdicts(found[name], found[STATIC]) for name in policies}
    if not as_json:
        show(console(), found, held)
    print_json(
        {
            "cores": os.cpu_count(),
            "offered_rps": round(rps, 3),
            "link_gbps": gbps,
            "episode": asdict(episode),
            "runs": {name: rounded(asdict(seen), 3) for name, seen in found.items()},
            "verdicts": held,
        }
    )


if __name__ == "__main__":
    run_benchmark(main)
