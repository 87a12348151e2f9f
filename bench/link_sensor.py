"""The link sensor, live: no false alarm on a calm link, and fast detection of a slow one.

\b
    python -m prfaas_lab bench link_sensor [--calm-s 300] [--stalls 6] [--trials 20]
                                           [--record FOLDER]

Processes stand in for the case study's hardware (emulated engines, kvds, a relay for the WAN, a
gateway). The load uses about a tenth of the WAN. The benchmark has three parts:

1. The load runs for --calm-s. Every verdict that is worse than clear is a false alarm.

2. Kvds are stopped for a second, --stalls times, while they send or receive. The link does not
cause these stalls, so a verdict that is worse than clear is a false alarm here too.

3. The relay drops to --share of its rate, --trials times, while it carries the KV of a long prompt.
The result is the time until the gateway believes a rate within a factor of two of the true one. It
counts from the drop, which comes before the first byte that waits.

Prints JSON:

\b
  calm      how full the link was, verdicts worse than clear and their causes, kvds' lag
  stalls    of each: which kvds were stopped, and the worst verdict afterwards
  trials    of each: seconds until the believed rate was right, the rate believed 3 s after the
            drop, the true rate
  verdicts  no false alarm; every trial right within 3 s

--record writes the link reports that the gateway received in each part, one JSON line per report.
Tests evaluate these recorded streams again.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec
import numpy as np
import uvloop
from rich.progress import Progress

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, load_deployment
from prfaas.demo.shared import run_watched
from prfaas.demo.small_case import SmallCase, small_case
from prfaas.display.console import print_json, rounded, run_benchmark
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import Child
from prfaas.launch.commands import relayed_links
from prfaas.launch.deployment import RunningHosts, launched_gateway, launched_hosts
from prfaas.launch.preparation import Wan
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson
from prfaas.studies.problem_files import Study

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
SCALES = Scales(time=1.0, bytes=1 / 128, output=1 / 32)
LOOK_S = 0.05
WARM_S = 15.0  # the first hand-offs end before
KNOWN_WITHIN_S = 3.0
FACTOR = 2.0
LONG_TOKENS = 100_000  # its transfer takes some seconds
GIVEN_UP_S = 60.0
STALL_S = 1.0
AFTER_S = 3.0  # a verdict comes before
RECOVERED_S = 60.0  # timeout for a clear verdict after a trial


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    verdict: int
    cause: str
    believed_bps: float | None
    stats: dict[str, Any] | None


@dataclass(slots=True)
class Watch:
    """The gateway's states of the link, in the order of the polls."""

    looks: list[Look] = field(default_factory=list)
    record: TextIO | None = None
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, at_s: float, link: dict[str, Any]) -> None:
        stats = link["stats"]
        before = self.looks[-1].stats if self.looks else None
        if self.record is not None and stats is not None and stats != before:
            self.record.write(msgspec.json.encode(rounded(stats, 4)).decode() + "\n")
        self.looks.append(Look(at_s, link["verdict"], link["cause"], link["believed_bps"], stats))
        self.looked.set()

    async def until(self, holds: Callable[[Look], bool]) -> None:
        while not holds(self.looks[-1]):
            await self.looked.wait()
            self.looked.clear()

    def since(self, at_s: float) -> list[Look]:
        return [look for look in self.looks if look.at_s >= at_s]


@dataclass(frozen=True, slots=True)
class Trial:
    truth_bps: float
    right_after_s: float | None  # since the drop; None: not within the trial
    believed_bps: float | None  # at the end of `KNOWN_WITHIN_S`
    verdict: int  # at the same time

    @property
    def held(self) -> bool:
        return (
            self.right_after_s is not None
            and self.right_after_s <= KNOWN_WITHIN_S
            and near(self.believed_bps, self.truth_bps)
        )


@dataclass(frozen=True, slots=True)
class Stall:
    stopped: str  # all kvds that send, or all kvds that receive
    worst_verdict: int
    cause: str


def near(believed_bps: float | None, truth_bps: float) -> bool:
    return believed_bps is not None and truth_bps / FACTOR <= believed_bps <= truth_bps * FACTOR


def trial_of(looks: list[Look], dropped_s: float, truth_bps: float) -> Trial:
    right = [look.at_s for look in looks if near(look.believed_bps, truth_bps)]
    last = [look for look in looks if look.at_s <= dropped_s + KNOWN_WITHIN_S][-1]
    return Trial(
        truth_bps,
        right[0] - dropped_s if right else None,
        last.believed_bps,
        last.verdict,
    )


