"""Fits the constants of the estimator and shows how far its estimates are off.

\b
    python -m prfaas_lab bench estimates              # constants, errors, the case study as JSON
    python -m prfaas_lab bench estimates --write      # also writes the constants into the package
    python -m prfaas_lab bench estimates --docs docs  # also writes the tables of docs/estimates.md

Errors are those of estimates by constants that have not seen the model, the accelerator, or both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import msgspec
import numpy as np

from prfaas.catalog import Catalog
from prfaas.config import Deployment
from prfaas.config.deployment_file import load_deployment
from prfaas.estimator.efficiency import Efficiencies, fitted
from prfaas.estimator.instance import Instance
from prfaas.estimator.profile import estimated_profile
from prfaas.estimator.times import prefill_s
from prfaas.studies.problem_files import Study
from prfaas_lab.fitting.fit import (
    Hidden,
    Kind,
    Selection,
    constants_of,
    fit,
    unseen_errors,
    usable,
)
from prfaas_lab.fitting.observations import Observation, builtin_observations

ROOT = Path(__file__).parents[1]
CONSTANTS = ROOT / "src" / "prfaas" / "estimator" / "data" / "efficiencies.toml"
CASE_STUDY = ROOT / "configs" / "case_study.toml"
CASE = "case-study-1t"
CASE_CONTEXT = 27998  # mean tokens of a decoding sequence: the mean prompt and half the response
PUBLISHED = {"threshold_tokens": 19_400, "gain": 1.54, "lambda_max_rps": 3.24}
HEADER = (
    "# Constants of the estimator, fitted to points.toml and profiles.toml; docs/estimates.md\n"
    "# explains them. Written by `python -m prfaas_lab bench estimates --write`; do not edit.\n"
)
Errors = Sequence[tuple[Observation, float]]
Row = dict[str, Any]
KINDS: tuple[Kind, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Figures:
    """Everything that the page says, computed once."""

    observed: tuple[Observation, ...]

    @cached_property
    def used(self) -> list[Observation]:
        return usable(self.observed)

    @cached_property
    def constants(self) -> Efficiencies:
        return fit(self.observed)

    @cached_property
    def errors(self) -> dict[tuple[Kind, Hidden], Errors]:
        hidden: tuple[Hidden, ...] = ("model", "accelerator", "model and accelerator")
        return {
            (kind, what): unseen_errors(self.used, kind, self.constants, what)
            for kind in KINDS
            for what in hidden
        }

    @property
    def paper(self) -> Errors:
        """Errors of the published H200 times, each by constants that have not seen its model."""
        return [(seen, e) for seen, e in self.errors["prefill", "model"] if seen.published_h200]

    @cached_property
    def without_case_study(self) -> Efficiencies:
        return fit(self.observed, is_case_study)

    def h20(self, hide: Selection) -> list[tuple[int, float]]:
        constants = constants_of(usable(self.observed, hide), self.constants)
        return [
            (seen.tokens, math.expm1(seen.log_error(constants)))
            for seen in self.observed
            if (seen.model, seen.accelerator, seen.kind) == (CASE, "h20", "prefill")
        ]


def summary(errors: Iterable[float]) -> Row:
    """Of ln(estimate / truth). Shares are of the truth."""
    logs = list(errors)
    shares = np.abs(np.expm1(logs))
    return {
        "points": len(logs),
        "median": float(np.median(shares)),
        "p90": float(np.quantile(shares, 0.9)),
        "bias": math.expm1(median(logs)),
    }


def after_one_measurement(errors: Errors) -> list[float]:
    """Errors of the other points of a campaign when one of its points corrects the estimate."""
    campaigns: dict[tuple[str, ...], list[float]] = {}
    for seen, error in errors:
        key = (*seen.group, str(seen.gpus), seen.engine)
        campaigns.setdefault(key, []).append(error)
    return [
        other - error
        for values in campaigns.values()
        for i, error in enumerate(values)
        for j, other in enumerate(values)
        if i != j
    ]


class EstimatedStudy(Study):
    """Plans with estimated profiles in place of the catalog's."""

    def __init__(self, constants: Efficiencies) -> None:
        super().__init__(CASE_STUDY, "paper")
        builtin = Catalog.builtin()
        model = builtin.model(CASE)
        profiles = [
            estimated_profile(
                Instance(model.model_shape(), model.spec(), builtin.accelerator(name), 8),
                CASE_CONTEXT,
                constants,
            )
            for name in ("h200", "h20")
        ]
        self._estimated = Catalog(builtin.models, builtin.accelerators, tuple(profiles))

    def catalog(self, deployment: Deployment) -> Catalog:
        return self._estimated


