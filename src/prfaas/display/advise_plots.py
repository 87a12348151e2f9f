"""Cost against throughput of the options of `prfaas advise`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prfaas.advisor.answer import Answer, Assessed
from prfaas.advisor.curve import rates_for_money
from prfaas.display.advise_tables import columns
from prfaas.display.figure import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, make_folder, pyplot, save

_AMOUNTS, _AMOUNTS_WITH_GOAL = 48, 12  # a TTFT goal takes long to check
_BEYOND = 1.4  # times the cost of the dearest option


def options_plot(folder: Path, answer: Answer) -> Path:
    """What each hardware serves for more or less money, with the options as points on its line."""
    make_folder(folder)
    market, shown = answer.market, columns(answer)
    amounts = _AMOUNTS if market.goal is None else _AMOUNTS_WITH_GOAL
    most = max(assessed.option.usd_per_hour for assessed in shown.values()) or 100.0
    usd = np.linspace(0.0, most * _BEYOND, amounts + 1).tolist()
    rates = rates_for_money(market, [assessed.option for assessed in shown.values()], usd)
    figure, axes = pyplot.subplots(figsize=(7.2, 4.6))
    palette = [BLUE, SKY, GREEN, ORANGE, RED, PURPLE]
    for (title, assessed), line, colour in zip(shown.items(), rates, palette, strict=False):
        option = assessed.option
        style = "-" if option.remote is not None else "--"
        served = [(rate, cost) for rate, cost in zip(line, usd, strict=True) if rate > 0]
        if served:
            label = _label(title, assessed)
            axes.plot(*zip(*served, strict=True), style, color=colour, linewidth=1.2, label=label)
        axes.plot([option.rate_rps], [option.usd_per_hour], "o", color=colour)
    if market.budget_usd:
        axes.axhline(market.budget_usd, color="0.6", linestyle=":", linewidth=1)
    if market.rate_rps:
        axes.axvline(market.rate_rps, color="0.6", linestyle=":", linewidth=1)
    axes.set(
        xlabel=f"requests/s at {market.utilisation:.0%} load",
        ylabel="USD per hour",
        xlim=(0, None),
        ylim=(0, None),
        title="cost against throughput: right and down is better",
    )
    axes.legend(fontsize=7, loc="upper left")
    return save(figure, folder / "advise_options.png")


def _label(title: str, assessed: Assessed) -> str:
    kinds = " + ".join(group.accelerator for group in assessed.option.groups)
    link = assessed.option.link
    return f"{title}: {kinds}" + ("" if link is None else f", {link.gbps:g} Gbit/s")
