"""`prfaas demo`: plans, serves, cuts the WAN, and measures the case study; finite."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import uvloop
from rich.console import Console

from prfaas.clock import MonotonicClock
from prfaas.config import load_deployment
from prfaas.demo.case_study import case_scene
from prfaas.demo.scene import Check
from prfaas.demo.serving import serving_scene
from prfaas.display.console import console
from prfaas.display.plan_tables import plan_table, verdict
from prfaas.errors import PeerError
from prfaas.launch.children import ChildDied
from prfaas.studies.problem_files import Study

CASE_STUDY = Path("configs/case_study.toml")


@click.command()
@click.option(
    "--deployment",
    "file",
    default=CASE_STUDY,
    show_default=True,
    type=click.Path(path_type=Path),
    help="The case study's.",
)
@click.option("--logs", type=click.Path(path_type=Path), help="Folder.  [default: a new one]")
@click.option(
    "--double-threshold",
    is_flag=True,
    hidden=True,
    help="Serve the case study with twice its planned threshold, to see the comparison fail.",
)
def demo(file: Path, logs: Path | None, double_threshold: bool) -> None:
    """Show what this is, in under three minutes on two cores.

    Plans the paper's case study. Starts a tiny hybrid model on a PrfaaS node and a local PD cluster
    with a WAN between them, and shows where prompts go, what travels, and that answers are those of
    one process; cuts the WAN under it. Then loads the case study on emulated accelerators under
    three deployments, beside planner and simulator. Exit code 0: everything held, except that a
    machine that was too busy leaves the comparison of these deployments not judged.
    """
    screen = console()
    clock = MonotonicClock()
    began_s = clock.now()
    folder = logs or Path(tempfile.mkdtemp(prefix="prfaas-demo-"))
    _plan(file, screen)

    def say(what: str) -> None:
        screen.print(f"[{clock.now() - began_s:5.1f} s] {what}", markup=False)

    async def scenes() -> list[Check]:
        return [
            *await serving_scene(_made(folder / "serving"), screen, say),
            *await case_scene(
                file,
                _made(folder / "case-study"),
                screen,
                say,
                double_threshold=double_threshold,
            ),
        ]

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            checks = runner.run(scenes())
    except (ChildDied, PeerError, TimeoutError) as error:
        raise click.ClickException(f"{error or 'no answer in time'}; logs: {folder}") from None
    _summary(checks, screen)
    say(f"done; logs: {folder}")
    if any(check.held is False for check in checks):
        raise SystemExit(1)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _plan(file: Path, screen: Console) -> None:
    deployment = load_deployment(file)
    study = Study(file, "paper")
    plan = study.plan(deployment)
    screen.print(plan_table(plan, deployment, study.catalog(deployment)))
    screen.print(verdict(plan))


def _summary(checks: Sequence[Check], screen: Console) -> None:
    for check in checks:
        screen.print(f"{check.mark:10} {check.claim}: {check.seen}", markup=False)
