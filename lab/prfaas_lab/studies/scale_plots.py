"""Figures of the study at scale: gain over bandwidth, TTFT over a day, and TTFT around losses.

They draw the report of `bench/scale_study.py`, which is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.display.figure import BLUE, GREEN, GREY, ORANGE, RED, make_folder, pyplot, save

Report = Mapping[str, Any]
_COLOURS = (BLUE, ORANGE, GREEN, RED)  # of the regions
_LOSSES = {
    "lost prfaas": "a PrfaaS site is lost",
    "lost pd": "a PD site is lost",
    "lost link": "a link is lost",
    "lost pd alone": "a PD site is lost, PD clusters alone",
}


def plot_bandwidth(path: Path, report: Report) -> Path:
    """The gain over PD clusters alone for the same money, by the bandwidth between the sites."""
    make_folder(path.parent)
    figure, axes = pyplot.subplots(figsize=(6.0, 3.4))
    points = sorted(report["bandwidth"].values(), key=lambda at: float(at["gbps"]))
    gbps = [at["gbps"] for at in points]
    for key, need, colour, label in (
        ("gain", "day", BLUE, "day with shifting traffic"),
        ("steady_gain", "steady", ORANGE, "steady traffic"),
    ):
        axes.plot(gbps, [at[key] for at in points], "o-", color=colour, label=label, markersize=3)
        axes.axvline(report["needs"][need]["suffices_gbps"], color=colour, linestyle=":")
    axes.plot([], [], color=GREY, linestyle=":", label="from here on, more hardly helps")
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set(xscale="log", xlabel="bandwidth from PrfaaS to PD clusters (Gbit/s in total)")
    axes.set_ylabel("traffic: PD clusters alone = 1")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save(figure, path)


def plot_day(path: Path, report: Report) -> Path:
    """Demand and P90 of the TTFT by region over the hours of the day."""
    make_folder(path.parent)
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6.4, 5.2), sharex=True)
    demand = {name: np.array(values) for name, values in report["assumptions"]["demand"].items()}
    hours = np.arange(len(next(iter(demand.values()))))
    for (name, values), colour in zip(demand.items(), _COLOURS, strict=False):
        top.plot(hours, values * 100, color=colour, label=name)
    top.plot(hours, sum(demand.values()) * 100, color="black", label="all")
    top.set(ylabel="demand (% of the sum of peaks)", ylim=(0, None))
    for case, style in (("day", "-"), ("day alone", "--")):
        regions = report["simulated"][case]["regions"]
        for (_, region), colour in zip(regions.items(), _COLOURS, strict=False):
            values = _values(region["p90_by_hour"])
            bottom.plot(np.arange(len(values)) + 0.5, values, style, color=colour, linewidth=1.2)
    bottom.plot([], [], "-", color="black", label="PrfaaS")
    bottom.plot([], [], "--", color="black", label="alone, the same money")
    bottom.set(xlabel="hour (UTC)", ylabel="P90 TTFT (s)", ylim=(0, None), xlim=(0, 24))
    bottom.set_xticks(range(0, 25, 3))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=5 if axes is top else 2)
    return save(figure, path)


def plot_losses(path: Path, report: Report, bin_s: float, edges_s: Sequence[float]) -> Path:
    """P90 of the TTFT by region around each loss. `edges_s`: the time before it, and its length."""
    make_folder(path.parent)
    figure, panels = pyplot.subplots(2, 2, figsize=(8.0, 5.2), sharex=True, sharey=True)
    before_s, during_s = edges_s
    for axes, (case, title) in zip(panels.ravel(), _LOSSES.items(), strict=True):
        series = report["simulated"][case]["p90_by_bin"]
        for (name, values), colour in zip(series.items(), _COLOURS, strict=False):
            at_min = (np.arange(len(values)) + 0.5) * bin_s / 60
            axes.plot(at_min, _values(values), color=colour, label=name, linewidth=1.2)
        axes.axvspan(before_s / 60, (before_s + during_s) / 60, color=GREY, alpha=0.25)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("P90 TTFT (s)")
    for axes in panels[1]:
        axes.set_xlabel("time (min)")
    panels[0, 0].legend(fontsize=7)
    return save(figure, path)


def _values(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values])
