"""`prfaas plan`: threshold, split, rates, egress, TTFT and gain of a deployment (section 4)."""

from __future__ import annotations

import math
from pathlib import Path

import click

from prfaas.config import Deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.display.console import console, print_json, with_progress
from prfaas.display.flow_tables import network_tables
from prfaas.display.gain_map_table import gain_map_notes, gain_map_tables
from prfaas.display.plan_tables import (
    comparison_table,
    estimate_notes,
    notes,
    plan_table,
    sweep_table,
    verdict,
)
from prfaas.errors import InputError
from prfaas.planner.curves import Reading
from prfaas.planner.report import (
    comparison_as_dict,
    estimated_in_network,
    estimated_times,
    estimates_as_dict,
)
from prfaas.studies.gain_map import deployment_map
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.plan_comparison import compare, read_published
from prfaas.studies.problem_files import Study
from prfaas.studies.sweep import run_sweep


@click.command()
@click.argument("deployment", type=click.Path(path_type=Path))
@click.option(
    "--reading",
    type=click.Choice(["paper", "exact"]),
    default="paper",
    show_default=True,
    help="How to read the paper's equations. paper: eqs. 3-8 as printed. exact: with true means "
    "and with queueing.",
)
@click.option(
    "--load",
    type=float,
    help="Requests per second for which the exact reading predicts TTFT.",
)
@click.option(
    "--sweep",
    metavar="KEY=V1,V2,...",
    help="Plan again with each of these values of one key of the deployment file.",
)
@click.option(
    "--compare",
    "published",
    type=click.Path(path_type=Path),
    help="File with published figures to compare the plan with.",
)
@click.option(
    "--map",
    "with_map",
    is_flag=True,
    help="Also plan other link bandwidths and prompt lengths, and show where PrfaaS begins to pay.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, file_okay=False), help="Folder to write plots to."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    deployment: Path,
    reading: Reading,
    load: float | None,
    sweep: str | None,
    published: Path | None,
    with_map: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Find the best threshold and split of DEPLOYMENT.toml and compare them with three baselines.

    \b
    The baselines:
      homogeneous  one PD cluster with the same number of GPUs, all of the local kind
      equal_cost   one PD cluster of GPUs of the local kind that costs the same
      naive        the same hardware, with every prefill remote and no threshold

    With several PD clusters the plan has a threshold and a split for each of them, the requests
    that each PrfaaS cluster prefills for each PD cluster, what limits the total rate, and what one
    more instance or Gbit/s would add. Its baselines are other ones: the PD clusters alone, at most
    one PrfaaS cluster for each PD cluster, and the same GPUs or money in PD clusters. It has no
    TTFT and no ranges.

    Where the catalog has no profile of the model on an accelerator, its times are estimated. The
    plan then shows ranges, and says which measurement narrows them most.

    \b
      prfaas plan configs/case_study.toml
      prfaas plan configs/case_study.toml --reading exact --load 2.5
      prfaas plan configs/case_study.toml --map
      prfaas plan configs/two_by_two.toml
      prfaas plan configs/case_study.toml --sweep links.0.gbps=5,8,10,100 --plot out/
    """
    if load is not None:
        if reading != "exact":
            raise InputError(
                "the paper reading has no queues, so a load changes nothing",
                where="--load",
                fix="add --reading exact",
            )
        if not (math.isfinite(load) and load > 0):
            raise InputError(
                f"{load} is not a rate of requests", where="--load", fix="give a positive number"
            )
    raw = parse_toml(read_text(deployment), deployment)
    parsed = parse_deployment(raw, deployment)
    if len(parsed.of_kind("pd")) > 1:
        flags = {"--load": load, "--sweep": sweep, "--compare": published, "--plot": plot}
        flags["--map"] = with_map or None
        for flag, value in flags.items():
            if value is not None:
                raise InputError(
                    "this option is for deployments with one pd cluster",
                    where=flag,
                    fix="remove it",
                )
        _plan_several(NetworkStudy(deployment, reading), parsed, as_json)
        return
    study = Study(deployment, reading)
    result = study.plan(parsed, load)
    estimated = estimated_times(study.problem(parsed), study.catalog(parsed))
    ranges = study.ranges(parsed, load)
    points = run_sweep(study, raw, deployment, sweep, load, with_progress) if sweep else []
    against = compare(result, read_published(published)) if published else []
    gains = deployment_map(study, parsed, reading) if with_map else None

    written: list[Path] = []
    if plot is not None:
        # The import is here because matplotlib is an optional dependency and slow to import.
        from prfaas.display.plan_plots import plan_plots

        written = plan_plots(plot, study, parsed, result, sweep, points)
    if as_json:
        report = comparison_as_dict(result) | estimates_as_dict(estimated, ranges)
        if sweep:
            report["sweep"] = [{"value": p.value, **comparison_as_dict(p.plan)} for p in points]
        if published:
            report["comparison"] = [row._asdict() for row in against]
        if gains is not None:
            report["map"] = gains.as_dict()
        if plot is not None:
            report["plots"] = [str(path) for path in written]
        print_json(report)
        return
    out = console()
    out.print(plan_table(result, parsed, study.catalog(parsed), ranges))
    out.print(verdict(result, ranges))
    if assumed := notes(result):
        out.print(assumed)
    if estimated:
        out.print(estimate_notes(estimated, ranges, parsed.model.name))
    if published:
        out.print(comparison_table(against, published))
    if sweep:
        out.print(sweep_table(sweep.partition("=")[0], points))
    if gains is not None:
        for table in gain_map_tables(gains):
            out.print(table)
        for line in gain_map_notes(gains):
            out.print(line)
    for path in written:
        out.print(f"wrote {path}")


def _plan_several(study: NetworkStudy, deployment: Deployment, as_json: bool) -> None:
    comparison = study.plan_network(deployment)
    estimated = estimated_in_network(study.network(deployment), study.catalog(deployment))
    if as_json:
        print_json(comparison.as_dict() | estimates_as_dict(estimated, None))
        return
    out = console()
    out.print(network_tables(comparison, deployment))
    if estimated:
        out.print(estimate_notes(estimated, None, deployment.model.name))
