"""Cost against throughput of the options of `prfaas advise`."""

from __future__ import annotations

from pathlib import Path

from prfaas.advisor.answer import Answer, Assessed
from prfaas.display.figure import BLUE, GREEN, ORANGE, make_folder, pyplot, save


def options_plot(folder: Path, answer: Answer) -> Path:
    """Each option at its rate and cost. Lines from the origin are equal costs per request: below
    and to the right is better."""
    make_folder(folder)
    figure, axes = pyplot.subplots(figsize=(7.2, 4.6))
    groups = [
        ("PrfaaS", BLUE, "o", answer.prfaas),
        ("PrfaaS, one accelerator type", GREEN, "s", (answer.same,) if answer.same else ()),
        ("one PD cluster", ORANGE, "^", answer.singles),
    ]
    for label, colour, marker, options in groups:
        if options:
            rates = [option.option.rate_rps for option in options]
            costs = [option.option.usd_per_hour for option in options]
            axes.scatter(rates, costs, color=colour, marker=marker, label=label, zorder=3)
    shown = [option for *_, options in groups for option in options]
    for option in dict.fromkeys(map(_label, shown)):
        one = next(found for found in shown if _label(found) == option)
        axes.annotate(
            option,
            (one.option.rate_rps, one.option.usd_per_hour),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize=7,
        )
    cheapest = min(shown, key=lambda one: one.option.usd_per_hour / one.option.rate_rps).option
    most = max(one.option.rate_rps for one in shown) * 1.1
    slope = cheapest.usd_per_hour / cheapest.rate_rps
    axes.plot([0, most], [0, slope * most], color="0.8", linewidth=1, zorder=1)
    if answer.market.budget_usd:
        axes.axhline(answer.market.budget_usd, color="0.6", linestyle=":", linewidth=1)
    axes.set(
        xlabel=f"requests/s at {answer.market.utilisation:.0%} load",
        ylabel="USD per hour",
        xlim=(0, most * 1.15),
        ylim=(0, None),
        title="cost against throughput; the line is the least cost per request",
    )
    axes.legend(fontsize=8, loc="lower right")
    return save(figure, folder / "advise_options.png")


def _label(assessed: Assessed) -> str:
    return " + ".join(f"{group.gpus} {group.accelerator}" for group in assessed.option.groups)