@asynccontextmanager
async def loaded(
    hosts: RunningHosts,
    case: SmallCase,
    rps: float,
    seconds: float,
    seed: int,
    record: TextIO | None,
) -> AsyncIterator[tuple[Callable[[], Awaitable[None]], Watch]]:
    """Starts a gateway under an open-loop load. Yields a function that sends one more, long prompt,
    and a watch on the link."""
    clock = MonotonicClock()
    watch = Watch(record=record)
    arrivals = poisson(case.problem.workload, rps, max(1, round(rps * seconds)), seed)
    async with (
        launched_gateway(hosts, case.deployment) as live,
        connect(live.gateway_url, clock) as target,
    ):
        assert target.model is not None
        ask = RequestTemplate(target.model, salt=secrets.token_hex(8))

        async def look() -> None:
            while True:
                state = await live.state()
                (link,) = (link for link in state["links"] if link["from"] != link["to"])
                watch.add(clock.now(), link)
                await asyncio.sleep(LOOK_S)

        async def send_long() -> None:
            arrivals = Arrivals(
                np.zeros(1), np.array([LONG_TOKENS]), np.zeros(1, np.int64), np.ones(1, np.int64)
            )
            name = RequestTemplate(ask.model, salt=secrets.token_hex(8))
            await offer_load(target, arrivals, name, PromptGenerator(), clock, give_up_s=GIVEN_UP_S)

        tasks = [
            asyncio.create_task(look()),
            asyncio.create_task(
                offer_load(
                    target,
                    arrivals,
                    ask,
                    PromptGenerator(),
                    clock,
                    give_up_s=float(arrivals.at_s[-1]),
                )
            ),
        ]
        try:
            await asyncio.sleep(WARM_S)
            yield send_long, watch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def calm_run(
    hosts: RunningHosts,
    case: SmallCase,
    rps: float,
    seconds: float,
    seed: int,
    record: TextIO | None,
) -> dict[str, Any]:
    clock = MonotonicClock()
    async with loaded(hosts, case, rps, seconds + WARM_S, seed, record) as (_, watch):
        began_s = clock.now()
        with Progress(transient=True) as bar:
            job = bar.add_task("calm link", total=seconds)
            while clock.now() - began_s < seconds:
                await asyncio.sleep(1.0)
                bar.update(job, completed=clock.now() - began_s)
        looks = watch.since(began_s)
    reports = {look.stats["at_s"]: look.stats for look in looks if look.stats is not None}
    false = [look for look in looks if look.verdict > 0]
    (link,) = case.deployment.links[:1]
    full_bps = link.gbps * 1e9
    return {
        "seconds": seconds,
        "reports": len(reports),
        "utilisation": sum(r["goodput_bps"] for r in reports.values())
        / max(1, len(reports))
        / full_bps,
        "false_alarm_looks": len(false),
        "false_alarm_causes": sorted({look.cause for look in false}),
        "longest_wait_s": max((r["waited_s"] for r in reports.values()), default=0.0),
        "latest_sender_s": max((r["late_s"] for r in reports.values()), default=0.0),
    }


async def stall_runs(
    hosts: RunningHosts, case: SmallCase, rps: float, stalls: int, seed: int, record: TextIO | None
) -> list[Stall]:
    found: list[Stall] = []
    clock = MonotonicClock()
    local = case.deployment.of_kind("pd")[0].name
    senders = [child for child in hosts.children if is_kvd(child) and local not in child.name]
    receivers = [child for child in hosts.children if is_kvd(child) and local in child.name]
    most_s = WARM_S + stalls * (STALL_S + AFTER_S + GIVEN_UP_S)
    async with loaded(hosts, case, rps, most_s, seed + 2, record) as (send_long, watch):
        with Progress(transient=True) as bar:
            for number in bar.track(range(stalls), description="stopped processes"):
                kind, some = ("receivers", receivers) if number % 2 else ("senders", senders)
                sending = asyncio.ensure_future(send_long())
                async with asyncio.timeout(GIVEN_UP_S):
                    await watch.until(travels)
                began_s = clock.now()
                for child in some:
                    child.freeze()
                try:
                    await asyncio.sleep(STALL_S)
                finally:
                    for child in some:
                        child.thaw()
                await asyncio.sleep(AFTER_S)
                worst = max(watch.since(began_s), key=lambda look: look.verdict)
                found.append(Stall(kind, worst.verdict, worst.cause))
                async with asyncio.timeout(RECOVERED_S):
                    await sending
                    await watch.until(recovered)
    return found


def is_kvd(child: Child[Any]) -> bool:
    return child.name.startswith("kvd-")


async def trial_runs(
    hosts: RunningHosts,
    case: SmallCase,
    rps: float,
    trials: int,
    share: float,
    seed: int,
    record: TextIO | None,
) -> list[Trial]:
    clock = MonotonicClock()
    dice = random.Random(seed)
    (link,) = relayed_links(hosts.deployment)
    relay: Child[Any] = hosts.children.named(link.name)
    found: list[Trial] = []
    most_s = WARM_S + trials * (KNOWN_WITHIN_S + RECOVERED_S)
    async with loaded(hosts, case, rps, most_s, seed + 1, record) as (send_long, watch):
        with Progress(transient=True) as bar:
            for _ in bar.track(range(trials), description="throttled link"):
                await asyncio.sleep(dice.uniform(0.5, 2.0))
                sending = asyncio.ensure_future(send_long())
                async with asyncio.timeout(GIVEN_UP_S):
                    await watch.until(travels)
                relay.write_line(f"gbps {link.link.gbps * share:g}")
                dropped_s = clock.now()
                await asyncio.sleep(KNOWN_WITHIN_S + 1.0)
                truth_bps = link.link.gbps * share * 1e9
                found.append(trial_of(watch.since(dropped_s), dropped_s, truth_bps))
                relay.write_line(f"gbps {link.link.gbps:g}")
                async with asyncio.timeout(RECOVERED_S):
                    await sending
                    await watch.until(recovered)
    return found


