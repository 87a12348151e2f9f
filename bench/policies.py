"""Compares routing policies on traces with prefix caches: calm loads, then a set of stresses.

\b
    python -m prfaas_lab bench policies --trace conversation.jsonl.xz --trace synthetic.jsonl.xz \\
        > out.json
    python -m prfaas_lab bench policies_docs out.json        # tables, figures of docs/simulator.md
    python -m prfaas_lab bench policies --trace FILE --tune  # a grid search for `paper`'s constants
    python -m prfaas_lab bench policies --trace FILE --workers 2 --compare-workers
        # the time of 2 and of 1

100% load is the saturation rate under `paper` on the trace. A seed determines the window's start,
the spread of requests inside the trace's 3 s clock buckets and the times of faults. All policies of
a seed receive the same requests. A good request has its first token within 3 times its TTFT on the
idle deployment, and its tokens at the rate of the deployment's SLO. Tuning uses separate seeds.
`--first-seed` evaluates on seeds that were not used while constants were chosen.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import msgspec
import numpy as np
from scipy.special import stdtrit

from prfaas.cli.workers_options import workers_options
from prfaas.config import Deployment, load_deployment
from prfaas.config.deployment import PaperSection
from prfaas.config.trace import TraceRow
from prfaas.display.console import progress_bar, run_benchmark
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, replay
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.results.service_level import ServiceLevel, idle_service_level
from prfaas.sim.results.summary import summarise
from prfaas.sim.run import simulate
from prfaas.sim.saturation import saturated_rps
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import HERE, Workers
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import (
    POLICIES,
    Policy,
    cache_config,
    planned_for,
    read_requests,
    routed_by,
)
from prfaas_lab.studies.stress import STRESSES

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
LOADS = (0.5, 0.8, 0.95)
STRESS_LOADS = (0.8, 0.95)
LARGEST_SHARE = 0.75  # of a trace that a window may use: windows of different seeds must differ
TUNING_SEEDS = (1001, 1002)  # the evaluation's seeds start at 0
# A first search over (1, 2, 4) x (1.25, 1.5) x (2, 4) ended in the corner 4, 1.5, 2.
GRID = {
    "surge_wait_s": (4.0, 8.0),
    "step": (1.5, 2.0),
    "limit": (1.5, 2.0),
}
CALM_SHARE = 0.25  # calm_wait_s over surge_wait_s
TUNING_STRESSES = ("sagging link", "node lost")
COMPARED: tuple[Policy, ...] = ("paper", "adaptive")
CALM = "calm"  # the part of the benchmark without stress
# Metric -> whether a higher value is better.
METRICS = {
    "throughput_rps": True,
    "served_rps": True,
    "goodput_rps": True,
    "ttft_mean_s": False,
    "ttft_p90_s": False,
    "ttft_p99_s": False,
}
# Load -> how much worse than `paper` the worse end of `adaptive`'s confidence interval may be.
ALLOWED = {0.5: 0.02, 0.8: 0.02, 0.95: 0.05}
# Metric -> the mean improvement under stress that counts as a win.
WINS = {"goodput_rps": 0.10, "ttft_p90_s": 0.20}


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """One trace on one deployment, on which policies are compared."""

    deployment: Deployment
    hardware: Problem
    rows: Sequence[TraceRow]
    base: SimConfig
    window_s: float
    saturated_rps: float

    def arrivals(self, seed: int, load: float) -> Arrivals:
        """The seed's window of the trace, scaled to a share of the saturation rate."""
        window = replay(self.rows, seed, window_s=self.window_s)
        return window.scaled(load * self.saturated_rps / window.mean_rps)

    def problem(self, seed: int) -> Problem:
        """The deployment as planned for the seed's window without stress."""
        return planned_for(self.hardware, self.arrivals(seed, 1.0))

    def service_level(self, problem: Problem, arrivals: Arrivals) -> ServiceLevel:
        tpot_s = 1 / self.deployment.slo.output_tokens_per_s
        return idle_service_level(problem, arrivals, self.base, tpot_s)

    def config(self, policy: Policy, base: SimConfig | None = None) -> SimConfig:
        return routed_by(policy, self.deployment.scheduler, base or self.base)


class Window(NamedTuple):
    """A seed's window of a trace: the deployment as planned for it, and its service level."""

    problem: Problem
    level: ServiceLevel


class CalmRun(NamedTuple):
    trace: str
    seed: int
    load: float
    policy: Policy


class StressedRun(NamedTuple):
    """All compared policies under one stress."""

    trace: str
    seed: int
    load: float
    stress: str


