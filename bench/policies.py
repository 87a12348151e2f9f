"""Compares routing policies on traces with prefix caches: calm loads, then a set of stresses.

\b
    prfaas bench policies --trace conversation.jsonl.xz --trace synthetic.jsonl.xz > out.json
    prfaas bench policies_docs out.json     # tables and figures of docs/simulator.md
    prfaas bench policies --trace FILE --tune     # the grid search for `paper`'s constants

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from scipy.special import stdtrit

from prfaas.config import Deployment, load_deployment
from prfaas.config.deployment import PaperSection
from prfaas.config.trace import TraceRow
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, replay
from prfaas.sim.config import SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.results.service_level import ServiceLevel, idle_service_level
from prfaas.sim.results.summary import summarise
from prfaas.sim.run import simulate
from prfaas.sim.saturation import saturated_rps
from prfaas.sim.stress import STRESSES
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import (
    POLICIES,
    Policy,
    cache_config,
    planned_for,
    read_requests,
    routed_by,
)

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


def prepare(deployment: Deployment, file: Path, trace: Path, window_s: float) -> Ground:
    rows = read_requests(trace, deployment)
    hardware = Study(file, "exact").problem(deployment)
    base = SimConfig(cache=cache_config(deployment), replans=True)
    whole = replay(rows, seed=0)
    paper = routed_by("paper", deployment.scheduler, base)
    rps = saturated_rps(planned_for(hardware, whole), whole, paper)
    window_s = min(window_s, LARGEST_SHARE * float(whole.at_s[-1]))
    return Ground(deployment, hardware, rows, base, window_s, rps)


# Runs --------------------------------------------------------------------------------------------


def calm(
    ground: Ground, seeds: Sequence[int], policies: Sequence[Policy] = POLICIES
) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        problem = ground.problem(seed)
        level = ground.service_level(problem, ground.arrivals(seed, 1.0))
        for load, policy in itertools.product(LOADS, policies):
            result = simulate(problem, ground.arrivals(seed, load), ground.config(policy))
            yield {"load": load, "seed": seed, **_row(policy, result, level)}


def stressed(
    ground: Ground, seeds: Sequence[int], stresses: Sequence[str] = tuple(STRESSES)
) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        problem = ground.problem(seed)
        usual = ground.service_level(problem, ground.arrivals(seed, 1.0))
        for load, name in itertools.product(STRESS_LOADS, stresses):
            calm_arrivals = ground.arrivals(seed, load)
            rng = np.random.default_rng(seed)
            arrivals, base = STRESSES[name](problem, calm_arrivals, ground.base, rng)
            level = usual  # the same requests, at other times
            if arrivals.hashes is not calm_arrivals.hashes:
                level = ground.service_level(problem, arrivals)
            for policy in COMPARED:
                result = simulate(problem, arrivals, ground.config(policy, base))
                figures = _row(policy, result, level)
                yield {"stress": f"{name}, {load:.0%}", "seed": seed, **figures}


def tune(grounds: Sequence[Ground]) -> list[dict[str, Any]]:
    """Runs every point of the grid, and a limit of 1 (no adjustment), on calm and stressed runs.

    A point's cost is the average of mean TTFT, P90 TTFT and the inverse of goodput, each over the
    best point's value in the same run."""
    points = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    points = [{**p, "calm_wait_s": CALM_SHARE * p["surge_wait_s"]} for p in points]
    points.append({"limit": 1.0})
    costs = np.zeros(len(points))
    runs = 0
    for ground, seed in itertools.product(grounds, TUNING_SEEDS):
        problem = ground.problem(seed)
        level = ground.service_level(problem, ground.arrivals(seed, 1.0))
        for name, arrivals, base in _situations(ground, seed):
            table = []
            for point in points:
                paper = msgspec.structs.replace(PaperSection(), **point)
                rules = msgspec.structs.replace(ground.deployment.scheduler, paper=paper)
                result = simulate(problem, arrivals, routed_by("paper", rules, base))
                run = summarise(result, level)
                table.append([run.ttft_s.mean, run.ttft_s.p90, 1 / max(run.goodput_rps, 1e-9)])
            costs += (np.array(table) / np.min(table, axis=0)).mean(axis=1)
            runs += 1
            _say(f"seed {seed}: {name}")
    ranked = sorted(zip((costs / runs).tolist(), points, strict=True), key=lambda pair: pair[0])
    return [{**point, "cost": round(cost, 4)} for cost, point in ranked]


def _situations(ground: Ground, seed: int) -> Iterator[tuple[str, Arrivals, SimConfig]]:
    yield "95%", ground.arrivals(seed, LOADS[-1]), ground.base
    for name in TUNING_STRESSES:
        trouble, rng = STRESSES[name], np.random.default_rng(seed)
        calm_arrivals = ground.arrivals(seed, STRESS_LOADS[0])
        yield name, *trouble(ground.hardware, calm_arrivals, ground.base, rng)


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
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    traces: tuple[Path, ...],
    file: Path,
    seeds: int,
    first_seed: int,
    only: tuple[str, ...],
    window_s: float,
    tuning: bool,
    as_json: bool,
) -> None:
    drawn = range(first_seed, first_seed + seeds)
    parts = only or (CALM, *STRESSES)
    stresses = [name for name in STRESSES if name in parts]
    started = time.perf_counter()
    deployment = load_deployment(file)
    grounds = {
        trace.name.split(".")[0]: prepare(deployment, file, trace, window_s) for trace in traces
    }
    if tuning:
        print(json.dumps({"grid": tune(list(grounds.values()))}, indent=1))
        return
    report: dict[str, Any] = {}
    for name, ground in grounds.items():
        _say(f"{name}: saturated at {ground.saturated_rps:.3f} requests/s")
        calm_rows: list[dict[str, Any]] = []
        if CALM in parts:
            calm_rows = list(calm(ground, drawn, COMPARED if only else POLICIES))
        _say(f"{name}: calm loads done, {time.perf_counter() - started:.0f} s")
        stress_rows = list(stressed(ground, drawn, stresses)) if stresses else []
        _say(f"{name}: stresses done, {time.perf_counter() - started:.0f} s")
        planned = [find_optimum(ground.problem(seed)) for seed in drawn]
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
            "requests": [len(ground.arrivals(seed, 1.0)) for seed in drawn],
            "calm": calm_rows,
            "calm_difference": calm_found,
            "stress": stress_rows,
            "stress_difference": stress_found,
        }
    seconds = round(time.perf_counter() - started, 1)
    written = {"seeds": seeds, "first_seed": first_seed, "traces": report, "wall_s": seconds}
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
