"""Ordinary tenants' time to first token beside hostile actors, compared with the same soak without.

\b
    python bench/hostile_soak.py [--minutes 15] [--engine emulated] [--seed 0]

Two soaks with the same seed and thus the same traffic, without faults, one after the other: first
without the actors, then with them. Prints both reports' TTFTs and the ratio of the P90s as JSON.
Both run on this machine, which should be idle. Exit code 1: a soak is not ok, or the ratio is above
1.5.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from prfaas.display.console import print_json, run_benchmark
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.preparation import CACHE
from prfaas_lab.faults.actors.situation import ACTORS
from prfaas_lab.faults.deployment import launched_fault_deployment
from prfaas_lab.faults.preparation import FaultEngine, prepare_fault_deployment
from prfaas_lab.faults.soak import Soak, SoakOptions, SoakReport, limit_tenants

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
MOST_RATIO = 1.5


def say(what: str) -> None:
    click.echo(what, err=True)


async def soak(engine: FaultEngine, options: SoakOptions, folder: Path) -> SoakReport:
    """One soak on a deployment of its own."""
    file = CASE_STUDY if engine == "emulated" else None
    ready, lengths = await prepare_fault_deployment(engine, file, folder, CACHE, say)
    async with launched_fault_deployment(
        limit_tenants(ready.deployment), ready.engines, folder, attached_prefix(), say
    ) as deployment:
        return await Soak(deployment, lengths, options, say).run()


def shown(report: SoakReport) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(report)
    kept = ("seconds", "requests", "verdicts", "errors", "ttft", "growth", "grown", "actors")
    return {"ok": report.ok, "problems": report.problems} | {name: found[name] for name in kept}


def ratio_of_p90(without: SoakReport, beside: SoakReport) -> float | None:
    """None when a soak has no streamed answer."""
    if without.ttft is None or beside.ttft is None:
        return None
    return round(beside.ttft.p90_s / without.ttft.p90_s, 3)


@click.command(help=__doc__)
@click.option("--minutes", default=15.0, show_default=True, help="Minutes of each soak.")
@click.option(
    "--engine", type=click.Choice(["emulated", "hf"]), default="emulated", show_default=True
)
@click.option("--seed", default=0, show_default=True, help="Seed of the traffic and the actors.")
def main(minutes: float, engine: FaultEngine, seed: int) -> None:
    def run(*, hostile: bool) -> SoakReport:
        actors = ACTORS if hostile else ()
        options = SoakOptions(seconds=60 * minutes, seed=seed, faults=False, actors=actors)
        folder = root / ("beside" if hostile else "without")
        folder.mkdir()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(soak(engine, options, folder))

    root = Path(tempfile.mkdtemp(prefix="prfaas-hostile-"))
    without, beside = run(hostile=False), run(hostile=True)
    ratio = ratio_of_p90(without, beside)
    ok = without.ok and beside.ok and ratio is not None and ratio <= MOST_RATIO
    print_json(
        {
            "ok": ok,
            "minutes": minutes,
            "engine": engine,
            "seed": seed,
            "p90_ratio": ratio,
            "without": shown(without),
            "beside": shown(beside),
            "logs": str(root),
        }
    )
    if not ok:
        sys.exit(1)


if __name__ == "__main__":
    run_benchmark(main)
