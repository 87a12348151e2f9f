"""`prfaas simulate`: simulates a deployment under a trace or random traffic."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from prfaas.cli.html_page import check_html, write_html
from prfaas.cli.workers_options import workers_options
from prfaas.config import Deployment, load_deployment
from prfaas.console.simulation_report import MOST_FRAMES, ReportedRun, simulation_report
from prfaas.display.console import console, print_json, progress_bar
from prfaas.display.simulation_tables import (
    cluster_tables,
    notes,
    runs_table,
    saturated_table,
    shortfall,
)
from prfaas.display.text_tables import text_table
from prfaas.errors import InputError
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.scheduler.homes.plans import as_network, planned_rps
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.sim.arrivals import Arrivals, poisson_at_homes, replay
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.results.service_level import ServiceLevel, idle_service_level
from prfaas.sim.results.summary import Summary, summarise
from prfaas.sim.results.timeline import chrome_trace
from prfaas.sim.run import simulate as run_simulation
from prfaas.studies.network_plans import deployment_problem
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import Workers
from prfaas.studies.saturation import saturate, saturated_as_dict
from prfaas.studies.simulation_cases import (
    BASELINES,
    POLICIES,
    Case,
    Policy,
    cache_config,
    link_changes,
    make_cases,
    planned_for,
    read_requests,
)

DEFAULT_REQUESTS = 10_000
# A simulated request takes about so long; prefix caches on every node make the difference.
SECONDS_PER_REQUEST = 1e-4
SECONDS_PER_CACHED_REQUEST = 1e-3


class ManyValued(click.Command):
    """Lets several values follow one flag: `--policy paper adaptive`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        choices: dict[str, set[str]] = {"--policy": set(POLICIES), "--baseline": set(BASELINES)}
        spread: list[str] = []
        flag = ""  # the flag whose further values may follow
        for index, arg in enumerate(args):
            follows = index > 0 and args[index - 1] != flag and arg in choices.get(flag, set())
            spread += [flag, arg] if follows else [arg]
            if arg.startswith("-"):
                flag = arg
        return super().parse_args(ctx, spread)


@click.command(cls=ManyValued)
@click.argument("deployment", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    type=click.Choice(POLICIES),
    multiple=True,
    help="Routing policies to compare.  [default: the policy of the deployment file]",
)
@click.option(
    "--baseline",
    "others",
    type=click.Choice(list(BASELINES)),
    multiple=True,
    help="Baseline deployments to compare with.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Trace of requests in Mooncake's format, .jsonl or .jsonl.xz.",
)
@click.option(
    "--load",
    type=float,
    help="Poisson arrivals per second.  "
    f"[default: {DEFAULT_UTILISATION:.0%} of the planned capacity]",
)
@click.option(
    "--requests", type=int, help=f"Number of Poisson arrivals.  [default: {DEFAULT_REQUESTS}]"
)
@click.option("--speedup", type=float, help="Factor by which the trace is replayed faster.")
@click.option(
    "--link-trace",
    type=click.Path(path_type=Path),
    help="File with lines `at_s,gbps`: the rate of all links of prfaas clusters from each time on. "
    "A line `at_s,gbps,from,to` is for one link.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random numbers.")
