"""The figure of a gain map: one panel per baseline, with the line where PrfaaS begins to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.colors import TwoSlopeNorm

from prfaas.display.figure import make_folder, pyplot, save
from prfaas.studies.gain_map import PAYS, GainMap, Gains

FILE_NAME = "gain_map.png"
# Beyond these gains the colour no longer changes.
_LOWEST, _HIGHEST = 0.4, 2.4
_PANELS = (
    ("over_homogeneous", "the same number of GPUs"),
    ("over_equal_cost", "the same cost"),
)


def plot_gain_map(folder: Path, gains: GainMap, title: str) -> Path:
    """Writes the figure. A panel is left out where the map does not have its baseline, for example
    without prices."""
    make_folder(folder)
    panels = [(name, text) for name, text in _PANELS if _known(gains, name).any()]
    figure = pyplot.figure(figsize=(1.6 + 4.0 * len(panels), 4.2))
    # The last column is for the scale of colours.
    grid = figure.add_gridspec(1, len(panels) + 1, width_ratios=[20] * len(panels) + [1])
    for column, (name, text) in enumerate(panels):
        axes = figure.add_subplot(grid[column])
        shades = _panel(axes, gains, name)
        axes.set_title(f"gain over one cluster of {text}", fontsize=10)
        if column == 0:
            axes.set_ylabel("mean prompt (tokens)")
            axes.legend(fontsize=7, loc="lower right")
        if column == len(panels) - 1:
            figure.colorbar(shades, cax=figure.add_subplot(grid[-1]), label="gain in requests/s")
    figure.suptitle(title, fontsize=11)
    return save(figure, folder / FILE_NAME)


def _panel(axes: Any, gains: GainMap, name: str) -> Any:
    values = np.ma.masked_invalid(_values(gains, name))
    lengths = [row.mean_tokens for row in gains.rows]
    norm = TwoSlopeNorm(vcenter=1.0, vmin=_LOWEST, vmax=_HIGHEST)
    levels = np.arange(_LOWEST, _HIGHEST + 0.01, 0.1)
    # Lengths that cannot be planned stay grey.
    axes.set_facecolor("#dddddd")
    shades = axes.contourf(
        gains.links_gbps, lengths, values, levels=levels, cmap="RdBu", norm=norm, extend="both"
    )
    axes.contour(gains.links_gbps, lengths, values, levels=[PAYS], colors="black")
    axes.plot([], [], color="black", label="PrfaaS begins to pay")  # the contour, for the legend
    if gains.estimated:
        for end, label in (("low", "the same, in 5% and 95% of cases"), ("high", None)):
            begins = [getattr(getattr(row, f"pays_{name}"), end) for row in gains.rows]
            at = [np.nan if gbps is None else gbps for gbps in begins]
            axes.plot(at, lengths, color="black", linestyle=":", label=label)
    own = gains.own
    axes.plot(
        own.gbps,
        own.mean_tokens,
        "*",
        color="black",
        markersize=13,
        zorder=3,
        label="this deployment",
    )
    value = getattr(own, name)
    if value is not None:
        axes.annotate(
            f"{value:.2f}",
            (own.gbps, own.mean_tokens),
            textcoords="offset points",
            xytext=(8, 6),
            fontsize=9,
        )
    axes.set(xscale="log", yscale="log", xlabel="link bandwidth (Gbit/s)")
    axes.set_xlim(gains.links_gbps[0], gains.links_gbps[-1])
    axes.set_ylim(lengths[0], lengths[-1])
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_yticks([tokens for tokens in (2**n for n in range(11, 19)) if tokens <= lengths[-1]])
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}K"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    return shades


def _known(gains: GainMap, name: str) -> Any:
    return np.isfinite(_values(gains, name))


def _values(gains: GainMap, name: str) -> Any:
    def numbers(row_gains: Gains) -> list[float]:
        return [np.nan if gain is None else gain for gain in row_gains]

    return np.array([numbers(getattr(row, name)) for row in gains.rows])