class TuningRun(NamedTuple):
    trace: str
    seed: int
    situation: str
    point: Mapping[str, float]


Grounds = Mapping[str, Ground]
Windows = Mapping[tuple[str, int], Window]
Case = TypeVar("Case")
Found = TypeVar("Found")


def run_cases(
    what: str, function: Callable[[Case], Found], cases: Mapping[str, Case], workers: Workers
) -> dict[str, Found]:
    with progress_bar(what, len(cases)) as show:
        return run_all(function, cases, workers, progress=show)


def prepare(
    deployment: Deployment, file: Path, traces: Sequence[Path], window_s: float, workers: Workers
) -> dict[str, Ground]:
    hardware = Study(file, "exact").problem(deployment)
    base = SimConfig(cache=cache_config(deployment), replans=True)
    grounds = {}
    for trace in traces:
        rows = read_requests(trace, deployment)
        whole_s = float(replay(rows, seed=0).at_s[-1])
        window = min(window_s, LARGEST_SHARE * whole_s)
        name = trace.name.split(".")[0]
        grounds[name] = Ground(deployment, hardware, rows, base, window, saturated_rps=1.0)
    rates = run_cases("saturation", saturation, grounds, workers)
    return {name: replace(g, saturated_rps=rates[name]) for name, g in grounds.items()}


def saturation(ground: Ground) -> float:
    whole = replay(ground.rows, seed=0)
    return saturated_rps(planned_for(ground.hardware, whole), whole, ground.config("paper"))


def make_windows(grounds: Grounds, seeds: Sequence[int], workers: Workers) -> Windows:
    cases = {
        f"{name}, seed {seed}": (name, seed) for name, seed in itertools.product(grounds, seeds)
    }
    found = run_cases("service levels", partial(make_window, grounds), cases, workers)
    return dict(zip(cases.values(), found.values(), strict=True))


def make_window(grounds: Grounds, case: tuple[str, int]) -> Window:
    name, seed = case
    ground = grounds[name]
    problem = ground.problem(seed)
    return Window(problem, ground.service_level(problem, ground.arrivals(seed, 1.0)))


# Runs --------------------------------------------------------------------------------------------


def calm(grounds: Grounds, windows: Windows, case: CalmRun) -> list[dict[str, Any]]:
    ground, window = grounds[case.trace], windows[case.trace, case.seed]
    arrivals = ground.arrivals(case.seed, case.load)
    result = simulate(window.problem, arrivals, ground.config(case.policy))
    return [{"load": case.load, "seed": case.seed, **_row(case.policy, result, window.level)}]


def stressed(grounds: Grounds, windows: Windows, case: StressedRun) -> list[dict[str, Any]]:
    ground, window = grounds[case.trace], windows[case.trace, case.seed]
    calm_arrivals = ground.arrivals(case.seed, case.load)
    rng = np.random.default_rng(case.seed)
    arrivals, base = STRESSES[case.stress](window.problem, calm_arrivals, ground.base, rng)
    level = window.level  # the same requests, at other times
    if arrivals.hashes is not calm_arrivals.hashes:
        level = ground.service_level(window.problem, arrivals)
    rows = []
    for policy in COMPARED:
        result = simulate(window.problem, arrivals, ground.config(policy, base))
        figures = _row(policy, result, level)
        rows.append({"stress": f"{case.stress}, {case.load:.0%}", "seed": case.seed, **figures})
    return rows


def run_case(
    grounds: Grounds, windows: Windows, case: CalmRun | StressedRun
) -> list[dict[str, Any]]:
    if isinstance(case, CalmRun):
        return calm(grounds, windows, case)
    return stressed(grounds, windows, case)


def tune(grounds: Grounds, workers: Workers) -> list[dict[str, Any]]:
    """Runs every point of the grid, and a limit of 1 (no adjustment), on calm and stressed runs.

    A point's cost is the average of mean TTFT, P90 TTFT and the inverse of goodput, each over the
    best point's value in the same run."""
    points = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    points = [{**p, "calm_wait_s": CALM_SHARE * p["surge_wait_s"]} for p in points]
    points.append({"limit": 1.0})
    windows = make_windows(grounds, TUNING_SEEDS, workers)
    situations = list(itertools.product(grounds, TUNING_SEEDS, (CALM, *TUNING_STRESSES)))
    cases = {
        f"{name}, seed {seed}, {situation}, {point}": TuningRun(name, seed, situation, point)
        for name, seed, situation in situations
        for point in points
    }
    found = run_cases("points", partial(tuning_run, grounds, windows), cases, workers)
    table = np.array(list(found.values())).reshape(len(situations), len(points), -1)
    costs = (table / table.min(axis=1, keepdims=True)).mean(axis=(0, 2))
    ranked = sorted(zip(costs.tolist(), points, strict=True), key=lambda pair: pair[0])
    return [{**point, "cost": round(cost, 4)} for cost, point in ranked]


