"""`prfaas plan`: threshold, split, rates, egress, TTFT and gain of a deployment (section 4)."""

from __future__ import annotations

import copy
import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import click

from prfaas.cli.output import console, print_json, with_progress
from prfaas.cli.plan_compare import compare, read_published
from prfaas.cli.plan_tables import comparison_table, notes, plan_table, sweep_table, verdict
from prfaas.cli.wiring import Study
from prfaas.config import Deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.errors import InputError
from prfaas.planner.curves import Reading
from prfaas.planner.plan import Plan
from prfaas.planner.report import plan_as_dict


class SweepPoint(NamedTuple):
    value: Any
    plan: Plan


@click.command(short_help="Is it worth it? Best threshold and split, beside three baselines.")
@click.argument("deployment", type=click.Path(path_type=Path))
@click.option(
    "--reading",
    type=click.Choice(["paper", "exact"]),
    default="paper",
    show_default=True,
    help="paper: eqs. 3-8 as printed. exact: true means and queueing.",
)
@click.option("--load", type=float, help="Requests/s at which exact predicts TTFT.")
@click.option("--sweep", metavar="KEY=V1,V2,...", help="Re-optimise at each value of a key.")
@click.option("--compare", "published", type=click.Path(path_type=Path), help="Published figures.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Write plots here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    deployment: Path,
    reading: Reading,
    load: float | None,
    sweep: str | None,
    published: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Is it worth it? The best threshold and split of DEPLOYMENT.toml, beside three baselines.

    \b
    The baselines: homogeneous (as many GPUs of the local kind), equal_cost (as much money of
    them), naive (every prefill remote, no threshold).

    \b
      prfaas plan configs/case_study.toml
      prfaas plan configs/case_study.toml --reading exact --load 2.5
      prfaas plan configs/case_study.toml --sweep links.0.gbps=5,8,10,100 --plot out/
    """
    if load is not None:
        if reading != "exact":
            raise InputError(
                "the paper reading has no queue, so no load", where="--load", fix="--reading exact"
            )
        if not (math.isfinite(load) and load > 0):
            raise InputError(f"{load} requests/s", where="--load", fix="give a positive number")
    raw = parse_toml(read_text(deployment), deployment)
    parsed = parse_deployment(raw, deployment)
    study = Study(deployment, reading)
    result = study.plan(parsed, load)
    points = _sweep(study, raw, deployment, sweep, load) if sweep else []
    against = compare(result, read_published(published)) if published else []

    written: list[Path] = []
    if plot is not None:
        # Imported here: matplotlib is an extra, and slow to import.
        from prfaas.cli.plots import plan_plots

        written = plan_plots(plot, study, parsed, result, sweep, points)
    if as_json:
        report = plan_as_dict(result)
        if sweep:
            report["sweep"] = [{"value": p.value, **plan_as_dict(p.plan)} for p in points]
        if published:
            report["comparison"] = [row._asdict() for row in against]
        if plot is not None:
            report["plots"] = [str(path) for path in written]
        print_json(report)
        return
    out = console()
    out.print(plan_table(result, parsed, study.catalog(parsed)))
    out.print(verdict(result))
    out.print(notes(result))
    if published:
        out.print(comparison_table(against, published))
    if sweep:
        out.print(sweep_table(sweep.partition("=")[0], [(p.value, p.plan) for p in points]))
    for path in written:
        out.print(f"wrote {path}")


def _sweep(
    study: Study, raw: dict[str, Any], file: Path, sweep: str, load: float | None
) -> list[SweepPoint]:
    key, values = parse_sweep(sweep)
    deployments = [(value, _varied(raw, file, key, value)) for value in values]
    return [
        SweepPoint(value, study.plan(deployment, load))
        for value, deployment in with_progress(deployments, f"sweep of {key}")
    ]


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """`links.0.gbps=5,8` into the key and its values, each read as TOML reads it."""
    key, equals, rest = text.partition("=")
    if not (key and equals and rest):
        raise InputError(f"{text!r}", where="--sweep", fix="write KEY=V1,V2,...")
    values = []
    for part in rest.split(","):
        try:
            values.append(tomllib.loads(f"value = {part}")["value"])
        except tomllib.TOMLDecodeError:
            values.append(part)  # a bare word: a name, such as a model's
    return key, values


def _varied(raw: dict[str, Any], file: Path, key: str, value: Any) -> Deployment:
    raw = copy.deepcopy(raw)
    at: Any = raw
    *parents, last = key.split(".")
    for part in parents:
        at = _step(at, part, key)
    if isinstance(at, list):
        _step(at, last, key)
        at[int(last)] = value
    elif isinstance(at, dict):
        at[last] = value
    else:
        raise _no_such_key(key, last)
    return parse_deployment(raw, file)


def _step(at: Any, part: str, key: str) -> Any:
    if isinstance(at, dict):
        # A section may be absent and still be swept: its defaults are then in force.
        return at.setdefault(part, {})
    if isinstance(at, list) and part.isdigit() and int(part) < len(at):
        return at[int(part)]
    raise _no_such_key(key, part)


def _no_such_key(key: str, part: str) -> InputError:
    return InputError(
        f"{key!r} leads nowhere at {part!r}",
        where="--sweep",
        fix="write a path of the file, list entries counted from 0: links.0.gbps",
    )