def case_study(constants: Efficiencies) -> Row:
    comparison = EstimatedStudy(constants).plan(load_deployment(CASE_STUDY))
    best = comparison.prfaas_pd
    assert best is not None
    return {
        "threshold_tokens": best.threshold_tokens,
        "gain": comparison.ratios["prfaas_over_homogeneous"],
        "lambda_max_rps": best.lambda_max_rps,
    }


def is_case_study(seen: Observation) -> bool:
    return seen.model == CASE


def report(figures: Figures) -> Row:
    return {
        "points": len(figures.observed),
        "fitted_points": len(figures.used),
        "constants": msgspec.to_builtins(figures.constants),
        "largest_difference_to_package": difference(figures.constants, fitted()),
        "published_h200": summary(error for _, error in figures.paper),
        "case_study_h20_hidden": figures.h20(
            lambda seen: (seen.model, seen.accelerator) == (CASE, "h20")
        ),
        "case_study_hidden": figures.h20(is_case_study),
        "unseen": {
            f"{kind}, unseen {what}": summary(error for _, error in errors)
            for (kind, what), errors in figures.errors.items()
        },
        "after_one_measurement": {
            kind: summary(after_one_measurement(figures.errors[kind, "model and accelerator"]))
            for kind in KINDS
        },
        "case_study_from_estimates": case_study(figures.without_case_study),
        "case_study_published": PUBLISHED,
    }


def difference(one: Efficiencies, other: Efficiencies) -> float:
    """The largest relative difference of two sets of constants."""
    ours, others = (list(_numbers(msgspec.to_builtins(each))) for each in (one, other))
    return max(abs(a / b - 1) for a, b in zip(ours, others, strict=True))


def _numbers(tree: Row) -> Iterable[float]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif not isinstance(value, list):
            yield float(value)


def as_toml(constants: Efficiencies) -> str:
    tree = msgspec.to_builtins(constants)
    lines = [f"{key} = {value:.4g}" for key, value in tree.items() if isinstance(value, float)]
    names = ", ".join(f'"{name}"' for name in constants.fitted_accelerators)
    lines.append(f"fitted_accelerators = [{names}]")
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *(f"{name} = {part:.4g}" for name, part in value.items())]
    return HEADER + "\n".join(re.sub(r"= (\d+)$", r"= \1.0", line) for line in lines) + "\n"


