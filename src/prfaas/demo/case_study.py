"""The demo's second part: the scaled-down case study on emulated accelerators, under three
deployments, compared with the planner and with a simulation of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from prfaas.config import Deployment, load_deployment
from prfaas.demo.disturbance import LIMIT
from prfaas.demo.judgement import Row, better_of, judge_rows
from prfaas.demo.shared import Check, RelayReader, run_watched, with_policy
from prfaas.demo.small_case import (
    SYSTEMS,
    SmallCase,
    egress_gbps,
    failures,
    first_token_stats,
    first_tokens_s,
    lost_requests,
    run_load,
    shared_hosts,
    small_case,
    with_one_plan,
)
from prfaas.display.plan_tables import TITLES
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import RunningHosts, launched_hosts
from prfaas.measure.open_loop import RequestResult
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate

SCALES = Scales(time=0.5, bytes=1 / 576, output=1 / 32)  # 2 bytes per token and MLA layer
LOAD = 0.95  # share of PrfaaS-PD's planned capacity; more than its baselines can serve
SECONDS = 20.0  # real seconds of load for each deployment
FIRST_TOKENS_S = 120.0  # after the last arrival; only a lost request takes longer


async def measure_case_study(
    file: Path,
    folder: Path,
    screen: Console,
    say: Callable[[str], None],
    *,
    double_threshold: bool = False,
) -> list[Check]:
    """With `double_threshold` the live PrfaaS-PD deployment keeps prompts of up to twice the
    planned threshold in the local cluster, while the simulator keeps the plan. The comparison must
    then fail."""
    deployment = with_policy(load_deployment(file), "paper")
    cases = {name: small_case(deployment, file, folder, SCALES, name) for name in SYSTEMS}
    first = cases[SYSTEMS[0]].problem
    load_rps = LOAD * find_optimum(first).capacity_rps
    arrivals = poisson(first.workload, load_rps, round(load_rps * SECONDS), seed=0)
    rows = []
    relay_reader = RelayReader()
    most = shared_hosts(cases)
    async with launched_hosts(
        most.deployment,
        most.engines,
        folder,
        attached_prefix(),
        say=say,
        on_line=relay_reader.read_line,
    ) as hosts:
        for name, case in cases.items():
            served = with_one_plan(case.deployment)
            if double_threshold and name == SYSTEMS[0]:
                served = with_doubled_threshold(served, case.problem)
            say(f"{TITLES[name]}: {len(arrivals)} requests in {SECONDS:g} s")
            row = await _measure(name, case, served, hosts, arrivals, relay_reader)
            if row.disturbed:
                say(f"the machine was too busy; measuring again: {_disturbance(row)}")
                again = await _measure(name, case, served, hosts, arrivals, relay_reader)
                row = better_of(row, again)
            say(f"disturbance: {_disturbance(row)}")
            rows.append(row)
    screen.print(_table(rows, load_rps * SCALES.time, deployment))
    screen.print(
        f"One decode step emulates {1 / SCALES.output:g} tokens and takes as long as all of them. "
        "A request waits for the current step, so TTFTs, live and simulated, are longer than in "
        "the case study."
    )
    return judge_rows(rows)


async def _measure(
    name: str,
    case: SmallCase,
    served: Deployment,
    hosts: RunningHosts,
    arrivals: Arrivals,
    relay_reader: RelayReader,
) -> Row:
    # The baselines cannot serve this load: waiting for all of their requests would double the time.
    # For PrfaaS-PD every request is awaited, and a request without a first token is lost.
    waits = name == SYSTEMS[0]
    load = run_load(
        hosts, served, arrivals, relay_reader, first_tokens_s=FIRST_TOKENS_S if waits else 0.0
    )
    live = await run_watched(hosts.children, load)
    config = SimConfig(scheduler=case.deployment.scheduler, replans=False)
    simulated = simulate(case.problem, arrivals, config).requests
    return Row(
        name,
        first_token_stats(arrivals.at_s, first_tokens_s(arrivals, live.outcomes), SCALES),
        first_token_stats(arrivals.at_s, simulated.first_token_s, SCALES),
        find_optimum(case.problem).capacity_rps * SCALES.time,
        egress_gbps(live.egress_bps, SCALES) if case.problem.remotes else None,
        _failures(live.outcomes, waits),
        live.disturbance,
    )


def _failures(outcomes: Sequence[RequestResult], all_waited_for: bool) -> dict[str, int]:
    missing = lost_requests(outcomes) if all_waited_for else 0
    return {**failures(outcomes), **({"lost": missing} if missing else {})}


def with_doubled_threshold(deployment: Deployment, problem: Problem) -> Deployment:
    """The deployment with the planned roles and twice the planned threshold."""
    plan = find_optimum(problem)
    doubled = min(2 * plan.threshold_tokens, problem.workload.max_new_tokens)
    (local,) = deployment.of_kind("pd")
    split = msgspec.structs.replace(
        local, prefill=plan.n_prefill, decode=local.instances - plan.n_prefill
    )
    return msgspec.structs.replace(
        deployment,
        clusters=[split if c.name == local.name else c for c in deployment.clusters],
        scheduler=msgspec.structs.replace(deployment.scheduler, threshold_tokens=doubled),
    )


def _disturbance(row: Row) -> str:
    return f"{row.disturbance.describe()}; the limit is {LIMIT:.0%}"


def _table(rows: Sequence[Row], load_rps: float, deployment: Deployment) -> Table:
    gpus = sum(cluster.gpus for cluster in deployment.clusters)
    table = Table(
        title=f"{gpus} emulated GPUs of the case study (time x {SCALES.time:g}, bytes x "
        f"{SCALES.bytes:.2g}, output x {SCALES.output:.2g}) under {load_rps:.2f} requests/s: "
        "first tokens per second, and TTFT mean / P90 in seconds",
        title_justify="left",
    )
    table.add_column("")
    for column in (
        "live",
        "simulated",
        "planned capacity",
        "TTFT live",
        "TTFT simulated",
        "egress (Gbps)",
        "disturbance",
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
            f"{row.disturbance.share:.1%}",
        )
    return table