@click.option(
    "--plot", type=click.Path(path_type=Path, file_okay=False), help="Folder to write plots to."
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    help="File to write a Chrome trace of every request to, for ui.perfetto.dev.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="File to write a page to that replays the runs in a browser. It needs no other file.",
)
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def simulate(
    deployment: Path,
    policies: tuple[Policy, ...],
    others: tuple[str, ...],
    trace: Path | None,
    load: float | None,
    requests: int | None,
    speedup: float | None,
    link_trace: Path | None,
    seed: int,
    plot: Path | None,
    timeline: Path | None,
    html: Path | None,
    workers: Workers,
    as_json: bool,
) -> None:
    """Simulate DEPLOYMENT.toml under a trace or random traffic, and compare routing policies.

    The simulator runs the gateway's scheduler on simulated nodes and links. Without --trace,
    requests arrive at random (Poisson) with the prompt lengths that the deployment file states, at
    several pd clusters by their shares of traffic. With --trace they arrive as recorded, and every
    node has a prefix cache.

    \b
    Policies (the same hardware):    Baselines (other hardware):
      paper     threshold, 3.4.3       homogeneous  one PD cluster, same number of GPUs
      adaptive  predicted cost         equal_cost   one PD cluster of the same cost
      local     never offload          naive        every prefill remote, no threshold
      remote    always offload

    \b
      prfaas simulate configs/case_study.toml
      prfaas simulate configs/case_study.toml --baseline homogeneous naive
      prfaas simulate my.toml --policy paper adaptive --trace chat.jsonl.xz --plot out/
      prfaas simulate my.toml --link-trace outage.csv --timeline run.json
      prfaas simulate my.toml --policy paper adaptive --html report.html

    Goodput counts the requests that meet both targets of [slo]: the time per output token, and the
    TTFT. Where the deployment file has no slo.ttft_s, the target of a request's TTFT is 3 times its
    TTFT on the idle deployment.
    """
    started = time.perf_counter()
    _check_flags(trace, load, requests, speedup)
    if html is not None:
        check_html(html)
    parsed = load_deployment(deployment)
    problem = deployment_problem(deployment, parsed)
    base = SimConfig(
        replans=True,
        timeline=timeline is not None,
        moments=0 if html is None else MOST_FRAMES,
        round_trips=round_trips(parsed),
    )
    if trace is not None:
        if isinstance(problem, NetworkProblem):
            raise InputError(
                "a trace does not say at which of several pd clusters a request arrives",
                where="--trace",
                fix="use --load, or a deployment with one pd cluster",
            )
        rows = read_requests(trace, parsed)
        base = replace(base, cache=cache_config(parsed))
        try:
            arrivals = replay(rows, seed, speedup=speedup or 1.0)
        except InputError as error:
            raise error.in_file(trace) from None
        problem = planned_for(problem, arrivals)
    else:
        network = as_network(problem)
        try:
            load = load or DEFAULT_UTILISATION * planned_rps(network, "paper")
        except InputError as error:
            raise error.in_file(deployment) from None
        arrivals = poisson_at_homes(network, load, requests or DEFAULT_REQUESTS, seed)
    if link_trace is not None:
        base = replace(base, links=link_changes(link_trace, problem))
    cases = make_cases(parsed, problem, policies or (parsed.scheduler.policy,), others, base)

    each_s = SECONDS_PER_REQUEST if base.cache is None else SECONDS_PER_CACHED_REQUEST
    expected_s = each_s * len(arrivals) * len(cases)
    results = run_cases(cases, arrivals, workers, expected_s)
    service_levels = _service_levels(parsed, cases, arrivals, workers, expected_s)
    summaries = {name: summarise(result, service_levels[name]) for name, result in results.items()}
    saturated = (
        saturate(deployment, cases, arrivals, service_levels, workers, expected_s) if others else []
    )
    source = "Poisson arrivals" if trace is None else trace.name
    title = f"{parsed.model.name}, {source}, {arrivals.mean_rps:.2f} requests/s"
    written = _write(results, plot, timeline)
    if html is not None:
        runs = _reported_runs(cases, results, summaries)
        tables = [text_table(saturated_table(saturated))] if saturated else []
        report_data = simulation_report(title, parsed.model.name, runs, tables)
        written.append(write_html(html, title, report_data))
    wall_s = time.perf_counter() - started
    if as_json:
        report: dict[str, Any] = {
            "runs": {name: summary.as_dict() for name, summary in summaries.items()}
        }
        if saturated:
            report["saturated"] = saturated_as_dict(saturated)
        if written:
            report["written"] = [str(path) for path in written]
        print_json({**report, "wall_s": wall_s})
        return
    out = console()
    out.print(runs_table(summaries, title))
    for name, summary in summaries.items():
        for table in cluster_tables(name, summary):
            out.print(table)
    if saturated:
        out.print(saturated_table(saturated))
    out.print(notes(summaries, wall_s))
    for path in written:
        out.print(f"wrote {path}")