def tuning_run(grounds: Grounds, windows: Windows, case: TuningRun) -> list[float]:
    ground, window = grounds[case.trace], windows[case.trace, case.seed]
    paper = msgspec.structs.replace(PaperSection(), **case.point)
    rules = msgspec.structs.replace(ground.deployment.scheduler, paper=paper)
    arrivals, base = situation(ground, case.seed, case.situation)
    result = simulate(window.problem, arrivals, routed_by("paper", rules, base))
    run = summarise(result, window.level)
    return [run.ttft_s.mean, run.ttft_s.p90, 1 / max(run.goodput_rps, 1e-9)]


def situation(ground: Ground, seed: int, name: str) -> tuple[Arrivals, SimConfig]:
    if name == CALM:
        return ground.arrivals(seed, LOADS[-1]), ground.base
    rng = np.random.default_rng(seed)
    return STRESSES[name](ground.hardware, ground.arrivals(seed, STRESS_LOADS[0]), ground.base, rng)


def _row(policy: str, result: Result, level: ServiceLevel) -> dict[str, Any]:
    run = summarise(result, level)
    return {
        "policy": policy,
        "throughput_rps": run.throughput_rps,
        "served_rps": result.served_rps,
        "goodput_rps": run.goodput_rps,
        "ttft_mean_s": run.ttft_s.mean,
        "ttft_p50_s": run.ttft_s.p50,
        "ttft_p90_s": run.ttft_s.p90,
        "ttft_p99_s": run.ttft_s.p99,
        "tpot_s": run.tpot_s,
        "egress_gbps": run.egress_gbps.mean,
        "egress_peak_gbps": run.egress_gbps.peak,
        "offload_fraction": run.offload_fraction,
        "hit_rate": run.hit_rate,
        "copied_gb": run.copied_gb,
        "plan_changes": run.plan_changes,
        "stable": run.stable,
    }


# Statistics --------------------------------------------------------------------------------------


