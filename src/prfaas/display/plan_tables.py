"""Tables of a plan, its verdict in one sentence, and notes on its assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from prfaas.catalog import Catalog
from prfaas.config import Deployment
from prfaas.planner.comparison import DeploymentComparison, Solution
from prfaas.planner.lost_sites import LostSite
from prfaas.planner.ranges import Measurement, PlanRanges, Range
from prfaas.planner.report import EstimatedTimes
from prfaas.studies.plan_comparison import Row
from prfaas.studies.sweep import SweepPoint

TITLES = {
    "prfaas_pd": "PrfaaS-PD",
    "homogeneous": "homogeneous PD",
    "naive": "naive heterogeneous",
    "equal_cost": "PD of equal cost",
}


def _number(format_spec: str) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else format(value, format_spec)


def plan_table(
    plan: DeploymentComparison,
    deployment: Deployment,
    catalog: Catalog,
    ranges: PlanRanges | None = None,
) -> Table:
    solutions = {name: getattr(plan, name) for name in TITLES}
    shown = {name: solution for name, solution in solutions.items() if solution is not None}
    hardware = " + ".join(
        f"{cluster.gpus} x {catalog.accelerator(cluster.accelerator).display_name}"
        for cluster in deployment.clusters
    )
    table = Table(
        title=f"{deployment.model.name} on {hardware} ({plan.reading} reading)",
        title_justify="left",
    )
    table.add_column("")
    for name in shown:
        table.add_column(TITLES[name], justify="right")

    def row(
        label: str,
        pick: Callable[[Solution], Any],
        spec: str,
        *,
        within: Range | None = None,  # of PrfaaS-PD, which is the first column
        end_section: bool = False,
    ) -> None:
        cells = [_number(spec)(pick(solution)) for solution in shown.values()]
        if within is not None and within.high > within.low * 1.01:
            cells[0] += f" {range_text(within, spec)}"
        table.add_row(label, *cells, end_section=end_section)

    row(
        "threshold t (tokens)",
        lambda s: s.threshold_tokens,
        ",d",
        within=None if ranges is None else ranges.threshold_tokens,
    )
    row("N_prfaas", lambda s: s.n_prfaas, "d")
    row(
        "N_p local prefill",
        lambda s: s.n_prefill,
        "d",
        within=None if ranges is None else ranges.n_prefill,
    )
    row("N_d local decode", lambda s: s.n_decode, "d", end_section=True)
    row("Theta_prfaas (req/s)", lambda s: s.theta.prfaas, ".2f")
    row("Theta_pd-p (req/s)", lambda s: s.theta.pd_p, ".2f")
    row("Theta_pd-d (req/s)", lambda s: s.theta.pd_d, ".2f")
    row(
        "Lambda_max (req/s)",
        lambda s: s.lambda_max_rps,
        ".3f",
        within=None if ranges is None else ranges.lambda_max_rps,
    )
    table.add_row("limited by", *(s.bottleneck for s in shown.values()), end_section=True)
    row("offloaded", lambda s: s.offload_fraction, ".1%")
    row("egress (Gbps)", lambda s: s.egress_bps / 1e9, ".1f", end_section=True)
    if plan.reading == "exact":
        row("at load (req/s)", lambda s: s.prediction and s.prediction.load_rps, ".2f")
        row(
            "mean wait for prefill (s)",
            lambda s: s.prediction and s.prediction.prefill_wait_mean_s,
            ".2f",
        )
    row(
        "TTFT mean (s)",
        lambda s: s.ttft and s.ttft.mean_s,
        ".2f",
        within=None if ranges is None else ranges.ttft_mean_s,
    )
    if plan.reading == "exact":
        row("TTFT P50 (s)", lambda s: s.ttft and s.ttft.p50_s, ".2f")
    row(
        "TTFT P90 (s)",
        lambda s: s.ttft and s.ttft.p90_s,
        ".2f",
        within=None if ranges is None else ranges.ttft_p90_s,
    )
    if plan.reading == "exact":
        row("TTFT P99 (s)", lambda s: s.ttft and s.ttft.p99_s, ".2f")
    if any(s.slo_capacity_rps is not None for s in shown.values()):
        goal = deployment.slo
        label = f"req/s with P{goal.ttft_quantile * 100:g} <= {goal.ttft_s:g} s"
        row(label, lambda s: s.slo_capacity_rps, ".3f")
    return table


def range_text(within: Range, spec: str) -> str:
    """The bounds of a range in parentheses, in the format of the figure beside it."""
    if spec.endswith("d"):
        spec = spec.replace("d", ".0f")
    low, high = (
        format(bound, spec) if math.isfinite(bound) else "unstable"
        for bound in (within.low, within.high)
    )
    return f"({low}-{high})" if low != high else f"({low})"


def verdict(plan: DeploymentComparison, ranges: PlanRanges | None = None) -> str:
    ratios = plan.ratios
    within = {
        "prfaas_over_homogeneous": None if ranges is None else ranges.over_homogeneous,
        "prfaas_over_equal_cost": None if ranges is None else ranges.over_equal_cost,
    }
    words = []
    for key, against in (
        ("prfaas_over_homogeneous", "as many GPUs in one PD cluster"),
        ("prfaas_over_equal_cost", "the same money in one PD cluster"),
        ("prfaas_over_naive", "sending every prefill away"),
    ):
        ratio = ratios[key]
        if ratio is not None:
            found = within.get(key)
            bounds = f" {range_text(found, '.2f')}" if found else ""
            words.append(f"[bold]{ratio:.2f}x[/bold]{bounds} {against}")
    if not words:
        return "Nothing to compare with."
    return "Throughput of PrfaaS-PD: " + ", ".join(words) + "."


def losses(lost_sites: Sequence[LostSite]) -> str:
    """What is served without each PrfaaS cluster, a sentence each."""
    return "\n".join(escape(lost.in_words) for lost in lost_sites)


def estimate_notes(
    estimated: Sequence[EstimatedTimes], ranges: PlanRanges | None, model: str
) -> str:
    """What is estimated, how far off it may be, and which measurement narrows the ranges most."""
    lines = []
    for times in estimated:
        what = {"prefill": "prefill times", "decode": "decode steps"}[times.what]
        line = (
            f"{times.cluster}: the {what} of {model} on {times.gpus} x {times.accelerator} are "
            f"{times.provenance}; {times.error.in_words}."
        )
        if times.inferred:
            line += f" Inferred figures of {times.accelerator}: {', '.join(times.inferred)}."
        lines.append(line)
    if ranges is not None:
        lines.append(
            "Figures in parentheses are the range from the 5% to the 95% quantile of the errors of "
            "the estimates, with the best threshold and split in each case."
        )
        if ranges.slo_missed:
            lines.append(
                f"In {ranges.slo_missed:.0%} of the cases no decode batch meets the SLO; the "
                "ranges cover the other cases."
            )
    text = "\n".join(f"[dim]- {escape(line)}[/dim]" for line in lines)
    if ranges is None or ranges.narrow_with is None:
        return text
    return f"{text}\n{escape(_narrow_text(ranges.narrow_with, model))}"


def _narrow_text(best: Measurement, model: str) -> str:
    what = f"prefill of {_listed(best.lengths)} tokens"
    if best.batches:
        what += f", decode at batches of {_listed(best.batches)}"
    figure = "gain" if best.figure == "gain" else "Lambda_max"
    before, after = (range_text(found, ".2f").strip("()") for found in (best.before, best.after))
    return (
        f"The measurement that narrows this most: {model} on {best.gpus} x {best.accelerator} "
        f"({what}). If it confirms the estimate, the range of the {figure} shrinks from "
        f"{before} to {after}.\n  {best.command}"
    )


def _listed(numbers: Sequence[int]) -> str:
    *most, last = (f"{number:,}" for number in numbers)
    return f"{'; '.join(most)} and {last}" if most else last


def notes(plan: DeploymentComparison) -> str:
    lines = []
    for name in TITLES:
        solution = getattr(plan, name)
        if solution is None:
            reason = {"naive": "there is no prfaas cluster", "equal_cost": "a price is unknown"}
            why = reason.get(name, "it would have fewer than two instances")
            lines.append(f"{TITLES[name]}: left out, {why}.")
    if plan.reading == "exact":
        lines += _exact_notes(plan)
    decode_slack = -plan.prfaas_pd.eq8_imbalance
    if decode_slack > 0.05:
        lines.append(f"Decode keeps {decode_slack:.0%} slack: whole instances do not meet eq. 8.")
    for e in plan.prfaas_pd.extrapolations:
        if e.fraction >= 0.01:
            low, high = e.measured_new
            cached = f"up to {e.measured_cached:,}" if e.measured_cached else "none"
            lines.append(
                f"{e.cluster}: {e.fraction:.0%} of its prefills lie beyond the profile's points "
                f"({low:,} to {high:,} new tokens, {cached} cached); their times are "
                f"extrapolated. Profile {e.provenance}."
            )
    return "\n".join(f"[dim]- {escape(line)}[/dim]" for line in lines)


def _exact_notes(plan: DeploymentComparison) -> list[str]:
    lines = []
    for name in TITLES:
        solution = getattr(plan, name)
        if solution is None:
            continue
        if not solution.prediction.stable:
            busy = max(solution.prediction.stages, key=lambda stage: stage.utilisation)
            lines.append(
                f"{TITLES[name]}: unstable at {solution.prediction.load_rps:.2f} req/s, "
                f"{busy.name} would be {busy.utilisation:.0%} busy; no TTFT."
            )
        if solution.stable_at_paper_lambda is False:
            lines.append(
                f"{TITLES[name]}: the paper reading's Lambda_max is not stable; "
                f"{solution.lambda_max_rps:.3f} req/s is the limit with true mean service times."
            )
    return lines


def sweep_table(key: str, points: Sequence[SweepPoint]) -> Table:
    table = Table(title=f"re-optimised over {key}", title_justify="left")
    for title in (key.rpartition(".")[2], "t", "N_p", "N_d", "req/s", "limited by", "sent", "Gbps"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("TTFT", "P90", "/homog.", "/naive"):
        table.add_column(title, justify="right", no_wrap=True)
    for value, plan in points:
        s, ratios, ttft = plan.prfaas_pd, plan.ratios, plan.prfaas_pd.ttft
        table.add_row(
            escape(str(value)),
            _number(",d")(s.threshold_tokens),
            str(s.n_prefill),
            str(s.n_decode),
            f"{s.lambda_max_rps:.3f}",
            s.bottleneck,
            f"{s.offload_fraction:.0%}",
            f"{s.egress_bps / 1e9:.1f}",
            _number(".2f")(ttft and ttft.mean_s),
            _number(".2f")(ttft and ttft.p90_s),
            _number(".2f")(ratios["prfaas_over_homogeneous"]),
            _number(".2f")(ratios["prfaas_over_naive"]),
        )
    return table


def comparison_table(rows: Sequence[Row], published: Path) -> Table:
    """One column per system; a cell holds our value, the published one, and the difference."""
    table = Table(title=f"compared with {published.name}: ours, published, difference")
    table.title_justify = "left"
    systems = [name for name in TITLES if any(row.system == name for row in rows)]
    table.add_column("")
    for name in systems:
        table.add_column(TITLES[name], justify="right")
    cells = {(row.system, row.quantity): _cell(row) for row in rows}
    quantities = list(dict.fromkeys(row.quantity for row in rows if row.system != "ratios"))
    for quantity in quantities:
        table.add_row(quantity, *(cells.get((name, quantity), "") for name in systems))
    if systems:
        table.add_section()
    for row in rows:
        if row.system == "ratios":
            table.add_row(row.quantity, _cell(row))
    return table


def _cell(row: Row) -> str:
    ours = "-" if row.ours is None else f"{row.ours:.4g}"
    if row.quantity == "threshold_tokens" and row.ours is not None:
        ours = f"{row.ours:.0f}"
    if row.difference is None:
        return f"{ours}  {row.published:g}"
    colour = "green" if abs(row.difference) <= 0.015 else "yellow"
    return f"{ours}  {row.published:g}  [{colour}]{row.difference:+.1%}[/{colour}]"
