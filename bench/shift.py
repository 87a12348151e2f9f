"""The long-term loop when traffic shifts: its live plans beside the simulated ones.

\b
    python -m prfaas_lab bench shift [--rounds 4] [--time-scale 0.15] [--seed 0]

Three H20 nodes and one remote H200 node serve short prompts, then long ones, which need another
threshold and another split. The nodes are processes: emulated engines with the case study's model,
kvds, a WAN and a gateway. The simulator receives the same requests and the same settings. Prompt
lengths are the quantiles of their distribution in shuffled rounds, so that a hundred requests match
the workload that they come from. Profile correction is off: on a small machine with shared cores,
the engines' overheads would move the optimum that both are compared with. Prints JSON, in seconds
of this machine since the gateway's start:

\b
  phases   each phase's optimum according to the planner, and the share of it that the plan at the
           phase's end reaches
  live, simulated   plans in order: time, threshold, prefill and decode nodes, reason
  same_order   whether both moved threshold and roles in the same directions, in the same order
  conversions   when a drained node took its other role
  failed   requests without a complete answer
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
import uvloop

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, parse_deployment
from prfaas.config.deployment import Lognormal
from prfaas.display.console import print_json, progress_bar, run_benchmark
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import launched_gateway, launched_hosts
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, prepare_launch
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.planner.curves import Atoms, WorkCurves, cut_workload
from prfaas.planner.optimise import Choice, stage_rates
from prfaas.planner.problem import Problem
from prfaas.planner.workload import Workload
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import SimConfig
from prfaas.sim.run import simulate
from prfaas.studies.problem_files import Study

MODEL = "case-study-1t"
MEDIANS_LOG = (8.0, 10.0)  # logarithm of the median prompt length of each phase
SHARES = (1, 2)  # ratio of requests: the plans have to settle in the second phase
ROUND = 50  # requests whose lengths are the quantiles of their distribution
CORRECTION = 0.1  # a smaller change of the threshold comes from a larger sample, not a shift
LOAD = 0.6  # share of the capacity of a phase's optimum
BYTE_SCALE, OUTPUT_SCALE = 2e-3, 0.03
ROUNDS = f"Rounds of {ROUND} requests in the first phase; the second has twice as many."


def deployment() -> Deployment:
    """The deployment, with the first phase's traffic. Times are not scaled."""
    raw: dict[str, Any] = {
        "model": {"name": MODEL},
        "workload": {
            **{"kind": "lognormal", "mu": MEDIANS_LOG[0], "sigma": 1.0, "min_tokens": 128},
            **{"max_tokens": 65536, "output_tokens": 512},
        },
        "slo": {"output_tokens_per_s": 40},
        "clusters": [
            {
                **{"name": "pd", "kind": "pd", "accelerator": "h20", "gpus": 24},
                "gpus_per_instance": 8,
            },
            {
                **{"name": "far", "kind": "prfaas", "accelerator": "h200", "gpus": 8},
                "gpus_per_instance": 8,
            },
        ],
        "links": [{"from": "far", "to": "pd", "gbps": 25, "rtt_ms": 20}],
        "scheduler": {
            "policy": "paper",
            "replan": {
                **{"every_s": 60.0, "window_s": 3600.0, "warmup_s": 60.0, "dwell_s": 300.0},
                **{"block_requests": 100, "threshold_step": 0.05},
            },
            "correction": {"correct": False},
        },
    }
    return parse_deployment(raw, __file__)


class Phase(NamedTuple):
    problem: Problem  # the deployment with this phase's traffic
    rps: float
    rounds: int

    @property
    def requests(self) -> int:
        return self.rounds * ROUND


def phases(made: Deployment, rounds: int) -> list[Phase]:
    study = Study(Path(__file__), "exact")
    found = []
    for mu, share in zip(MEDIANS_LOG, SHARES, strict=True):
        assert isinstance(made.workload, Lognormal)
        workload = msgspec.structs.replace(made.workload, mu=mu)
        problem = study.problem(msgspec.structs.replace(made, workload=workload))
        rps = LOAD * find_optimum(problem).capacity_rps
        found.append(Phase(problem, rps, share * rounds))
    return found