def travels(look: Look) -> bool:
    """Whether the link carries enough for a sender to notice a stall."""
    return look.stats is not None and look.stats["goodput_bps"] > 2e6


def recovered(look: Look) -> bool:
    waits = look.stats is not None and look.stats["waited_s"] > 0.1
    return look.verdict == 0 and look.believed_bps is None and not waits


@click.command(help=__doc__)
@click.option(
    "--calm-s", default=300.0, show_default=True, help="Seconds of the calm run; 0 for none."
)
@click.option(
    "--stalls", default=6, show_default=True, help="Number of times that kvds are stopped."
)
@click.option(
    "--trials", default=20, show_default=True, help="Number of times that the link is throttled."
)
@click.option(
    "--share",
    default=0.05,
    show_default=True,
    help="Share of its rate that a throttled link keeps.",
)
@click.option(
    "--load", default=0.3, show_default=True, help="Load as a share of the planned capacity."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option(
    "--record", type=click.Path(path_type=Path), help="Folder to write the link reports to."
)
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Folder for logs.  [default: none are kept]"
)
def main(
    calm_s: float,
    stalls: int,
    trials: int,
    share: float,
    load: float,
    seed: int,
    record: Path | None,
    logs: Path | None,
) -> None:
    if not (0 < share < 0.5 and load > 0 and calm_s >= 0 and trials >= 0):
        raise InputError(
            "an option is out of range", fix="give --share between 0 and 0.5, --load above 0"
        )
    stated = load_deployment(CASE_STUDY)
    with tempfile.TemporaryDirectory(prefix="prfaas-link-sensor-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        planned = small_case(stated, CASE_STUDY, folder, SCALES)
        plan = find_optimum(planned.problem)
        rps = load * plan.capacity_rps
        # The load should use a tenth of the link. It uses a little less than planned: few requests
        # are offloaded during the warm-up, and a short sample differs from the plan.
        gbps = round(planned_egress_gbps(stated) * load * 8, 3)
        case = small_case(stated, CASE_STUDY, folder, SCALES, wan=Wan(gbps=gbps))

        async def measure() -> tuple[dict[str, Any] | None, list[Stall], list[Trial]]:
            calm, stopped, runs = None, [], []
            bps = case.deployment.links[0].gbps * 1e9
            async with launched_hosts(
                case.deployment, case.engines, folder, attached_prefix()
            ) as hosts:
                if calm_s:
                    with recording(record, "calm", bps, share) as out:
                        work = calm_run(hosts, case, rps, calm_s, seed, out)
                        calm = await run_watched(hosts.children, work)
                if stalls:
                    with recording(record, "stalls", bps, share) as out:
                        stalling = stall_runs(hosts, case, rps, stalls, seed, out)
                        stopped = await run_watched(hosts.children, stalling)
                if trials:
                    with recording(record, "throttled", bps, share) as out:
                        throttling = trial_runs(hosts, case, rps, trials, share, seed, out)
                        runs = await run_watched(hosts.children, throttling)
            return calm, stopped, runs

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            calm, stopped, runs = runner.run(measure())
    print_json(
        {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "link_gbps": gbps,
            "offered_rps": round(rps, 3),
            "calm": None if calm is None else rounded(calm, 4),
            "stalls": [asdict(stall) for stall in stopped],
            "trials": [rounded(asdict(run), 3) for run in runs],
            "verdicts": {
                "no verdict is worse than clear on a calm link": None
                if calm is None
                else not calm["false_alarm_looks"],
                "no verdict follows from a process that stops": not any(
                    stall.worst_verdict for stall in stopped
                ),
                f"the rate is known within {KNOWN_WITHIN_S:g} s": f"{sum(r.held for r in runs)} of "
                f"{len(runs)}",
            },
        }
    )


@contextmanager
def recording(folder: Path | None, part: str, bps: float, share: float) -> Iterator[TextIO | None]:
    """Opens a file for link reports. Its first line has the capacity of the link."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{part}.jsonl").open("w") as out:
        head = {"capacity_bps": round(bps), "throttled_bps": round(bps * share)}
        out.write(msgspec.json.encode(head).decode() + "\n")
        yield out


def planned_egress_gbps(stated: Deployment) -> float:
    """The rate at which the PrfaaS cluster sends at the planned capacity."""
    return Study(CASE_STUDY, "paper").plan(stated).prfaas_pd.egress_bps / 1e9


if __name__ == "__main__":
    run_benchmark(main)
