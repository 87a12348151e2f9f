"""`prfaas simulate`: what would a policy have done with this traffic on this deployment?"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from prfaas.config import Deployment, load_deployment
from prfaas.display.console import console, print_json, progress_bar
from prfaas.display.simulation_tables import notes, runs_table, saturated_table
from prfaas.errors import InputError
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson, replay
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.results.service_level import ServiceLevel, idle_service_level
from prfaas.sim.results.summary import summarise
from prfaas.sim.results.timeline import chrome_trace
from prfaas.sim.run import simulate as run_simulation
from prfaas.studies.problem_files import Study
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


class ManyValued(click.Command):
    """Lets several values follow one flag: `--policy paper adaptive`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        choices: dict[str, set[str]] = {"--policy": set(POLICIES), "--baseline": set(BASELINES)}
        spread: list[str] = []
        flag = ""  # whose values may still follow
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
    help="Routing policy, one or several.  [default: the deployment's]",
)
@click.option(
    "--baseline",
    "others",
    type=click.Choice(list(BASELINES)),
    multiple=True,
    help="Other deployments to run beside it.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="Mooncake-format .jsonl or .xz.")
@click.option(
    "--load",
    type=float,
    help=f"Poisson requests/s.  [default: {DEFAULT_UTILISATION:.0%} of the capacity]",
)
@click.option("--requests", type=int, help=f"How many.  [default: {DEFAULT_REQUESTS}]")
@click.option("--speedup", type=float, help="Replay the trace so many times as fast.")
@click.option("--link-trace", type=click.Path(path_type=Path), help="Lines of at_s,gbps.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Write plots here.")
@click.option("--timeline", type=click.Path(path_type=Path), help="Write a Chrome trace here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    as_json: bool,
) -> None:
    """What would a policy have done with this traffic on DEPLOYMENT.toml?

    Runs the scheduler that the gateway runs, on simulated nodes and links. Without --trace,
    requests come at random with the lengths the deployment states; with it they come as recorded,
    and every node has a prefix cache. Several policies and baselines stand side by side.

    \b
    Policies (the same hardware):    Baselines (other hardware):
      paper     threshold, 3.4.3       homogeneous  as many GPUs in one PD cluster
      adaptive  predicted cost         equal_cost   as much money in one PD cluster
      local     never offload          naive        every prefill remote, no threshold
      remote    always offload

    \b
      prfaas simulate configs/case_study.toml
      prfaas simulate configs/case_study.toml --baseline homogeneous naive
      prfaas simulate my.toml --policy paper adaptive --trace chat.jsonl.xz --plot out/
      prfaas simulate my.toml --link-trace outage.csv --timeline run.json

    A timeline is read by ui.perfetto.dev.

    Goodput counts requests that keep both promises: time per output token as in [slo], TTFT as in
    slo.ttft_s, or else within 3 times what the same request takes on the idle deployment.
    """
    started = time.perf_counter()
    _check_flags(trace, load, requests, speedup)
    parsed = load_deployment(deployment)
    problem = Study(deployment, "exact").problem(parsed)
    base = SimConfig(replans=True, timeline=timeline is not None)
    if trace is not None:
        rows = read_requests(trace, parsed)
        base = replace(base, cache=cache_config(parsed))
        try:
            arrivals = replay(rows, seed, speedup=speedup or 1.0)
        except InputError as error:
            raise error.in_file(trace) from None
        problem = planned_for(problem, arrivals)
    else:
        load = load or DEFAULT_UTILISATION * find_optimum(problem).capacity_rps
        arrivals = poisson(problem.workload, load, requests or DEFAULT_REQUESTS, seed)
    if link_trace is not None:
        base = replace(base, links=link_changes(link_trace, problem))
    cases = make_cases(parsed, problem, policies or (parsed.scheduler.policy,), others, base)

    results = run_all(cases, arrivals)
    service_levels = _service_levels(parsed, cases, arrivals)
    summaries = {name: summarise(result, service_levels[name]) for name, result in results.items()}
    saturated = saturate(deployment, cases, arrivals, service_levels) if others else []
    written = _write(results, plot, timeline)
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
    source = "Poisson arrivals" if trace is None else trace.name
    title = f"{parsed.model.name}, {source}, {arrivals.mean_rps:.2f} requests/s"
    out.print(runs_table(summaries, title))
    if saturated:
        out.print(saturated_table(saturated))
    out.print(notes(summaries, wall_s))
    for path in written:
        out.print(f"wrote {path}")


def run_all(cases: Mapping[str, Case], arrivals: Arrivals) -> dict[str, Result]:
    with progress_bar("simulated", len(cases)) as show:
        return {
            name: run_simulation(case.problem, arrivals, case.config, progress=_from(show, done))
            for done, (name, case) in enumerate(cases.items())
        }


def _from(show: Callable[[float], None], done: int) -> Callable[[float], None]:
    return lambda share: show(done + share)


def _service_levels(
    deployment: Deployment, cases: Mapping[str, Case], arrivals: Arrivals
) -> dict[str, ServiceLevel]:
    slo = deployment.slo
    tpot_s = 1 / slo.output_tokens_per_s
    if slo.ttft_s is not None:
        return dict.fromkeys(cases, ServiceLevel(slo.ttft_s, tpot_s))
    made: dict[Problem, ServiceLevel] = {}  # policies share their deployment's
    for case in cases.values():
        if case.problem not in made:
            made[case.problem] = idle_service_level(case.problem, arrivals, case.config, tpot_s)
    return {name: made[case.problem] for name, case in cases.items()}


def _check_flags(
    trace: Path | None, load: float | None, requests: int | None, speedup: float | None
) -> None:
    if trace is not None and (load is not None or requests is not None):
        raise InputError(
            "a trace has its own requests and times", where="--trace", fix="use --speedup instead"
        )
    if trace is None and speedup is not None:
        raise InputError("nothing to speed up", where="--speedup", fix="use --load, or --trace")
    for flag, value in (("--load", load), ("--speedup", speedup)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{value}", where=flag, fix="give a positive number")
    if requests is not None and requests < 2:
        raise InputError(f"{requests}", where="--requests", fix="give at least 2")


def _write(results: Mapping[str, Result], plot: Path | None, timeline: Path | None) -> list[Path]:
    written: list[Path] = []
    if plot is not None:
        # Imported here: matplotlib is an extra, and slow to import.
        from prfaas.display.simulation_plots import simulate_plots

        written += simulate_plots(plot, results)
    if timeline is not None:
        timeline.parent.mkdir(parents=True, exist_ok=True)
        timeline.write_text(json.dumps(chrome_trace(results)), encoding="utf-8")
        written.append(timeline)
    return written