def constants_table(figures: Figures) -> list[str]:
    constants = figures.constants
    fixed = constants.prefill_fixed_s
    rows = [
        ("fixed time of a prefill, the paper's engines", f"{fixed.paper:.3f} s"),
        ("fixed time of a prefill, SGLang", f"{fixed.sglang:.3f} s"),
        ("fixed time of a prefill, vLLM and TensorRT-LLM", f"{fixed.vllm:.3f} s"),
        ("matrix products", f"{constants.matrix:.0%} of the peak arithmetic"),
        ("softmax of attention", f"{constants.softmax_flops / 1e12:,.0f} Tflop/s of its products"),
        ("memory", f"{constants.memory:.0%} of the bandwidth"),
        ("copies to experts and back", f"{constants.routed_bytes:.0f} bytes per element"),
        ("activations in every GPU", f"{constants.hidden_bytes:.0f} bytes per element and layer"),
        ("exchange between GPUs", f"{constants.exchange:.0%} of the bandwidth in one direction"),
        ("layer of a decode step", f"{constants.decode_layer_s * 1e6:.0f} µs"),
        ("experts of a layer of a decode step", f"{constants.decode_expert_layer_s * 1e6:.0f} µs"),
    ]
    return [
        "| constant | fitted |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]


def paper_table(figures: Figures) -> list[str]:
    lines = ["| model, not seen by the fit | tokens: error of T_prefill |", "|---|---|"]
    for model in dict.fromkeys(seen.model for seen, _ in figures.paper):
        cells = [
            f"{seen.tokens:,}: {math.expm1(error):+.0%}"
            for seen, error in figures.paper
            if seen.model == model
        ]
        lines.append(f"| {model} | {'; '.join(cells)} |")
    whole = summary(error for _, error in figures.paper)
    lines.append(f"| **all {whole['points']}** | {_sizes(whole)} |")
    return lines


def unseen_table(figures: Figures, hidden: Hidden) -> list[str]:
    lines = [
        f"| {hidden}, not seen by the fit | prefill: points, median, P90, bias "
        "| decode: the same |",
        "|---|---|---|",
    ]
    names = sorted(
        {getattr(seen, hidden) for kind in KINDS for seen, _ in figures.errors[kind, hidden]}
    )
    for name in [*names, "**all**"]:
        cells = []
        for kind in KINDS:
            logs = [
                error
                for seen, error in figures.errors[kind, hidden]
                if name in (getattr(seen, hidden), "**all**")
            ]
            cells.append(_cell(logs))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(logs: Sequence[float]) -> str:
    if not logs:
        return "none"
    of = summary(logs)
    return f"{of['points']}, {of['median']:.0%}, {of['p90']:.0%}, {of['bias']:+.0%}"


def _sizes(of: Row) -> str:
    return f"median {of['median']:.1%}, P90 {of['p90']:.1%}"


def parts_table(figures: Figures) -> list[str]:
    lines = [
        "| standard deviation of ln(estimate / truth) | prefill | decode |",
        "|---|---|---|",
    ]
    titles = {
        "model": "common to a model on all accelerators",
        "accelerator": "common to an accelerator for all models",
        "pair": "of one model on one accelerator with one engine",
        "length": "different from length to length, or batch to batch",
        "total": "together",
    }
    errors = figures.constants.prefill_error, figures.constants.decode_error
    for field, title in titles.items():
        lines.append(
            f"| {title} | " + " | ".join(f"{getattr(e, field):.2f}" for e in errors) + " |"
        )
    return lines


def correction_table(figures: Figures) -> list[str]:
    lines = [
        "| unseen model and accelerator | prefill: points, median, P90, bias | decode: the same |",
        "|---|---|---|",
    ]
    both: Hidden = "model and accelerator"
    before = [[error for _, error in figures.errors[kind, both]] for kind in KINDS]
    after = [after_one_measurement(figures.errors[kind, both]) for kind in KINDS]
    lines.append("| as estimated | " + " | ".join(map(_cell, before)) + " |")
    lines.append("| corrected with one point | " + " | ".join(map(_cell, after)) + " |")
    return lines


def case_table(figures: Figures) -> list[str]:
    planned = case_study(figures.without_case_study)
    alone = figures.h20(lambda seen: (seen.model, seen.accelerator) == (CASE, "h20"))
    hidden = figures.h20(is_case_study)
    shown = [
        "; ".join(f"{tokens:,} tokens: {error:+.1%}" for tokens, error in errors)
        for errors in (alone, hidden)
    ]
    threshold, gain = planned["threshold_tokens"], planned["gain"]
    return [
        "| case study | published | from estimates | difference |",
        "|---|---|---|---|",
        f"| T_prefill on 8 x H20, its own H20 times hidden | three times | | {shown[0]} |",
        f"| T_prefill on 8 x H20, all its times hidden | three times | | {shown[1]} |",
        f"| threshold | {PUBLISHED['threshold_tokens']:,} tokens | {threshold:,} tokens "
        f"| {threshold / PUBLISHED['threshold_tokens'] - 1:+.0%} |",
        f"| gain over one homogeneous cluster | {PUBLISHED['gain']} | {gain:.2f} "
        f"| {gain - PUBLISHED['gain']:+.2f} |",
        f"| Λ_max | {PUBLISHED['lambda_max_rps']} req/s | {planned['lambda_max_rps']:.2f} req/s "
        f"| {planned['lambda_max_rps'] / PUBLISHED['lambda_max_rps'] - 1:+.0%} |",
    ]


def checks_table(figures: Figures) -> list[str]:
    """Points that are not fitted, by source."""
    lines = ["| points that are not fitted | engine | estimate / printed |", "|---|---|---|"]
    groups: dict[tuple[str, str, int, str, str], list[float]] = {}
    for seen in figures.observed:
        if seen.use == "check":
            key = (seen.kind, seen.model, seen.gpus, seen.accelerator, seen.engine)
            groups.setdefault(key, []).append(seen.log_error(figures.constants))
    for (kind, model, gpus, accelerator, engine), logs in groups.items():
        name = engine.split(",")[0]
        ratio = math.exp(fmean(logs))
        lines.append(f"| {kind} of {model} on {gpus} x {accelerator} | {name} | {ratio:.2f} |")
    return lines


def cached_table(figures: Figures) -> list[str]:
    """How much longer a prefill takes after a cached prefix, measured and estimated. The engine
    that was measured is slow, so its ratios are compared and not its times."""
    catalog = Catalog.builtin()
    lines = [
        "| new tokens | after cached tokens | measured: times as long as without | estimated |",
        "|---|---|---|---|",
    ]
    for record in catalog.profiles:
        without = {point.new: point.seconds for point in record.prefill if not point.cached}
        model = catalog.model(record.model)
        instance = Instance(
            model.model_shape(), model.spec(), catalog.accelerator(record.accelerator), record.gpus
        )
        lean = replace(instance, engine_class="vllm")
        for point in record.prefill:
            if point.cached and point.seconds:
                measured = point.seconds / (without[point.new] or math.nan)
                after = prefill_s(lean, figures.constants, point.new, point.cached)
                estimated = after / prefill_s(lean, figures.constants, point.new)
                lines.append(
                    f"| {point.new:,} | {point.cached:,} | {measured:.2f} | {estimated:.2f} |"
                )
    return lines


def write_docs(figures: Figures, page: Path) -> None:
    tables = {
        "constants": constants_table(figures),
        "paper": paper_table(figures),
        "models": unseen_table(figures, "model"),
        "accelerators": unseen_table(figures, "accelerator"),
        "parts": parts_table(figures),
        "correction": correction_table(figures),
        "case study": case_table(figures),
        "cached": cached_table(figures),
        "checks": checks_table(figures),
    }
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        assert f"<!-- begin {name} -->" in text, f"{page} has no place for the table {name!r}"
        begin, _, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        text = "".join((begin, f"<!-- begin {name} -->\n", "\n".join(lines), "\n", end, after))
    page.write_text(text, encoding="utf-8")


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Write the constants into the package.")
@click.option("--docs", type=click.Path(path_type=Path), help="Folder with estimates.md to update.")
def main(write: bool, docs: Path | None) -> None:
    figures = Figures(builtin_observations())
    if write:
        CONSTANTS.write_text(as_toml(figures.constants), encoding="utf-8")
    if docs is not None:
        write_docs(figures, docs / "estimates.md")
    click.echo(json.dumps(report(figures), indent=2))


if __name__ == "__main__":
    main()
