"""Agents on the case study's hardware, simulated with and without kept answers.

\b
    python -m prfaas_lab bench agents [--sessions 200] [--load 0.8] [--policy adaptive]
                                      [--no-link-back]

The traffic is made from a seed (`_agent_traffic.py`): every prompt contains the answer to the one
before. All runs of a seed get the same requests at the same times:

\b
  without       answers are not kept
  kept          answers are kept

Reported are the share of prompt tokens that were computed, the time to the first token, the time of
a token after the first, and the requests that decode nodes served alone. 100% load is the planned
capacity for these lengths.
The case study's link goes from the PrfaaS cluster to the PD cluster. Answers are kept at decode
nodes, so this benchmark adds a link back, equally fast, over which they can be copied.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np

from _agent_traffic import AgentTraffic, agent_rows, seen_share
from prfaas.cli.workers_options import workers_options
from prfaas.config import Deployment, load_deployment
from prfaas.config.trace import TraceRow
from prfaas.display.console import progress_bar, run_benchmark
from prfaas.errors import InputError
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import replay
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import Workers
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import POLICIES, Policy, cache_config, planned_for, routed_by

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
RUNS = ("without", "kept")
BUCKET_S = 0.0  # the times are exact, unlike those of the public traces


def read_deployment(*, link_back: bool) -> Deployment:
    deployment = load_deployment(CASE_STUDY)
    if not link_back:
        return deployment
    links = deployment.links
    across = [link for link in links if link.source != link.target]
    back = [msgspec.structs.replace(one, source=one.target, target=one.source) for one in across]
    return msgspec.structs.replace(deployment, links=[*links, *back])


class SeedCase(NamedTuple):
    """The requests of one seed, on the deployment as planned for them."""

    seed: int
    load_rps: float
    problem: Problem
    rows: list[TraceRow]
    lengths: dict[str, Any]


def make_case(deployment: Deployment, traffic: AgentTraffic, load: float, seed: int) -> SeedCase:
    problem = Study(CASE_STUDY, "exact").problem(deployment)
    rows = agent_rows(traffic, 1.0, seed)
    problem = planned_for(problem, replay(rows, seed, bucket_s=BUCKET_S))
    load_rps = load * find_optimum(problem).capacity_rps
    rows = agent_rows(traffic, load_rps * traffic.sessions / len(rows), seed)
    return SeedCase(seed, load_rps, problem, rows, _lengths(rows))


def run_seed(deployment: Deployment, policy: Policy, case: SeedCase) -> dict[str, Any]:
    arrivals = replay(case.rows, case.seed, bucket_s=BUCKET_S)
    cache = cache_config(deployment)
    found: dict[str, Any] = {"seed": case.seed, "load_rps": round(case.load_rps, 3), **case.lengths}
    rules = deployment.scheduler
    for name in RUNS:
        base = SimConfig(cache=replace(cache, keep_answers=name != "without"), replans=True)
        result = simulate(case.problem, arrivals, routed_by(policy, rules, base))
        measured, requests = result.measured, result.requests
        prompt = int(requests.prompt_tokens[measured].sum())
        ttft_s = requests.ttft_s[measured]
        found[name] = {
            "computed_share": round(1 - int(requests.hit_tokens[measured].sum()) / prompt, 4),
            "ttft_s": {
                "mean": round(float(np.nanmean(ttft_s)), 4),
                "p50": round(float(np.nanquantile(ttft_s, 0.5)), 4),
                "p90": round(float(np.nanquantile(ttft_s, 0.9)), 4),
            },
            "tpot_s": round(float(np.nanmean(requests.tpot_s[measured])), 5),
            "alone": result.alone,
            "alone_s": round(result.alone_s, 1),
            "offloaded": round(float(requests.offloaded[measured].mean()), 3),
            "copied_gb": round(result.copied_bytes / 1e9, 1),
            "stable": result.stable,
        }
    return found


def _lengths(rows: list[TraceRow]) -> dict[str, Any]:
    return {
        "requests": len(rows),
        "prompt_tokens": round(statistics.fmean(row.input_length for row in rows)),
        "answer_tokens": round(statistics.fmean(row.output_length for row in rows)),
        "seen_before": round(seen_share(rows), 3),
    }


def report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds."""

    def median(run: str, *path: str) -> float:
        values = []
        for one in runs:
            value = one[run]
            for key in path:
                value = value[key]
            values.append(float(value))
        return statistics.median(values)

    shares = {run: median(run, "computed_share") for run in RUNS}
    p90 = {run: median(run, "ttft_s", "p90") for run in RUNS}
    return {
        "computed_share": shares,
        "computed_ratio": _ratios(shares),
        "p90_ttft_s": p90,
        "p90_ttft_ratio": _ratios(p90),
        "tpot_ratio": _ratios({run: median(run, "tpot_s") for run in RUNS}),
    }


def _ratios(values: dict[str, float]) -> dict[str, float]:
    """Over the run without anything."""
    return {run: round(values[run] / values["without"], 3) for run in RUNS[1:]}


@click.command(help=__doc__)
@click.option("--sessions", default=200, show_default=True, type=click.IntRange(2))
@click.option("--answer-tokens", default=700, show_default=True, type=click.IntRange(1))
@click.option("--result-tokens", default=3_300, show_default=True, type=click.IntRange(1))
@click.option("--load", default=0.8, show_default=True, help="Share of the planned capacity.")
@click.option("--policy", default="adaptive", show_default=True, type=click.Choice(POLICIES))
@click.option(
    "--link-back/--no-link-back",
    default=True,
    show_default=True,
    help="A link from the PD cluster to the PrfaaS cluster.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@workers_options
@click.option("--json", "_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    sessions: int,
    answer_tokens: int,
    result_tokens: int,
    load: float,
    policy: Policy,
    link_back: bool,
    seeds: int,
    workers: Workers,
    _json: bool,
) -> None:
    if not 0 < load < 1:
        raise InputError(f"the load is {load:g}", where="--load", fix="give a share, such as 0.8")
    traffic = AgentTraffic(
        sessions=sessions, answer_tokens=answer_tokens, result_tokens=result_tokens
    )
    deployment = read_deployment(link_back=link_back)
    cases = {f"seed {seed}": make_case(deployment, traffic, load, seed) for seed in range(seeds)}
    with progress_bar("seeds", seeds) as show:
        found = run_all(partial(run_seed, deployment, policy), cases, workers, progress=show)
    runs = list(found.values())
    click.echo(
        json.dumps(
            {"policy": policy, "load": load, "link_back": link_back, **report(runs), "runs": runs},
            indent=2,
        )
    )


if __name__ == "__main__":
    run_benchmark(main)