def run_cases(
    cases: Mapping[str, Case], arrivals: Arrivals, workers: Workers, expected_s: float
) -> dict[str, Result]:
    with progress_bar("simulated", len(cases)) as show:
        if len(cases) == 1 and workers.cluster is None:
            # Alone, a case shows how far it is.
            ((name, case),) = cases.items()
            return {name: run_simulation(case.problem, arrivals, case.config, progress=show)}
        run = partial(_run_case, arrivals)
        return run_all(run, cases, workers, progress=show, expected_s=expected_s)


def _run_case(arrivals: Arrivals, case: Case) -> Result:
    return run_simulation(case.problem, arrivals, case.config)


def _service_levels(
    deployment: Deployment,
    cases: Mapping[str, Case],
    arrivals: Arrivals,
    workers: Workers,
    expected_s: float,
) -> dict[str, ServiceLevel]:
    slo = deployment.slo
    tpot_s = 1 / slo.output_tokens_per_s
    if slo.ttft_s is not None:
        return dict.fromkeys(cases, ServiceLevel(slo.ttft_s, tpot_s))
    # Policies on the same deployment share one.
    first: dict[Problem | NetworkProblem, str] = {}
    for name, case in cases.items():
        first.setdefault(case.problem, name)
    different = {name: cases[name] for name in first.values()}
    found = run_all(
        partial(_service_level, arrivals, tpot_s), different, workers, expected_s=expected_s
    )
    return {name: found[first[case.problem]] for name, case in cases.items()}


def _service_level(arrivals: Arrivals, tpot_s: float, case: Case) -> ServiceLevel:
    return idle_service_level(case.problem, arrivals, case.config, tpot_s)


def _check_flags(
    trace: Path | None, load: float | None, requests: int | None, speedup: float | None
) -> None:
    if trace is not None and (load is not None or requests is not None):
        raise InputError(
            "--load and --requests do not apply to a trace, which has its own requests and times",
            where="--trace",
            fix="use --speedup instead",
        )
    if trace is None and speedup is not None:
        raise InputError(
            "only a trace can be sped up", where="--speedup", fix="add --trace, or use --load"
        )
    for flag, value in (("--load", load), ("--speedup", speedup)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{value} is out of range", where=flag, fix="give a positive number")
    if requests is not None and requests < 2:
        raise InputError(f"{requests} is too few", where="--requests", fix="give at least 2")


def _reported_runs(
    cases: Mapping[str, Case], results: Mapping[str, Result], summaries: Mapping[str, Summary]
) -> list[ReportedRun]:
    figures = text_table(runs_table(summaries, ""))
    runs = []
    for column, (name, summary) in enumerate(summaries.items(), start=1):
        problem = shortfall(summary)
        runs.append(
            ReportedRun(
                name=figures.columns[column],
                config=cases[name].config,
                result=results[name],
                summary=[(row[0], row[column]) for row in figures.rows],
                tables=[text_table(table) for table in cluster_tables(name, summary)],
                notes=[] if problem is None else [problem],
            )
        )
    return runs


def _write(results: Mapping[str, Result], plot: Path | None, timeline: Path | None) -> list[Path]:
    written: list[Path] = []
    if plot is not None:
        # The import is here because matplotlib is an optional dependency and slow to import.
        from prfaas.display.simulation_plots import simulate_plots

        written += simulate_plots(plot, results)
    if timeline is not None:
        timeline.parent.mkdir(parents=True, exist_ok=True)
        timeline.write_text(json.dumps(chrome_trace(results)), encoding="utf-8")
        written.append(timeline)
    return written
