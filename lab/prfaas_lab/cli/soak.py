"""`python -m prfaas_lab soak`: serves traffic on real processes while faults strike."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click
import msgspec
import uvloop

from prfaas.clock import MonotonicClock
from prfaas.display.console import print_json
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import ChildDied
from prfaas.launch.preparation import CACHE
from prfaas_lab.faults.actors.situation import ACTORS, ActorName
from prfaas_lab.faults.catalogue import FAULTS
from prfaas_lab.faults.clusters.catalogue import CLUSTER_FAULTS, choose_faults
from prfaas_lab.faults.deployment import launched_fault_deployment
from prfaas_lab.faults.preparation import EMULATED_FILE, FaultEngine, prepare_fault_deployment
from prfaas_lab.faults.soak import Soak, SoakOptions, SoakReport, limit_tenants

_OPTIONS = SoakOptions()
_FAULTS = [fault.name for fault in (*FAULTS, *CLUSTER_FAULTS)]


@click.command()
@click.option(
    "--minutes", default=_OPTIONS.seconds / 60, show_default=True, help="Minutes of traffic."
)
@click.option(
    "--engine",
    type=click.Choice(["emulated", "hf"]),
    default="emulated",
    show_default=True,
    help="Engine of the nodes: emulated accelerators, or hf with a tiny real model.",
)
@click.option(
    "--faults/--no-faults",
    default=_OPTIONS.faults,
    show_default=True,
    help="Whether faults strike.",
)
@click.option(
    "--hostile/--no-hostile",
    default=False,
    show_default=True,
    help="Whether a hostile tenant, member and peer kvd run beside the ordinary tenants, in one "
    "process with at most a quarter of a core.",
)
@click.option(
    "--actor",
    "actors",
    type=click.Choice(ACTORS),
    multiple=True,
    help="Hostile actor that runs with --hostile; may be given several times.  [default: all]",
)
@click.option(
    "--fault-every-s",
    default=_OPTIONS.fault_every_s,
    show_default=True,
    help="Seconds from one fault to the next.",
)
@click.option(
    "--fault",
    "only",
    type=click.Choice(_FAULTS),
    metavar="NAME",
    multiple=True,
    help="Fault that strikes; may be given several times. A wrong name lists all.  "
    "[default: all that the deployment can have]",
)
@click.option(
    "--kill-workers",
    "kill_workers_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Kill all worker processes of all kvds at this interval, also with --no-faults.  "
    "[default: only faults strike workers]",
)
@click.option(
    "--seed", default=_OPTIONS.seed, show_default=True, help="Seed of the traffic and the faults."
)
@click.option(
    "--deployment",
    "file",
    type=click.Path(path_type=Path),
    help="Deployment file whose clusters are served, scaled down. With --engine hf only the names "
    f"of several clusters and their links are taken from it.  [default: {EMULATED_FILE}, or with "
    "--engine hf no file]",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to write the report to, besides stdout."
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    help="Folder for the logs of all processes.  [default: a new temporary folder]",
)
def soak(
    minutes: float,
    engine: FaultEngine,
    faults: bool,
    hostile: bool,
    actors: tuple[ActorName, ...],
    fault_every_s: float,
    only: tuple[str, ...],
    kill_workers_s: float | None,
    seed: int,
    file: Path | None,
    out: Path | None,
    logs: Path | None,
) -> None:
    """Serve mixed traffic while a fault strikes every few seconds, and check every answer.

    The faults: processes, also the workers of kvds, are killed and frozen; the WAN is cut, slowed
    and damages bytes; memory and disks are full; wall clocks jump. The deployment: one PrfaaS node,
    one prefill node, two decode nodes, two gateways; each kvd has one worker.

    A deployment file with several pd clusters is served by as many small clusters as it has, with
    a gateway for each pd cluster. Whole clusters are killed, cut off and drained there, too, and
    the gateway that plans is killed.

    Three tenants send the traffic. With --hostile, a fourth tenant, fake kvds with a stolen member
    key and a peer kvd attack the gateways and the kvds meanwhile (docs/faults.md). Compare the
    report's `ttft` with that of a soak without them, both with --no-faults: random faults would
    hide the difference.

    Prints a report as JSON. The exit code is 0 when every request is accounted for, none has
    failed whose gateway and decode node were up, no token differs from the answer of a single node,
    memory and sockets do not grow, and the pool of every kvd is consistent.

    \b
      python -m prfaas_lab soak --minutes 3
      python -m prfaas_lab soak --minutes 30 --engine hf --out soak.json
      python -m prfaas_lab soak --minutes 15 --no-faults --hostile
      python -m prfaas_lab soak --minutes 3 --no-faults --kill-workers 10
      python -m prfaas_lab soak --minutes 15 --deployment configs/two_by_two.toml
    """
    folder = logs or Path(tempfile.mkdtemp(prefix="prfaas-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    clock = MonotonicClock()
    began_s = clock.now()

    def say(what: str) -> None:
        click.echo(f"[{clock.now() - began_s:6.1f} s] {what}", err=True)

    options = SoakOptions(
        seconds=60 * minutes,
        fault_every_s=fault_every_s,
        seed=seed,
        faults=faults,
        kill_workers_s=kill_workers_s,
        actors=(actors or ACTORS) if hostile else (),
        only=only,
    )
    ready, lengths = asyncio.run(prepare_fault_deployment(engine, file, folder, CACHE, say))
    choose_faults(only, len(ready.deployment.of_kind("pd")))  # raises before any process is started

    async def run() -> SoakReport:
        async with launched_fault_deployment(
            limit_tenants(ready.deployment), ready.engines, folder, attached_prefix(), say
        ) as stage:
            return await Soak(stage, lengths, options, say).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            report = runner.run(run())
        except ChildDied as error:
            raise click.ClickException(str(error)) from None
    shown = {
        "ok": report.ok,
        "problems": report.problems,
        "engine": engine,
        "seed": seed,
        **msgspec.to_builtins(report),
    }
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(shown)) + b"\n")
    print_json(shown)
    for name, growth in report.growth.items():
        say(f"memory of {name}: {growth}")
    if not report.ok:
        say(f"the logs are in {folder}")
        sys.exit(1)
