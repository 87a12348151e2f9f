"""Figures of simulated runs: the distribution of TTFT, and links and queues over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prfaas.display.figure import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    make_folder,
    pyplot,
    save,
)
from prfaas.sim.results.result import Result

COLOURS = (BLUE, ORANGE, GREEN, RED, GREY, PURPLE, SKY)


def simulate_plots(folder: Path, runs: Mapping[str, Result]) -> list[Path]:
    make_folder(folder)
    return [_ttft(folder / "ttft_cdf.png", runs), _over_time(folder / "over_time.png", runs)]


def _ttft(path: Path, runs: Mapping[str, Result]) -> Path:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        ttft_s = np.sort(run.requests.ttft_s[run.measured])
        if ttft_s.size:
            share = np.arange(1, len(ttft_s) + 1) / len(ttft_s)
            axes.plot(ttft_s, share, color=colour, label=name)
    axes.set(xscale="log", xlabel="TTFT (s)", ylabel="share of requests", ylim=(0, 1))
    axes.set_title("Time to first token")
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, path)


def _over_time(path: Path, runs: Mapping[str, Result]) -> Path:
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8.0, 7.0), sharex=True)
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        series = run.series
        count = len(series.decode_queue)
        nothing = np.zeros(count)
        egress = sum(series.egress_bits.values(), nothing) / series.bin_s / 1e9
        waiting = sum(series.prefill_queue.values(), nothing)
        # A run has thousands of seconds, a figure shows some hundred points.
        width = max(1, count // 400)
        at_min = np.arange(0, count, width) * series.bin_s / 60
        for axes, values in ((top, egress), (middle, waiting), (bottom, series.decode_queue)):
            axes.plot(at_min, _coarse(values, width), color=colour, label=name, linewidth=1)
    top.set(ylabel="egress (Gbps)", title="Links and queues over time")
    middle.set(ylabel="waiting for prefill")
    bottom.set(ylabel="waiting for decode", xlabel="time (min)")
    for axes in (top, middle, bottom):
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    top.legend(fontsize=8)
    return save(figure, path)


def _coarse(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Means of each `width` neighbouring values."""
    starts = np.arange(0, len(values), width)
    return np.asarray(np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values))))
