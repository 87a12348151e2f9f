"""`prfaas soak`: a deployment of real processes under traffic, and a fault every few seconds."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
import uvloop

from prfaas.clock import MonotonicClock
from prfaas.display.console import print_json
from prfaas.faults.deployment import staged
from prfaas.faults.fault_deployment import FireEngine, fire
from prfaas.faults.soak import Soak, SoakOptions, SoakReport
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import ChildDied
from prfaas.launch.preparation import CACHE

CASE_STUDY = Path("configs/case_study.toml")
_OPTIONS = SoakOptions()


@click.command()
@click.option("--minutes", default=_OPTIONS.seconds / 60, show_default=True, help="Of traffic.")
@click.option(
    "--engine", type=click.Choice(["emulated", "hf"]), default="emulated", show_default=True
)
@click.option("--fault-every-s", default=_OPTIONS.fault_every_s, show_default=True)
@click.option("--seed", default=_OPTIONS.seed, show_default=True, help="Of traffic and faults.")
@click.option(
    "--deployment",
    "file",
    default=CASE_STUDY,
    show_default=True,
    type=click.Path(path_type=Path),
    help="emulated: its clusters, made small.",
)
@click.option("--out", type=click.Path(path_type=Path), help="The report goes here, too.")
@click.option("--logs", type=click.Path(path_type=Path), help="Folder.  [default: a new one]")
def soak(
    minutes: float,
    engine: FireEngine,
    fault_every_s: float,
    seed: int,
    file: Path,
    out: Path | None,
    logs: Path | None,
) -> None:
    """Serve mixed traffic while processes are killed and frozen, the WAN cut, slowed and damaged,
    arenas and disks filled, and clocks set.

    One PrfaaS node, one prefill and two decode nodes, two gateways. Every answer is compared with
    that of one process. Prints a report as JSON. Exit code 0: every request is accounted for, no
    token was wrong, memory and sockets are flat, every kvd's pool is whole.

    \b
      prfaas soak --minutes 3
      prfaas soak --minutes 30 --engine hf --out soak.json
    """
    folder = logs or Path(tempfile.mkdtemp(prefix="prfaas-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    clock = MonotonicClock()
    began_s = clock.now()

    def say(what: str) -> None:
        click.echo(f"[{clock.now() - began_s:6.1f} s] {what}", err=True)

    options = SoakOptions(seconds=60 * minutes, fault_every_s=fault_every_s, seed=seed)
    ready, lengths = fire(engine, file, folder, CACHE, say)

    async def run() -> SoakReport:
        async with staged(ready.deployment, ready.engines, folder, attached_prefix(), say) as stage:
            return await Soak(stage, lengths, options, say).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            report = runner.run(run())
        except ChildDied as error:
            raise click.ClickException(str(error)) from None
    shown = {"ok": report.ok, "engine": engine, "seed": seed, **asdict(report)}
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(shown)) + b"\n")
    print_json(shown)
    if not report.ok:
        say(f"logs are in {folder}")
        sys.exit(1)
