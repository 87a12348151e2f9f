"""The cost of a simulated request as the deployment grows: 16 nodes against 1,024.

\b
    python -m prfaas_lab bench scale [--requests 1000000] [--nodes 16 --nodes 1024]

The deployment is the case study with more nodes. Link bandwidth and traffic grow in proportion, so
that every size has the same load (80% of its planned rate). Each size simulates the same number of
requests under `paper` and under `adaptive`: `poisson` without caches, and `sessions` with a prefix
cache on every node and prompts that share prefixes. Sizes alternate in one process, and the ratio
is of CPU times, so that other work on the machine affects all sizes alike. The long-term loop is
off, because its cost depends on the simulated time and not on the number of requests.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from _agent_traffic import AgentTraffic, agent_rows
from prfaas.config import load_deployment
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.planner.problem import Pool, Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, poisson, replay
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import Policy, cache_config, planned_for, routed_by

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
POLICIES: tuple[Policy, ...] = ("paper", "adaptive")
# Four turns on average, and prompts of about 12,000 tokens. Each begins with one of four
# instructions, which soon are on all nodes: the case in which most nodes hold something.
TRAFFIC = AgentTraffic(
    turns=4, shared_tokens=4_096, task_tokens=4_000, result_tokens=2_000, pause_s=30.0
)


def grown(problem: Problem, nodes: int) -> Problem:
    """The problem with `nodes` nodes in the same proportions, and links that are faster by the same
    factor. The links between nodes of one cluster stay as they are."""
    total = sum(pool.instances for pool in problem.pools)

    def sized(pool: Pool) -> Pool:
        return replace(pool, instances=max(1, round(pool.instances * nodes / total)))

    remotes = tuple(
        replace(
            remote,
            pool=sized(remote.pool),
            path=replace(remote.path, bps=remote.path.bps * nodes / total),
        )
        for remote in problem.remotes
    )
    rest = nodes - sum(remote.pool.instances for remote in remotes)
    local = replace(problem.local, pool=replace(problem.local.pool, instances=rest))
    return replace(problem, remotes=remotes, local=local)


def poisson_case(problem: Problem, requests: int) -> tuple[Problem, Arrivals]:
    rps = DEFAULT_UTILISATION * find_optimum(problem).capacity_rps
    return problem, poisson(problem.workload, rps, requests, seed=0)


def sessions_case(problem: Problem, requests: int) -> tuple[Problem, Arrivals]:
    """About as many requests, in sessions that are the same at every rate. They come at a rate that
    the plan for their lengths can serve."""
    traffic = replace(TRAFFIC, sessions=max(1, requests // TRAFFIC.turns))

    def arrivals(sessions_per_s: float) -> Arrivals:
        return replay(agent_rows(traffic, sessions_per_s, seed=0), seed=0, bucket_s=0.0)

    planned = planned_for(problem, arrivals(1.0))
    rps = DEFAULT_UTILISATION * find_optimum(planned).capacity_rps
    return planned, arrivals(rps / traffic.turns)


def measure(problem: Problem, arrivals: Arrivals, config: SimConfig) -> dict[str, Any]:
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = simulate(problem, arrivals, config)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    done = result.requests
    return {
        "requests": len(arrivals),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "mean_ttft_s": round(float(np.nanmean(done.first_token_s - done.arrival_s)), 4),
        "offloaded": round(float(done.offloaded.mean()), 4),
        "prefix_reuse": round(int(done.hit_tokens.sum()) / int(done.prompt_tokens.sum()), 4),
    }


@click.command(help=__doc__)
@click.option("--requests", default=10_000, show_default=True, help="Requests of each run.")
@click.option(
    "--nodes", default=[16, 1024], show_default=True, multiple=True, help="Nodes; several."
)
@click.option(
    "--rounds", default=1, show_default=True, help="Runs of each case; the median counts."
)
@click.option(
    "--case",
    "names",
    type=click.Choice(["poisson", "sessions"]),
    multiple=True,
    default=["poisson", "sessions"],
    show_default=True,
    help="Traffic; several.",
)
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    requests: int, nodes: tuple[int, ...], rounds: int, names: tuple[str, ...], as_json: bool
) -> None:
    deployment = load_deployment(CASE_STUDY)
    given = Study(CASE_STUDY, "exact").problem(deployment)
    cases: dict[str, Callable[[Problem, int], tuple[Problem, Arrivals]]] = {
        "poisson": poisson_case,
        "sessions": sessions_case,
    }
    report: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }
    for name in names:
        made = {size: cases[name](grown(given, size), requests) for size in nodes}
        base = SimConfig(cache=cache_config(deployment) if name == "sessions" else None)
        for policy in POLICIES:
            config = routed_by(policy, deployment.scheduler, base)
            runs: dict[int, list[dict[str, Any]]] = {size: [] for size in nodes}
            for _ in range(rounds):
                for size, (problem, arrivals) in made.items():
                    runs[size].append(measure(problem, arrivals, config))
            report[f"{name} {policy}"] = _summary(runs)
    print(json.dumps(report, indent=2))


def _summary(runs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    cpu_s = {size: statistics.median(run["cpu_s"] for run in of) for size, of in runs.items()}
    wall_s = {size: statistics.median(run["wall_s"] for run in of) for size, of in runs.items()}
    sizes = list(runs)
    figures: dict[str, Any] = {
        str(size): {
            **runs[size][0],
            "cpu_s": round(cpu_s[size], 2),
            "wall_s": round(wall_s[size], 2),
            "us_per_request": round(cpu_s[size] / runs[size][0]["requests"] * 1e6, 1),
        }
        for size in sizes
    }
    figures["ratio"] = round(cpu_s[sizes[-1]] / cpu_s[sizes[0]], 2)
    return figures


if __name__ == "__main__":
    main()