def differences(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """adaptive / paper - 1 per seed: mean and 95% confidence interval (Student)."""
    found = []
    for value in dict.fromkeys(row[key] for row in rows):
        by_policy = {
            policy: {r["seed"]: r for r in rows if r[key] == value and r["policy"] == policy}
            for policy in COMPARED
        }
        for metric in METRICS:
            change = np.array(
                [
                    by_policy["adaptive"][seed][metric] / row[metric] - 1
                    for seed, row in by_policy["paper"].items()
                ]
            )
            half = float("nan")
            if len(change) > 1:
                quantile = float(stdtrit(len(change) - 1, 0.975))
                half = quantile * float(change.std(ddof=1)) / len(change) ** 0.5
            mean = float(change.mean())
            found.append(
                {
                    key: value,
                    "metric": metric,
                    "mean": mean,
                    "low": mean - half,
                    "high": mean + half,
                }
            )
    return found


def bars(calm_found: list[dict[str, Any]], stress_found: list[dict[str, Any]]) -> dict[str, Any]:
    """Checks whether `adaptive` may replace `paper`: not much worse when calm, better under stress.

    A stress is lost if a metric is significantly worse (the interval excludes zero)."""
    broken = [
        f"{d['load']:.0%} {d['metric']}" for d in calm_found if _worst(d) > ALLOWED[d["load"]]
    ]
    won, lost = set(), set()
    for d in stress_found:
        if d["metric"] in WINS:
            gain = d["mean"] if METRICS[d["metric"]] else -d["mean"]
            if gain >= WINS[d["metric"]]:
                won.add(d["stress"])
            if (d["high"] < 0) if METRICS[d["metric"]] else (d["low"] > 0):
                lost.add(d["stress"])
    return {"calm_broken": broken, "stress_won": sorted(won), "stress_lost": sorted(lost)}


def _worst(d: dict[str, Any]) -> float:
    return float(-d["low"] if METRICS[d["metric"]] else d["high"])


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# The study ---------------------------------------------------------------------------------------


class Question(NamedTuple):
    deployment: Path
    traces: tuple[Path, ...]
    window_s: float
    seeds: Sequence[int]
    only: tuple[str, ...]


def study(question: Question, workers: Workers) -> dict[str, Any]:
    """The report of each trace."""
    parts = question.only or (CALM, *STRESSES)
    stresses = [name for name in STRESSES if name in parts]
    policies = COMPARED if question.only else POLICIES
    deployment = load_deployment(question.deployment)
    grounds = prepare(deployment, question.deployment, question.traces, question.window_s, workers)
    for name, ground in grounds.items():
        _say(f"{name}: saturated at {ground.saturated_rps:.3f} requests/s")
    seeds = question.seeds
    windows = make_windows(grounds, seeds, workers)
    cases: dict[str, CalmRun | StressedRun] = {}
    for name in grounds:
        for seed, load, policy in itertools.product(seeds, LOADS, policies):
            if CALM in parts:
                label = f"{name}, seed {seed}, {load:.0%}, {policy}"
                cases[label] = CalmRun(name, seed, load, policy)
        for seed, load, stress in itertools.product(seeds, STRESS_LOADS, stresses):
            label = f"{name}, seed {seed}, {load:.0%}, {stress}"
            cases[label] = StressedRun(name, seed, load, stress)
    found = run_cases("simulations", partial(run_case, grounds, windows), cases, workers)

    def rows(trace: str, kind: type) -> list[dict[str, Any]]:
        of = (found[label] for label, c in cases.items() if type(c) is kind and c.trace == trace)
        return list(itertools.chain.from_iterable(of))

    report: dict[str, Any] = {}
    for name, ground in grounds.items():
        calm_rows, stress_rows = rows(name, CalmRun), rows(name, StressedRun)
        planned = [find_optimum(windows[name, seed].problem) for seed in seeds]
        calm_found = differences(calm_rows, "load")
        stress_found = differences(stress_rows, "stress")
        report[name] = {
            "bars": bars(calm_found, stress_found),
            "saturated_rps": ground.saturated_rps,
            "planned": [
                {"threshold_tokens": plan.threshold_tokens, "n_prefill": plan.n_prefill}
                for plan in planned
            ],
            "window_s": ground.window_s,
            "requests": [len(ground.arrivals(seed, 1.0)) for seed in seeds],
            "calm": calm_rows,
            "calm_difference": calm_found,
            "stress": stress_rows,
            "stress_difference": stress_found,
        }
    return report


def compare_workers(question: Question, workers: Workers) -> dict[str, Any]:
    """The wall time of the study on one worker and on several, and whether the results are
    equal. Meant for an idle machine."""
    seconds, reports = [], []
    for some in (HERE, workers):
        started = time.perf_counter()
        # Text, because NaN is not equal to itself.
        reports.append(json.dumps(study(question, some)))
        seconds.append(time.perf_counter() - started)
    return {
        "workers": workers.count or workers.local_count(),
        "cluster": workers.cluster,
        "one_worker_s": round(seconds[0], 1),
        "workers_s": round(seconds[1], 1),
        "ratio": round(seconds[1] / seconds[0], 3),
        "equal": reports[0] == reports[1],
    }


@click.command(help=__doc__)
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Trace in Mooncake's format, .jsonl or .xz; repeatable.",
)
@click.option(
    "--deployment",
    "file",
    default=CASE_STUDY,
    type=click.Path(path_type=Path),
    help="Deployment file.  [default: the case study]",
)
@click.option("--seeds", default=5, show_default=True, help="Number of seeds to run.")
@click.option("--first-seed", default=0, show_default=True, help="First seed.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([CALM, *STRESSES]),
    help="Run only this part, with only `paper` and `adaptive`; repeatable.",
)
@click.option(
    "--window",
    "window_s",
    default=1500.0,
    show_default=True,
    help="Seconds of each trace to replay.",
)
@click.option("--tune", "tuning", is_flag=True, help="Search the constants of `paper`.")
@click.option(
    "--compare-workers",
    "comparing",
    is_flag=True,
    help="Run everything on one worker, then on --workers; print both times and their ratio.",
)
@workers_options
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    traces: tuple[Path, ...],
    file: Path,
    seeds: int,
    first_seed: int,
    only: tuple[str, ...],
    window_s: float,
    tuning: bool,
    comparing: bool,
    workers: Workers,
    as_json: bool,
) -> None:
    question = Question(file, traces, window_s, range(first_seed, first_seed + seeds), only)
    if comparing:
        print(json.dumps(compare_workers(question, workers), indent=1))
        return
    started = time.perf_counter()
    if tuning:
        grounds = prepare(load_deployment(file), file, traces, window_s, workers)
        print(json.dumps({"grid": tune(grounds, workers)}, indent=1))
        return
    report = study(question, workers)
    seconds = round(time.perf_counter() - started, 1)
    written = {"seeds": seeds, "first_seed": first_seed, "traces": report, "wall_s": seconds}
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
