"""The demo's second scene: the paper's case study on emulated accelerators, made small, under three
deployments, beside what the planner and the simulator say of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prfaas.cli.child import tether
from prfaas.cli.demo_scene import Check, RelayEar, watched
from prfaas.cli.plan_tables import TITLES
from prfaas.cli.small_case import (
    SYSTEMS,
    Seen,
    egress_gbps,
    failures,
    first_tokens_s,
    hosts_enough,
    offered,
    seen,
    small_case,
)
from prfaas.config import Deployment, load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.running import launched_hosts
from prfaas.scheduler.plan import best_for
from prfaas.sim.arrivals import poisson
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

SCALES = Scales(time=0.5, bytes=1 / 576, output=1 / 32)  # 2 bytes per token and MLA layer
LOAD = 0.95  # of what PrfaaS-PD can carry, as planned; more than its baselines can
SECONDS = 20.0  # of this machine, for each deployment


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
    cases = {name: small_case(deployment, file, folder, SCALES, name) for name in SYSTEMS}
    first = cases[SYSTEMS[0]].problem
    load_rps = LOAD * best_for(first).capacity_rps
    arrivals = poisson(first.workload, load_rps, round(load_rps * SECONDS), seed=0)
    rows = []
    ear = RelayEar()
    most = hosts_enough(cases)
    async with launched_hosts(
        most.deployment, most.engines, folder, tether(), say=say, heard=ear.heard
    ) as hosts:
        for name, case in cases.items():
            say(f"{TITLES[name]}: {len(arrivals)} requests in {SECONDS:g} s")
            live = await watched(hosts.children, offered(hosts, case.deployment, arrivals, ear))
            config = SimConfig(scheduler=case.deployment.scheduler, replans=False)
            simulated = simulate(case.problem, arrivals, config).requests
            egress = egress_gbps(live.egress_bps, SCALES) if case.problem.remotes else None
            rows.append(
                Row(
                    name,
                    seen(arrivals.at_s, first_tokens_s(arrivals, live.outcomes), SCALES),
                    seen(arrivals.at_s, simulated.first_token_s, SCALES),
                    best_for(case.problem).capacity_rps * SCALES.time,
                    egress,
                    failures(live.outcomes),
                )
            )
    screen.print(_table(rows, load_rps * SCALES.time, deployment))
    screen.print(
        f"A decode step stands for {1 / SCALES.output:g} tokens and takes as long, so TTFT has more"
        " of it than the case study's, live and simulated alike."
    )
    return _checks(rows)


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
