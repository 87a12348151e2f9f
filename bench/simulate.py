"""The speed of the simulator: wall time per request, and peak memory.

\b
    python -m prfaas_lab bench simulate [--trace conversation.jsonl.xz
                                         [--peers SCRIPT --peer-python PYTHON]]

`poisson`: requests of the case study without caches at 80% load. The goal is a million requests in
under 120 s, with a time per request that does not grow with their number. `trace`: with prefix
caches on every node, beside an external script that receives the unpacked trace as its argument and
prints JSON with `wall_s` and `requests`. A separate process measures each figure, so that peak
memory is not shared. `cpu_s` is the CPU time of the whole process, start-up included, and is more
reliable than wall time on a busy machine.
"""

from __future__ import annotations

import json
import lzma
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from prfaas.config import load_deployment
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import poisson, replay
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import cache_config, planned_for, read_requests, routed_by

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"


def run_poisson(requests: int, policy: str) -> dict[str, Any]:
    deployment = load_deployment(CASE_STUDY)
    problem = Study(CASE_STUDY, "exact").problem(deployment)
    load_rps = DEFAULT_UTILISATION * find_optimum(problem).capacity_rps
    config = _routed(policy, SimConfig(replans=True))
    started = time.perf_counter()
    arrivals = poisson(problem.workload, load_rps, requests, seed=0)
    result = simulate(problem, arrivals, config)
    return _figures(started, requests, result.throughput_rps)


def run_trace(trace: Path, policy: str) -> dict[str, Any]:
    """Simulates a trace. The time includes reading the file, as the peer's does."""
    deployment = load_deployment(CASE_STUDY)
    problem = Study(CASE_STUDY, "exact").problem(deployment)
    config = _routed(policy, SimConfig(cache=cache_config(deployment), replans=True))
    started = time.perf_counter()
    rows = read_requests(trace, deployment)
    arrivals = replay(rows, seed=0)
    result = simulate(planned_for(problem, arrivals), arrivals, config)
    hit = int(result.requests.hit_tokens.sum()) / int(result.requests.prompt_tokens.sum())
    figures = _figures(started, len(rows), result.throughput_rps)
    return {**figures, "prefix_reuse": round(hit, 3)}


def _routed(policy: str, base: SimConfig) -> SimConfig:
    rules = load_deployment(CASE_STUDY).scheduler
    return routed_by("adaptive" if policy == "adaptive" else "paper", rules, base)


def _figures(started: float, requests: int, throughput_rps: float) -> dict[str, Any]:
    wall_s = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "requests": requests,
        "wall_s": round(wall_s, 3),
        "us_per_request": round(wall_s / requests * 1e6, 1),
        "peak_memory_mb": round(peak_bytes / 1e6),
        "throughput_rps": round(throughput_rps, 3),
    }


def in_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", *map(str, arguments)]
    return _json_line(command, Path(__file__))


def run_peers(script: Path, python: str, trace: Path) -> dict[str, Any]:
    return _json_line([python, str(script), str(trace)], script)


def _json_line(command: list[str], script: Path) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise click.ClickException(f"{script} failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**found, "cpu_s": round(cpu_s, 2)}


def beside_peers(trace: Path, peers: Path | None, python: str, rounds: int) -> dict[str, Any]:
    """Medians of both. Runs alternate, so that a slow minute of the machine affects both."""
    ours: dict[str, list[dict[str, Any]]] = {"paper": [], "adaptive": []}
    theirs: list[dict[str, Any]] = []
    for _ in range(rounds):
        if peers is not None:
            theirs.append(run_peers(peers, python, trace))
        for policy, runs in ours.items():
            runs.append(in_process("trace", trace, policy))
    report: dict[str, Any] = {policy: _median(runs) for policy, runs in ours.items()}
    if peers is not None:
        peer = _median(theirs)
        report["peers"] = {peers.stem: peer}
        for policy, run in ((name, report[name]) for name in ours):
            for key in ("wall_s", "cpu_s"):
                ratio = run[key] / run["requests"] / (peer[key] / peer["requests"])
                report[policy][f"{key}_ratio_to_peer"] = round(ratio, 3)
    return report


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: float(run["wall_s"]))[len(runs) // 2]


@click.command(help=__doc__)
@click.option(
    "--requests", default=1_000_000, show_default=True, help="Requests of the longest Poisson run."
)
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    help="Trace in Mooncake's format, .jsonl or .xz.",
)
@click.option(
    "--peers",
    type=click.Path(exists=True, path_type=Path),
    help="Script of another project to run for comparison.",
)
@click.option("--peer-python", default=sys.executable, help="Python interpreter of that script.")
@click.option("--rounds", default=3, show_default=True, help="Replays of the trace.")
@click.option("--only", nargs=3, hidden=True, help="Measure one figure in this process.")
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    requests: int,
    trace: Path | None,
    peers: Path | None,
    peer_python: str,
    rounds: int,
    only: tuple[str, str, str] | None,
    as_json: bool,
) -> None:
    if only is not None:
        kind, what, policy = only
        figures = (
            run_trace(Path(what), policy) if kind == "trace" else run_poisson(int(what), policy)
        )
        print(json.dumps(figures))
        return
    report: dict[str, Any] = {"cpus": os.cpu_count()}
    if trace is not None:
        with tempfile.TemporaryDirectory() as folder:
            report["trace"] = beside_peers(_unpacked(trace, folder), peers, peer_python, rounds)
    counts = [requests // 100, requests // 10, requests]
    report["poisson"] = {str(n): in_process("poisson", n, "paper") for n in counts}
    print(json.dumps(report, indent=2))


def _unpacked(trace: Path, folder: str) -> Path:
    """Returns the path of an unpacked trace, because peers read plain text."""
    if trace.suffix != ".xz":
        return trace
    path = Path(folder) / trace.stem
    path.write_bytes(lzma.decompress(trace.read_bytes()))
    return path


if __name__ == "__main__":
    main()
