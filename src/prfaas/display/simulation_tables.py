"""Tables of simulated runs, their saturation, and notes on unstable runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from prfaas.display.plan_tables import TITLES
from prfaas.planner.comparison import DEFAULT_UTILISATION
from prfaas.sim.results.summary import Summary
from prfaas.studies.saturation import Saturated


def runs_table(runs: Mapping[str, Summary], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(TITLES.get(name, name), justify="right")

    def row(label: str, pick: Callable[[Summary], Any], spec: str, *, end: bool = False) -> None:
        cells = [_cell(pick(run), spec) for run in runs.values()]
        table.add_row(label, *cells, end_section=end)

    row("throughput (req/s)", lambda r: r.throughput_rps, ".3f")
    row("goodput (req/s)", lambda r: r.goodput_rps, ".3f", end=True)
    row("TTFT mean (s)", lambda r: r.ttft_s.mean, ".2f")
    row("TTFT P50 (s)", lambda r: r.ttft_s.p50, ".2f")
    row("TTFT P90 (s)", lambda r: r.ttft_s.p90, ".2f")
    row("TTFT P99 (s)", lambda r: r.ttft_s.p99, ".2f")
    row("of it waiting for prefill (s)", lambda r: r.wait_s, ".2f")
    row("time per output token (ms)", lambda r: r.tpot_s * 1e3, ".1f", end=True)
    row("offloaded", lambda r: r.offload_fraction, ".1%")
    row("egress mean (Gbps)", lambda r: r.egress_gbps.mean, ".1f")
    row("egress peak (Gbps)", lambda r: r.egress_gbps.peak, ".1f")
    row("prefix hits, of prompt tokens", lambda r: r.hit_rate, ".1%")
    row("prefixes copied (GB)", lambda r: r.copied_gb, ".1f", end=True)
    for role in dict.fromkeys(role for run in runs.values() for role in run.utilisation):
        row(f"{role} busy", lambda r, role=role: r.utilisation.get(role), ".0%")  # type: ignore[misc]
    row("plan changes", lambda r: r.plan_changes, "d")
    row("stable", lambda r: "yes" if r.stable else "[red]no[/red]", "")
    return table


def cluster_tables(name: str, run: Summary) -> list[Table]:
    """A table per kind of cluster and one of the links, where there is more than one cluster of a
    kind. Otherwise the table of all runs has the same figures. `elsewhere` is the share of requests
    that another pd cluster decoded; `prefill` and `decode` are how busy these instances were."""
    if len(run.pd_clusters) < 2 and len(run.prfaas_clusters) < 2:
        return []
    title = TITLES.get(name, name)
    pds = _titled(
        f"{title}: requests by the pd cluster at which they arrived",
        "pd cluster",
        "req/s",
        "served/s",
        "good/s",
        "TTFT (s)",
        "P90 (s)",
        "offloaded",
        "elsewhere",
        "prefill",
        "decode",
    )
    for pd in run.pd_clusters:
        pds.add_row(
            escape(pd.cluster),
            f"{pd.arrivals_rps:.3f}",
            f"{pd.throughput_rps:.3f}",
            f"{pd.goodput_rps:.3f}",
            _cell(pd.ttft_mean_s, ".2f"),
            _cell(pd.ttft_p90_s, ".2f"),
            _cell(pd.offload_fraction, ".1%"),
            _cell(pd.decoded_elsewhere, ".1%"),
            _cell(pd.prefill_utilisation, ".0%"),
            _cell(pd.decode_utilisation, ".0%"),
        )
    prfaas = _titled(f"{title}: prfaas clusters", "prfaas cluster", "prefills/s", "busy")
    for cluster in run.prfaas_clusters:
        prfaas.add_row(
            escape(cluster.cluster), f"{cluster.prefills_rps:.3f}", f"{cluster.utilisation:.0%}"
        )
    links = _titled(
        f"{title}: links",
        "from",
        "to",
        "prefills/s",
        "mean (Gbps)",
        "peak (Gbps)",
        "link (Gbps)",
        "busy",
        text=2,
    )
    for link in run.links:
        links.add_row(
            escape(link.source),
            escape(link.target),
            f"{link.prefills_rps:.3f}",
            f"{link.gbps:.2f}",
            f"{link.peak_gbps:.2f}",
            f"{link.capacity_gbps:g}",
            f"{link.utilisation:.0%}",
        )
    return [pds, prfaas, links]


def _titled(title: str, *headings: str, text: int = 1) -> Table:
    """The first `text` columns are words, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < text else "right")
    return table


def saturated_table(rows: Sequence[Saturated]) -> Table:
    table = Table(
        title=f"saturated; TTFT at {DEFAULT_UTILISATION:.0%} of each one's own throughput, "
        "mean / P90 in s",
        title_justify="left",
    )
    for heading in ("", "req/s", "PrfaaS-PD over it", "published", "TTFT with queueing"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("without", justify="right")
    table.add_column("published", justify="right")
    for row in rows:
        with_, without, theirs = row.ttft_s, row.ttft_without_queueing_s, row.published
        table.add_row(
            TITLES[row.system],
            f"{row.rps:.3f}",
            "" if row.system == "prfaas_pd" else f"{row.ratio:.2f}x",
            "" if row.published_ratio is None else f"{row.published_ratio:.2f}x",
            f"{with_.mean:.2f} / {with_.p90:.2f}",
            f"{without.mean:.2f} / {without.p90:.2f}",
            "" if theirs.ttft_mean_s is None else f"{theirs.ttft_mean_s} / {theirs.ttft_p90_s}",
        )
    return table


def notes(runs: Mapping[str, Summary], wall_s: float) -> str:
    lines = []
    for name, run in runs.items():
        problem = shortfall(run)
        if problem is not None:
            lines.append(f"{TITLES.get(name, name)}: {problem}")
    requests = sum(run.requests for run in runs.values())
    lines.append(f"{requests:,} requests simulated; {wall_s:.1f} s in all.")
    return "\n".join(f"[dim]- {escape(line)}[/dim]" for line in lines)


def shortfall(run: Summary) -> str | None:
    """Why the run is not stable; None: it is."""
    if run.behind is not None:
        stage, growth = run.behind.stage, run.behind.growth_s_per_s
        return (
            f"unstable, cannot keep up with this load. {stage} falls behind by "
            f"{growth:.2f} s of work per second, {growth / (1 + growth):.0%} of what it is "
            "given; its TTFT grows with the length of the run."
        )
    return None if run.stable else "some requests were never answered."


def _cell(value: Any, spec: str) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "-"
    return format(value, spec)
