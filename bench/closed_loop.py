"""Closed-loop load on the deployment of `prfaas up`: does a policy use both prefill nodes?

\b
    python -m prfaas_lab bench closed_loop [--policy adaptive --policy paper] [--streams 4]
                                           [--requests 40] [--tokens 700] [--output 16] [--rounds 2]

The deployment is the one that `prfaas up` starts: a tiny model on one PrfaaS node, one local
prefill node and one local decode node, with a WAN between the clusters. Each stream sends a prompt
and waits for the whole answer before it sends the next prompt. Every round serves --requests
requests under each policy. The order of the policies is reversed from round to round, so that a
machine that becomes slower favours none of them. All policies share the engines. Each run has a
new gateway and new prompts, and begins with --streams requests that are not counted. Prints JSON:

\b
  policies  per policy: TTFT over all rounds, prefills per node, failures
  ratio     median TTFT of the first policy over that of the last one
  rounds    the same ratio of every round
  checks    both prefill nodes worked under the first policy; its median TTFT is at most 80% of the
            last one's; no request failed

Exit code 1: a check did not hold.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import uvloop

from prfaas.clock import MonotonicClock
from prfaas.demo.shared import run_watched
from prfaas.display.console import print_json, rounded, run_benchmark
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import RunningHosts, launched_gateway, launched_hosts
from prfaas.launch.preparation import (
    CACHE,
    TINY_DEVICE,
    LaunchOptions,
    LaunchPlan,
    prepare_launch,
    tiny_deployment,
)
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.measure.client import Target, TimedResponse, connect
from prfaas.measure.open_loop import RequestTemplate
from prfaas.measure.prompts import PromptGenerator, PromptPart
from prfaas.measure.summary import LatencySummary, summarise_latencies

POLICIES = ("adaptive", "paper", "local", "remote")
MOST = 0.8  # share of the last policy's median TTFT
LOG_LINE_S = 60.0  # for the gateway's log line about a request; only a lost line takes longer
ANSWER_S = 300.0  # for one answer; only a hang takes longer


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """One run of a load under one policy."""

    policy: str
    ttfts_s: list[float]
    prefills: dict[str, int]  # per node
    failures: dict[str, int]


async def measure(
    ready: LaunchPlan, policies: Sequence[str], load: Load, rounds: int, folder: Path
) -> list[list[Served]]:
    found: list[list[Served]] = []
    async with launched_hosts(ready.deployment, ready.engines, folder, attached_prefix()) as hosts:
        for number in range(rounds):
            order = policies if number % 2 == 0 else policies[::-1]
            served = []
            for policy in order:
                click.echo(f"round {number + 1}, {policy}: {load.requests} requests", err=True)
                run = serve(hosts, ready, policy, load)
                served.append(await run_watched(hosts.children, run))
            found.append(served)
    return found


async def serve(hosts: RunningHosts, ready: LaunchPlan, policy: str, load: Load) -> Served:
    outcomes = RequestOutcomes()
    async with (
        launched_gateway(
            hosts, ready.deployment, ["--policy", policy], on_line=outcomes.read_line
        ) as live,
        connect(live.gateway_url, MonotonicClock()) as target,
    ):
        warm = Load(load.streams, load.streams, load.prompt_tokens, load.output_tokens)
        await closed_loop(target, warm)
        answers = await closed_loop(target, load)
        async with asyncio.timeout(LOG_LINE_S):
            logged = [await outcomes.of(one.request_id) for one in answers if one.request_id]
    return Served(
        policy,
        [one.ttft_s for one in answers if one.event_times_s],
        dict(Counter(one.prefill or one.decode for one in logged)),
        dict(Counter(one.error for one in answers if one.error is not None)),
    )


async def closed_loop(target: Target, load: Load) -> list[TimedResponse]:
    """Sends all prompts. A stream sends its next prompt after the previous answer has ended."""
    assert target.model is not None
    ask = RequestTemplate(target.model, salt=secrets.token_hex(8))
    prompts = PromptGenerator()
    numbers = iter(range(load.requests))
    answers: list[TimedResponse] = []

    async def stream() -> None:
        for number in numbers:
            text = prompts.text([PromptPart(b"%d" % number, load.prompt_tokens)])
            answers.append(await target.complete(ask.body(text, load.output_tokens), ANSWER_S))

    async with asyncio.TaskGroup() as streams:
        for _ in range(load.streams):
            streams.create_task(stream())
    return answers


# Results -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    ttft_s: LatencySummary | None
    prefills: dict[str, int]
    failures: dict[str, int]


def figures(runs: Sequence[Served]) -> Figures:
    prefills: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for run in runs:
        prefills.update(run.prefills)
        failures.update(run.failures)
    return Figures(
        summarise_latencies(value for run in runs for value in run.ttfts_s),
        dict(prefills),
        dict(failures),
    )


def ratio(one: Sequence[float], other: Sequence[float]) -> float | None:
    return median(one) / median(other) if one and other else None


def checks(
    found: Mapping[str, Figures], policies: Sequence[str], prefill_nodes: Sequence[str]
) -> dict[str, bool]:
    first, last = found[policies[0]], found[policies[-1]]
    assert first.ttft_s is not None and last.ttft_s is not None
    return {
        "both prefill nodes work": all(first.prefills.get(node, 0) for node in prefill_nodes),
        f"median TTFT at most {MOST:.0%}": first.ttft_s.p50 <= MOST * last.ttft_s.p50,
        "no request fails": not any(one.failures for one in found.values()),
    }


@click.command(help=__doc__)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=["adaptive", "paper"],
    show_default=True,
    type=click.Choice(POLICIES),
    help="Policy to serve with, repeatable; the first is compared with the last.",
)
@click.option("--streams", default=4, show_default=True, help="Requests in flight.")
@click.option("--requests", default=40, show_default=True, help="Requests per policy and round.")
@click.option("--tokens", default=700, show_default=True, help="Tokens per prompt.")
@click.option(
    "--output", default=16, show_default=True, help="Tokens per answer; 16 is the API's default."
)
@click.option("--rounds", default=2, show_default=True, help="Runs of each policy.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Folder for logs.  [default: none are kept]"
)
def main(
    policies: tuple[str, ...],
    streams: int,
    requests: int,
    tokens: int,
    output: int,
    rounds: int,
    logs: Path | None,
) -> None:
    if len(set(policies)) < 2:
        raise InputError("a comparison requires two policies", where="--policy", fix="give another")
    if min(streams, requests, tokens, output, rounds) < 1:
        raise InputError("a number is below 1", where="--streams and others", fix="give 1 or more")
    load = Load(streams, requests, tokens, output)
    options = LaunchOptions("hf", device=TINY_DEVICE)
    made = tiny_deployment(CACHE, options, lambda what: click.echo(what, err=True))
    deployment, profile = asyncio.run(made)
    with tempfile.TemporaryDirectory(prefix="prfaas-closed-loop-") as name:
        folder = logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        ready = prepare_launch(deployment, profile, options, folder)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            served = runner.run(measure(ready, policies, load, rounds, folder))
    report(policies, load, served)


def report(policies: Sequence[str], load: Load, rounds: Sequence[Sequence[Served]]) -> None:
    def of(policy: str, served: Sequence[Served]) -> list[float]:
        return [value for run in served if run.policy == policy for value in run.ttfts_s]

    every = [run for served in rounds for run in served]
    found = {name: figures([run for run in every if run.policy == name]) for name in policies}
    held = checks(found, policies, ("near-0", "far-0"))
    first, last = policies[0], policies[-1]
    ratios = [ratio(of(first, served), of(last, served)) for served in rounds]
    print_json(
        {
            "cores": os.cpu_count(),
            "load": asdict(load),
            "policies": {name: rounded(asdict(seen), 3) for name, seen in found.items()},
            "ratio": rounded(ratio(of(first, every), of(last, every)), 3),
            "rounds": [rounded(value, 3) for value in ratios],
            "checks": held,
        }
    )
    sys.exit(0 if all(held.values()) else 1)


if __name__ == "__main__":
    run_benchmark(main)
