"""`prfaas demo`: plans, serves, cuts the WAN and measures the case study, then exits."""

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
from prfaas.demo.case_study import measure_case_study
from prfaas.demo.serving import serve_prompts
from prfaas.demo.shared import Check
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
    help="Deployment file of the case study.",
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    help="Folder for the logs of all processes.  [default: a new temporary folder]",
)
@click.option(
    "--double-threshold",
    is_flag=True,
    hidden=True,
    help="Serve the case study with twice its planned threshold, to see the comparison fail.",
)
def demo(file: Path, logs: Path | None, double_threshold: bool) -> None:
    """Show the whole system in less than three minutes on two cores.

    \b
    1. Plans the paper's case study.
    2. Starts a tiny hybrid model on a PrfaaS node and on a local PD cluster, with a WAN between
       them. Shows which prompts are offloaded, how many bytes cross the WAN, and that every answer
       equals the answer of a single node. Then cuts the WAN while KV is in transit.
    3. Serves the case study on emulated accelerators under three deployments and compares the
       measurements with the planner and the simulator.

    The exit code is 0 when every check passed, and 1 when a check failed. On a machine that is too
    busy to emulate accelerators, the comparison of the three deployments is reported as "not
    judged" and does not fail.
    """
    screen = console()
    clock = MonotonicClock()
    began_s = clock.now()
    folder = logs or Path(tempfile.mkdtemp(prefix="prfaas-demo-"))
    _plan(file, screen)

    def say(what: str) -> None:
        screen.print(f"[{clock.now() - began_s:5.1f} s] {what}", markup=False)

    async def run_parts() -> list[Check]:
        return [
            *await serve_prompts(_made(folder / "serving"), screen, say),
            *await measure_case_study(
                file,
                _made(folder / "case-study"),
                screen,
                say,
                double_threshold=double_threshold,
            ),
        ]

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            checks = runner.run(run_parts())
    except (ChildDied, PeerError, TimeoutError) as error:
        problem = error or "a process did not respond in time"
        raise click.ClickException(f"{problem}; the logs are in {folder}") from None
    _summary(checks, screen)
    say(f"done; the logs are in {folder}")
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
