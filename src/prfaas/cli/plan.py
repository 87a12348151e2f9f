"""`prfaas plan`: threshold, split, rates, egress, TTFT and gain of a deployment (section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from prfaas.cli.html_page import check_html, write_html
from prfaas.cli.workers_options import workers_options
from prfaas.config import Deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.console.plan_curves import stage_curves, sweep_curve, total_rate_curves
from prfaas.console.plan_report import PlanTexts, as_network_plan, plan_report
from prfaas.display.console import console, print_json, progress_bar, with_progress
from prfaas.display.flow_tables import (
    baselines_line,
    clusters_table,
    gains_table,
    network_tables,
)
from prfaas.display.flow_tables import notes as network_notes
from prfaas.display.gain_map_table import gain_map_notes, gain_map_tables
from prfaas.display.plan_tables import (
    comparison_table,
    estimate_notes,
    losses,
    notes,
    plan_table,
    sweep_table,
    verdict,
)
from prfaas.display.text_tables import plain, sentences, text_table
from prfaas.errors import InputError
from prfaas.planner.curves import Reading
from prfaas.planner.report import (
    comparison_as_dict,
    estimated_in_network,
    estimated_times,
    estimates_as_dict,
)
from prfaas.scheduler.homes.plans import as_network
from prfaas.studies.gain_map import deployment_map
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.parallel.workers import Workers
from prfaas.studies.plan_comparison import compare, read_published
from prfaas.studies.problem_files import Study
from prfaas.studies.sweep import SweepPoint, parse_sweep, run_sweep


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
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="File to write a page to that shows the plan in a browser. It needs no other file.",
)
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    deployment: Path,
    reading: Reading,
    load: float | None,
    sweep: str | None,
    published: Path | None,
    with_map: bool,
    plot: Path | None,
    html: Path | None,
    workers: Workers,
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

    For each PrfaaS cluster the plan says what is served without it: what a lost or drained site, or
    a cut link, costs.

    Where the catalog has no profile of the model on an accelerator, its times are estimated. The
    plan then shows ranges, and says which measurement narrows them most.

    \b
      prfaas plan configs/case_study.toml
      prfaas plan configs/case_study.toml --reading exact --load 2.5
      prfaas plan configs/case_study.toml --map
      prfaas plan configs/two_by_two.toml --html plan.html
      prfaas plan configs/case_study.toml --sweep links.0.gbps=5,8,10,100 --plot out/

    A sweep of many values runs on all cores, or on a cluster (--workers, --cluster).
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
    if html is not None:
        check_html(html)
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
        _plan_several(NetworkStudy(deployment, reading), parsed, html, as_json)
        return
    study = Study(deployment, reading)
    result = study.plan(parsed, load)
    estimated = estimated_times(study.problem(parsed), study.catalog(parsed))
    ranges = study.ranges(parsed, load)
    points: list[SweepPoint] = []
    if sweep:
        _, values = parse_sweep(sweep)
        with progress_bar("sweep", len(values)) as show:
            points = run_sweep(study, raw, deployment, sweep, load, workers, show)
    against = compare(result, read_published(published)) if published else []
    gains = deployment_map(study, parsed, reading) if with_map else None

    written: list[Path] = []
    if plot is not None:
        # The import is here because matplotlib is an optional dependency and slow to import.
        from prfaas.display.plan_plots import plan_plots

        written = plan_plots(plot, study, parsed, result, sweep, points)
    tables = [plan_table(result, parsed, study.catalog(parsed), ranges)]
    if published:
        tables.append(comparison_table(against, published))
    if sweep:
        tables.append(sweep_table(sweep.partition("=")[0], points))
    if gains is not None:
        tables += gain_map_tables(gains)
    remarks = [losses(result.lost_sites), notes(result)]
    if estimated:
        remarks.append(estimate_notes(estimated, ranges, parsed.model.name))
    if html is not None:
        problem = study.problem(parsed)
        curves = study.planner(problem).curves
        shown = stage_curves(problem, curves, result.prfaas_pd)
        if sweep:
            values, plans = [p.value for p in points], [p.plan for p in points]
            over = sweep_curve(sweep.partition("=")[0], values, plans)
            shown += [] if over is None else [over]
        texts = _texts(parsed, verdict(result, ranges), tables, remarks)
        solved = as_network_plan(problem, curves, result)
        data = plan_report(texts, as_network(problem), solved, shown)
        written = [*written, write_html(html, texts.title, data)]
    if as_json:
        report = comparison_as_dict(result) | estimates_as_dict(estimated, ranges)
        if sweep:
            report["sweep"] = [{"value": p.value, **comparison_as_dict(p.plan)} for p in points]
        if published:
            report["comparison"] = [row._asdict() for row in against]
        if gains is not None:
            report["map"] = gains.as_dict()
        if plot is not None:
            report["plots"] = [str(path) for path in written if path != html]
        if html is not None:
            report["html"] = str(html)
        print_json(report)
        return
    out = console()
    first, *others = tables
    out.print(first)
    out.print(verdict(result, ranges))
    for remark in filter(None, remarks):
        out.print(remark)
    for table in others:
        out.print(table)
    if gains is not None:
        for line in gain_map_notes(gains):
            out.print(line)
    for path in written:
        out.print(f"wrote {path}")


def _plan_several(
    study: NetworkStudy, deployment: Deployment, html: Path | None, as_json: bool
) -> None:
    comparison = study.plan_network(deployment)
    problem = study.network(deployment)
    estimated = estimated_in_network(problem, study.catalog(deployment))
    estimates = estimate_notes(estimated, None, deployment.model.name) if estimated else ""
    if html is not None:
        plan = comparison.plan
        shown = total_rate_curves(study.rate_curves(problem, plan, with_progress), plan)
        # The page has the flows as data.
        tables = [clusters_table(plan, deployment.model.name), gains_table(comparison)]
        remarks = [losses(comparison.lost_sites), network_notes(comparison, deployment), estimates]
        texts = _texts(deployment, baselines_line(comparison), tables, remarks)
        write_html(html, texts.title, plan_report(texts, problem, plan, shown))
    if as_json:
        report = comparison.as_dict() | estimates_as_dict(estimated, None)
        print_json(report if html is None else report | {"html": str(html)})
        return
    out = console()
    out.print(network_tables(comparison, deployment))
    if estimates:
        out.print(estimates)
    if html is not None:
        out.print(f"wrote {html}")


def _texts(
    deployment: Deployment, headline: str, tables: Sequence[Table], remarks: Sequence[str]
) -> PlanTexts:
    """What the page says, as it is printed."""
    clusters = [f"{c.gpus} x {c.accelerator} ({c.name})" for c in deployment.clusters]
    return PlanTexts(
        title=f"{deployment.model.name} on {', '.join(clusters)}",
        model=deployment.model.name,
        policy=deployment.scheduler.policy,
        headline=plain(headline),
        tables=[text_table(table) for table in tables],
        notes=[sentence for remark in remarks for sentence in sentences(remark)],
    )
