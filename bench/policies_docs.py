"""Writes the results of `bench policies` and `bench simulate` into docs/simulator.md.

\b
    python -m prfaas_lab bench policies_docs policies.json --speed simulate.json

The tables between `<!-- begin NAME -->` and `<!-- end NAME -->` are replaced; figures go to img/.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from _page_blocks import fill
from prfaas.display.figure import BLUE, GREEN, GREY, ORANGE, make_folder, pyplot, save

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {"paper": BLUE, "adaptive": ORANGE, "local": GREY, "remote": GREEN}
TITLES = {
    "throughput_rps": "throughput",
    "served_rps": "of the window's arrivals",
    "goodput_rps": "goodput",
    "ttft_mean_s": "mean TTFT",
    "ttft_p90_s": "P90 TTFT",
    "ttft_p99_s": "P99 TTFT",
}
Row = dict[str, Any]


def calm_table(trace: Row) -> list[str]:
    lines = [
        "| load | policy | throughput (req/s) | goodput (req/s) | TTFT mean / P50 / P90 / P99 (s) "
        "| ms per output token | offloaded | egress mean / peak (Gbps) | prefix hits | kept up |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for load in dict.fromkeys(row["load"] for row in trace["calm"]):
        for policy in dict.fromkeys(row["policy"] for row in trace["calm"]):
            rows = [r for r in trace["calm"] if (r["load"], r["policy"]) == (load, policy)]
            m = {key: _mean(rows, key) for key in rows[0] if key != "policy"}
            kept_up = sum(row["stable"] for row in rows)
            lines.append(
                f"| {load:.0%} | {policy} | {m['throughput_rps']:.2f} | {m['goodput_rps']:.2f} "
                f"| {m['ttft_mean_s']:.2f} / {m['ttft_p50_s']:.2f} / {m['ttft_p90_s']:.2f} / "
                f"{m['ttft_p99_s']:.2f} | {m['tpot_s'] * 1e3:.1f} | {m['offload_fraction']:.1%} "
                f"| {m['egress_gbps']:.1f} / {m['egress_peak_gbps']:.1f} | {m['hit_rate']:.1%} "
                f"| {kept_up} of {len(rows)} |"
            )
    return lines


def difference_table(trace: Row, kind: str, key: str) -> list[str]:
    differences = trace[f"{kind}_difference"]
    lines = [
        f"| {key} | " + " | ".join(TITLES.values()) + " |",
        "|---" * (len(TITLES) + 1) + "|",
    ]
    for value in dict.fromkeys(d[key] for d in differences):
        cells = []
        for metric in TITLES:
            (d,) = (d for d in differences if d[key] == value and d["metric"] == metric)
            cells.append(f"{d['mean']:+.1%} ({d['low']:+.1%} to {d['high']:+.1%})")
        label = f"{value:.0%}" if isinstance(value, float) else value
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def stress_table(trace: Row) -> list[str]:
    lines = [
        "| stress | policy | goodput (req/s) | TTFT mean / P90 / P99 (s) | offloaded "
        "| egress mean (Gbps) |",
        "|---|---|---|---|---|---|",
    ]
    for stress in dict.fromkeys(row["stress"] for row in trace["stress"]):
        for policy in dict.fromkeys(row["policy"] for row in trace["stress"]):
            rows = [r for r in trace["stress"] if (r["stress"], r["policy"]) == (stress, policy)]
            lines.append(
                f"| {stress} | {policy} | {_mean(rows, 'goodput_rps'):.2f} "
                f"| {_mean(rows, 'ttft_mean_s'):.2f} / {_mean(rows, 'ttft_p90_s'):.2f} / "
                f"{_mean(rows, 'ttft_p99_s'):.2f} | {_mean(rows, 'offload_fraction'):.1%} "
                f"| {_mean(rows, 'egress_gbps'):.1f} |"
            )
    return lines


def facts(report: Row) -> list[str]:
    lines = [
        "| trace | 100% load (req/s) | first threshold | first N_p | window (s of trace) "
        "| requests per window |",
        "|---|---|---|---|---|---|",
    ]
    for name, trace in report["traces"].items():
        thresholds = _range([plan["threshold_tokens"] for plan in trace["planned"]])
        splits = _range([plan["n_prefill"] for plan in trace["planned"]])
        lines.append(
            f"| {name} | {trace['saturated_rps']:.2f} | {thresholds} | {splits} "
            f"| {trace['window_s']:,.0f} | {_range(trace['requests'])} |"
        )
    return lines


def speed_table(speed: Row) -> list[str]:
    lines = [
        "| run | requests | wall (s) | CPU (s) | µs of wall per request | peak memory (MB) |",
        "|---|---|---|---|---|---|",
    ]
    runs = {f"Poisson, no caches, {count}": run for count, run in speed["poisson"].items()}
    trace = speed.get("trace", {})
    runs |= {f"trace, prefix caches, `{k}`": v for k, v in trace.items() if k != "peers"}
    runs |= {f"trace, peer `{k}`": v for k, v in trace.get("peers", {}).items()}
    for name, run in runs.items():
        per_request = run["wall_s"] / run["requests"] * 1e6
        memory = run.get("peak_memory_mb", "")
        lines.append(
            f"| {name} | {run['requests']:,} | {run['wall_s']:.1f} | {run['cpu_s']:.1f} "
            f"| {per_request:,.0f} | {memory} |"
        )
    return lines


def figures(report: Row, folder: Path) -> None:
    make_folder(folder)
    names = list(report["traces"])
    figure, axes = pyplot.subplots(2, len(names), figsize=(4.6 * len(names), 6.0), squeeze=False)
    for column, name in enumerate(names):
        rows = report["traces"][name]["calm"]
        for policy, colour in COLOURS.items():
            own = [row for row in rows if row["policy"] == policy]
            loads = sorted({row["load"] for row in own})
            for axis, metric in ((axes[0][column], "ttft_p90_s"), (axes[1][column], "goodput_rps")):
                values = [[r[metric] for r in own if r["load"] == load] for load in loads]
                at = [100 * load for load in loads]
                axis.plot(at, [np.mean(v) for v in values], "o-", color=colour, label=policy)
        axes[0][column].set(title=name, ylabel="P90 TTFT (s)", yscale="log")
        axes[1][column].set(xlabel="load (%)", ylabel="goodput (req/s)", ylim=(0, None))
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    save(figure, folder / "simulator-load.png")

    figure, panels = pyplot.subplots(1, len(names), figsize=(4.6 * len(names), 3.4), squeeze=False)
    for axis, name in zip(panels[0], names, strict=True):
        rows = report["traces"][name]["stress"]
        stresses = list(dict.fromkeys(row["stress"] for row in rows))
        for shift, policy in ((-0.2, "paper"), (0.2, "adaptive")):
            height = [
                _mean([r for r in rows if (r["stress"], r["policy"]) == (s, policy)], "ttft_p90_s")
                for s in stresses
            ]
            places = np.arange(len(stresses)) + shift
            axis.bar(places, height, 0.4, color=COLOURS[policy], label=policy)
        axis.set_xticks(range(len(stresses)), stresses, fontsize=8, rotation=35, ha="right")
        axis.set(title=name, ylabel="P90 TTFT (s)", yscale="log")
    panels[0][0].legend(fontsize=8)
    save(figure, folder / "simulator-stress.png")


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--speed",
    type=click.Path(exists=True, path_type=Path),
    help="JSON output of `bench/simulate.py`.",
)
@click.option(
    "--docs", default=DOCS, type=click.Path(path_type=Path), help="Folder of the documentation."
)
def main(results: Path, speed: Path | None, docs: Path) -> None:
    report = json.loads(results.read_text())
    sections: dict[str, Sequence[str]] = {"facts": facts(report)}
    for name, trace in report["traces"].items():
        sections[f"calm {name}"] = calm_table(trace)
        sections[f"calm difference {name}"] = difference_table(trace, "calm", "load")
        sections[f"stress {name}"] = stress_table(trace)
        sections[f"stress difference {name}"] = difference_table(trace, "stress", "stress")
    if speed is not None:
        sections["speed"] = speed_table(json.loads(speed.read_text()))
    page = docs / "simulator.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), sections), encoding="utf-8")
    figures(report, docs / "img")


if __name__ == "__main__":
    main()