def shifting(parts: Sequence[Phase], seed: int) -> Arrivals:
    """The requests of all phases, at Poisson times."""
    rng = np.random.default_rng(seed)
    at_s, new = [], []
    for part in parts:
        for _ in range(part.rounds):
            new.append(rng.permutation(_quantiles(part.problem.workload, ROUND)))
            at_s.append(rng.exponential(1 / part.rps, ROUND))
    count = len(new) * ROUND
    output = round(parts[0].problem.workload.output_tokens)
    return Arrivals(
        np.cumsum(np.concatenate(at_s)),
        np.concatenate(new),
        np.zeros(count, np.int64),
        np.full(count, output),
    )


def _quantiles(workload: Workload, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    below = np.cumsum(workload.weight) / workload.weight.sum()
    at = np.searchsorted(below, (np.arange(count) + 0.5) / count)
    return np.ceil(workload.new[at]).astype(np.int64)


def later(arrivals: Arrivals, by_s: float) -> Arrivals:
    return replace(arrivals, at_s=arrivals.at_s + by_s)


class Planned(NamedTuple):
    at_s: float
    threshold_tokens: int
    prefill: tuple[str, ...]  # prefill nodes of the PD cluster
    nodes: int
    reason: str

    def shown(self) -> dict[str, Any]:
        return {
            "at_s": round(self.at_s, 1),
            "threshold_tokens": self.threshold_tokens,
            "prefill": len(self.prefill),
            "decode": self.nodes - len(self.prefill),
            "reason": self.reason,
        }


def moves(plans: Sequence[Planned]) -> list[tuple[str, tuple[str, ...]]]:
    """The direction in which each plan moved the threshold, and the prefill nodes after it.

    Consecutive plans in the same direction are one move. Changes below `CORRECTION` are omitted."""
    found: list[tuple[str, tuple[str, ...]]] = []
    before = plans[0]
    for after in plans[1:]:
        ratio = after.threshold_tokens / before.threshold_tokens
        if abs(ratio - 1) < CORRECTION and after.prefill == before.prefill:
            continue
        move = ("up" if ratio > 1 else "down", after.prefill)
        if not found or found[-1] != move:
            found.append(move)
        before = after
    return found


def capacity_rps(problem: Problem, plan: Planned) -> float:
    """The capacity of this threshold and split on a problem's traffic, by the planner's model."""
    curves = WorkCurves(
        cut_workload(problem.workload), Atoms(problem.workload, problem.spec), "exact"
    )
    row = int(np.abs(curves.cuts.threshold - plan.threshold_tokens).argmin())
    return stage_rates(problem, curves, Choice(row, len(plan.prefill))).lambda_max


class Served(NamedTuple):
    plans: list[Planned]
    began_s: float  # start of the load, since the gateway's start
    failed: list[str]
    requests: int
    conversions: list[dict[str, Any]]


async def serve(made: LaunchPlan, arrivals: Arrivals, folder: Path) -> Served:
    clock = MonotonicClock()

    def say(what: str) -> None:
        click.echo(f"starting {what}", err=True)

    async with (
        launched_hosts(made.deployment, made.engines, folder, attached_prefix(), say=say) as hosts,
        launched_gateway(hosts, made.deployment, say=say) as live,
        connect(live.gateway_url, clock) as target,
    ):
        assert target.model is not None
        began_s = (await live.state())["up_s"]
        ask = RequestTemplate(target.model, secrets.token_hex(8))
        with progress_bar("answered", len(arrivals)) as show:
            outcomes = await offer_load(target, arrivals, ask, PromptGenerator(), clock, done=show)
        state = await live.state()
    return Served(
        [_planned(plan, state["up_s"]) for plan in state["plans"]],
        began_s,
        [outcome.error for outcome in outcomes if outcome.error is not None],
        len(outcomes),
        [_converted(done, state["up_s"]) for done in state["conversions"]],
    )


def _planned(plan: dict[str, Any], up_s: float) -> Planned:
    prefill = tuple(node for node, role in plan["roles"].items() if role == "prefill")
    at_s = up_s - plan["age_s"]
    return Planned(at_s, plan["threshold_tokens"], prefill, len(plan["roles"]), plan["reason"])


def _converted(done: dict[str, Any], up_s: float) -> dict[str, Any]:
    return {"at_s": round(up_s - done["age_s"], 1), "node": done["node"], "role": done["role"]}


def simulated(made: Deployment, problem: Problem, arrivals: Arrivals) -> list[Planned]:
    """The simulator's plans. Nodes change their role in no time, like emulated ones."""
    config = SimConfig(scheduler=made.scheduler, replans=True, role_switch_s=0.0)
    found = []
    for at_s, plan in simulate(problem, arrivals, config).plans:
        prefill = tuple(node for node, role in plan.roles.items() if role == "prefill")
        found.append(Planned(at_s, plan.threshold_tokens, prefill, len(plan.roles), plan.reason))
    return found


def at(plans: Sequence[Planned], moment_s: float) -> Planned:
    return [plan for plan in plans if plan.at_s <= moment_s][-1]


def judged(part: Phase, plan: Planned) -> dict[str, Any]:
    best = find_optimum(part.problem)
    share = capacity_rps(part.problem, plan) / best.capacity_rps
    return {
        "offered_rps": round(part.rps, 2),
        "optimum": {
            "threshold_tokens": best.threshold_tokens,
            "prefill": best.n_prefill,
            "capacity_rps": round(best.capacity_rps, 3),
        },
        "planned": plan.shown(),
        "of_the_optimums_capacity": round(share, 4),
        "of_the_optimums_threshold": round(plan.threshold_tokens / best.threshold_tokens, 4),
    }


@click.command(help=__doc__)
@click.option("--rounds", default=4, show_default=True, help=ROUNDS)
@click.option("--time-scale", default=0.15, show_default=True, help="Factor on all times.")
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(rounds: int, time_scale: float, seed: int, as_json: bool) -> None:
    if rounds < 1:
        raise InputError(f"{rounds} is too few", where="--rounds", fix="give at least 1")
    with tempfile.TemporaryDirectory(prefix="prfaas-shift-") as name:
        folder = Path(name)
        options = LaunchOptions("emulated", Scales(time_scale, BYTE_SCALE, OUTPUT_SCALE))
        made = prepare_launch(deployment(), Path(__file__), options, folder)
        parts = phases(made.deployment, rounds)
        arrivals = shifting(parts, seed)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            served = runner.run(serve(made, arrivals, folder))
    same = later(arrivals, served.began_s)
    expected = simulated(made.deployment, parts[0].problem, same)
    ends_s = same.at_s[np.cumsum([part.requests for part in parts]) - 1]
    # After the last arrival only the longest requests still run: they do not represent the traffic.
    live = [plan for plan in served.plans if plan.at_s <= ends_s[-1]]
    print_json(
        {
            "requests": served.requests,
            "failed": len(served.failed),
            "why": sorted(set(served.failed)),
            "time_scale": time_scale,
            "load_began_s": round(served.began_s, 1),
            "phases": [
                {
                    "ends_s": round(end_s, 1),
                    **judged(part, at(live, end_s)),
                    "simulated": at(expected, end_s).shown(),
                }
                for part, end_s in zip(parts, ends_s.tolist(), strict=True)
            ],
            "live": [plan.shown() for plan in live],
            "simulated": [plan.shown() for plan in expected],
            "same_order": moves(live) == moves(expected),
            "conversions": served.conversions,
        }
    )


if __name__ == "__main__":
    run_benchmark(main)
