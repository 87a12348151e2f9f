"""A tenant's requests beside each attack of another tenant, compared with the same alone.

\b
    python bench/beside_attacks.py [--requests 20] [--engine hf] [--seed 0]

A deployment of the fault tests serves. For each attack, one after the other, the victim sends the
kind of request that the attack aims at, one at a time: first alone, then while the hostile tenant
does nothing but this attack. Prints, as JSON, the medians and 90th percentiles of the whole
requests' seconds and the ratio of the medians. Everything runs on this machine, which should be
idle. Exit code 1: a request of the victim failed, a ratio is above 1.5, or the actor did nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop

from prfaas.display.console import print_json, run_benchmark
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.preparation import CACHE
from prfaas_lab.faults.actors import bodies
from prfaas_lab.faults.actors.tenant import IDLE
from prfaas_lab.faults.actors_process import running_actors
from prfaas_lab.faults.deployment import FaultDeployment, launched_fault_deployment
from prfaas_lab.faults.preparation import FaultEngine, prepare_fault_deployment
from prfaas_lab.faults.resource_usage import wait_until_idle
from prfaas_lab.faults.soak import limit_tenants

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
MOST_RATIO = 1.5
ANSWER_TOKENS = 20
TEXT_BYTES = 2_000
LIMIT_S = 120.0  # of one request of the victim
BEGINS_S = 5.0  # until an attack is in full course


def say(what: str) -> None:
    click.echo(what, err=True)


def prompt_of_tokens(number: int) -> dict[str, Any]:
    return {"prompt": [32 + (number + at) % 90 for at in range(20)]}


def prompt_of_text(number: int) -> dict[str, Any]:
    return {"prompt": f"{number} " + "a few words " * (TEXT_BYTES // 12)}


def choice(number: int) -> dict[str, Any]:
    """The node compiles a grammar for it."""
    return prompt_of_tokens(number) | {"structured_outputs": {"choice": [f"yes {number}", "no"]}}


def stopped(number: int) -> dict[str, Any]:
    return prompt_of_tokens(number) | {"stop": ["never so written"]}


# What the victim asks beside each attack: what needs the same scarce thing.
VICTIMS: dict[str, Callable[[int], dict[str, Any]]] = {
    bodies.GRAMMAR: choice,
    bodies.STOPS: stopped,
    bodies.SEQUENCES: prompt_of_tokens,
    bodies.TOKENIZE: prompt_of_text,
    bodies.COMPRESSED: prompt_of_text,
    bodies.BOMB: prompt_of_text,
    IDLE: prompt_of_tokens,
}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of whole requests, and what failed."""

    seconds: list[float]
    errors: list[str]

    def quantile(self, share: float) -> float:
        return round(float(np.quantile(self.seconds, share)), 4)

    def shown(self) -> dict[str, Any]:
        return {"p50_s": self.quantile(0.5), "p90_s": self.quantile(0.9), "errors": self.errors}


async def ask(deployment: FaultDeployment, kind: str, numbers: count[int], requests: int) -> Times:
    """The victim's requests, one at a time, at all gateways in turn."""
    seconds, errors = list[float](), list[str]()
    for _ in range(requests):
        number = next(numbers)
        target = deployment.targets[number % len(deployment.targets)]
        fields = {
            "model": target.model,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "stream": True,
            "cache_salt": f"victim {number}",
        }
        if kind != bodies.GRAMMAR:  # a grammar ends its answer itself
            fields["ignore_eos"] = True
        body = json.dumps(fields | VICTIMS[kind](number)).encode()
        answer = await target.complete(body, LIMIT_S)
        seconds.append(answer.ended_s - answer.sent_s)
        if answer.error is not None:
            errors.append(answer.error)
    return Times(seconds, errors)


async def measure(
    engine: FaultEngine, kinds: list[str], requests: int, seed: int, folder: Path
) -> dict[str, Any]:
    file = CASE_STUDY if engine == "emulated" else None
    ready, _ = await prepare_fault_deployment(engine, file, folder, CACHE, say)
    numbers, found = count(), dict[str, Any]()
    async with launched_fault_deployment(
        limit_tenants(ready.deployment), ready.engines, folder, attached_prefix(), say
    ) as deployment:
        for kind in kinds:
            await ask(deployment, kind, numbers, 3)  # warms up what this kind of request needs
            await wait_until_idle(deployment)
            alone = await ask(deployment, kind, numbers, requests)
            say(f"{kind}: alone {alone.quantile(0.5):.3f} s")
            async with running_actors(
                deployment, attached_prefix(), ["tenant"], seed=seed, with_faults=True, only=[kind]
            ) as actors:
                await asyncio.sleep(BEGINS_S)
                beside = await ask(deployment, kind, numbers, requests)
                report = await actors.finish()
            ratio = round(beside.quantile(0.5) / alone.quantile(0.5), 3)
            say(f"{kind}: beside it {beside.quantile(0.5):.3f} s, {ratio} times; {report.deeds}")
            deeds = report.deeds.get(kind)
            found[kind] = {
                "alone": alone.shown(),
                "beside": beside.shown(),
                "ratio": ratio,
                "actor": {} if deeds is None else deeds.answers,
                "ok": ratio <= MOST_RATIO and not (alone.errors or beside.errors) and bool(deeds),
            }
    return found


@click.command(help=__doc__)
@click.option("--requests", default=20, show_default=True, help="The victim's, of each attack.")
@click.option("--engine", type=click.Choice(["emulated", "hf"]), default="hf", show_default=True)
@click.option("--seed", default=0, show_default=True, help="Seed of the actor.")
@click.option(
    "--attack", "kinds", multiple=True, type=click.Choice(list(VICTIMS)), help="Only these."
)
def main(requests: int, engine: FaultEngine, seed: int, kinds: tuple[str, ...]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="prfaas-beside-"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(engine, list(kinds or VICTIMS), requests, seed, folder))
    ok = all(one["ok"] for one in found.values())
    print_json({"ok": ok, "engine": engine, "attacks": found, "logs": str(folder)})
    if not ok:
        sys.exit(1)


if __name__ == "__main__":
    run_benchmark(main)
