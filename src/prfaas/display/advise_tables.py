"""The table of `prfaas advise`, its verdict, and notes on prices and on what was left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.markup import escape
from rich.table import Table

from prfaas.advisor.answer import Answer, Assessed
from prfaas.advisor.option import Group, Separate
from prfaas.display.plan_tables import losses
from prfaas.planner.ranges import Range
from prfaas.studies.advice_market import Offer

PRFAAS_SHOWN, SINGLES_SHOWN = 3, 2
SURE = 0.9  # probability of a gain below which a measurement is due


def columns(answer: Answer) -> dict[str, Assessed]:
    """The options that are shown, by title."""
    shown = {f"PrfaaS {i}": option for i, option in enumerate(answer.prfaas[:PRFAAS_SHOWN], 1)}
    if answer.same is not None and answer.same.option not in [a.option for a in shown.values()]:
        shown["PrfaaS, one type"] = answer.same
    for index, option in enumerate(answer.singles[:SINGLES_SHOWN], 1):
        shown[f"single PD {index}"] = option
    return shown


def options_table(answer: Answer, model: str) -> Table:
    market = answer.market
    if market.budget_usd is not None:
        aim = f"the most requests/s for ${market.budget_usd:,.2f} per hour"
    else:
        aim = f"the least cost of {market.rate_rps:g} requests/s"
    table = Table(title=f"{escape(model)}: {aim}", title_justify="left")
    table.add_column("")
    shown = columns(answer)
    separate = answer.separate
    for title in (*shown, *(["two PDs"] if separate is not None else [])):
        table.add_column(title, justify="right")

    def row(
        label: str,
        cell: Callable[[Assessed], str],
        of_two: Callable[[Separate], str] = lambda s: "-",
        *,
        end: bool = False,
    ) -> None:
        cells = [cell(option) for option in shown.values()]
        if separate is not None:
            cells.append(of_two(separate))
        table.add_row(label, *cells, end_section=end)

    row("PD cluster", lambda a: _gpus(a.option.local), lambda s: _gpus(s.first.local))
    row("  instances", lambda a: _instances(a.option.local), lambda s: _instances(s.first.local))
    if separate is not None:
        row("second PD cluster", lambda a: "-", lambda s: _gpus(s.second.local))
        row("  instances", lambda a: "-", lambda s: _instances(s.second.local))
    row("PrfaaS cluster", lambda a: _gpus(a.option.remote))
    row("  instances", lambda a: _instances(a.option.remote))
    row("link (Gbit/s)", lambda a: "-" if a.option.link is None else f"{a.option.link.gbps:g}")
    row("  used / needed", _link_use, end=True)
    row("threshold t (tokens)", lambda a: _number(a.solution.threshold_tokens, ",d"))
    row("prefill + decode here", lambda a: f"{a.solution.n_prefill} + {a.solution.n_decode}")
    row("offloaded", _offloaded)
    row("limited by", lambda a: a.solution.bottleneck, end=True)
    row(
        f"requests/s at {market.utilisation:.0%} load",
        lambda a: f"{a.option.rate_rps:.3f}",
        lambda s: f"{s.rate_rps:.3f}",
    )
    row(
        "Lambda_max (req/s)",
        lambda a: f"{a.option.lambda_max_rps:.3f}",
        lambda s: f"{s.lambda_max_rps:.3f}",
    )
    row("  without the other site", _left)
    row("TTFT P90 (s)", _ttft, end=True)
    row(
        "USD per hour",
        lambda a: f"{a.option.usd_per_hour:,.2f}",
        lambda s: f"{s.usd_per_hour:,.2f}",
    )
    row("USD per 1M tokens", lambda a: f"{a.usd_per_million_tokens:.3f}")
    row("USD per 1M output tokens", lambda a: f"{a.usd_per_million_output_tokens:.2f}", end=True)
    against = "rate" if market.budget_usd is not None else "cost"
    row(
        f"gain in {against}",
        lambda a: _gain(a.gain),
        lambda s: "1.00x",
    )
    if separate is not None:
        row("  over single PD 1", lambda a: _gain(a.over_single))
    row("  5% to 95% range", lambda a: "-" if a.certainty is None else _range(a.certainty.gain))
    row(
        "  probability of a gain",
        lambda a: "-" if a.certainty is None else f"{a.certainty.wins:.0%}",
    )
    return table


def verdict(answer: Answer) -> str:
    text = escape(answer.verdict.text)
    head, colon, rest = text.partition(":")
    colour = "green" if answer.verdict.worth_it else "yellow"
    lines = [f"[bold {colour}]{head}[/bold {colour}]{colon}{rest}"]
    best = answer.best
    if best.certainty is not None:
        sure = best.certainty
        lines.append(
            f"The gain is {_range(sure.gain)} (5% to 95% of the draws of the estimates' "
            f"errors), and above 1 in {sure.wins:.0%} of them."
            + (" Measure before you buy." if sure.wins < SURE else "")
        )
        if sure.measure is not None:
            lines.append(
                f"Measuring {sure.measure.gpus} x {escape(sure.measure.accelerator)} with prfaas "
                f"profile would narrow this most, to about {_range(sure.measure.after)}."
            )
    if best.lost_sites:
        lines.append(losses(best.lost_sites))
    return "\n".join(lines)


def notes(answer: Answer, offer: Offer) -> str:
    return "\n".join(f"[dim]- {escape(line)}[/dim]" for line in _notes(answer, offer))


def _notes(answer: Answer, offer: Offer) -> Iterator[str]:
    market = answer.market
    same = "budget" if market.budget_usd is not None else "rate"
    if answer.separate is None:
        yield f"Gain: over single PD 1, the best cluster of one accelerator for the same {same}."
    else:
        yield (
            "Gain: over two PD clusters that share the traffic without a link, the best without "
            f"PrfaaS for the same {same}."
        )
    yield (
        "Tokens: uncached prompt tokens and output tokens together. Costs are those of GPUs and "
        "link; owned GPUs count as stated."
    )
    used = {
        group.accelerator for shown in columns(answer).values() for group in shown.option.groups
    }
    for price in offer.prices:
        if price.accelerator in used:
            yield f"{price.accelerator}: ${price.usd_per_hour:g} per GPU and hour, {price.source}."
    estimated = sorted(
        {
            group.accelerator
            for shown in columns(answer).values()
            for group in shown.option.groups
            if group.place.build.prefill_error is not None
        }
    )
    if estimated:
        yield f"Times on {', '.join(estimated)} are estimated, not measured (docs/estimates.md)."
    builds = {group.place.build for a in columns(answer).values() for group in a.option.groups}
    for title in sorted(build.title for build in builds if build.pipelined):
        yield f"An instance of {title} is a pipeline across several interconnect domains."
    by_reason: dict[str, list[str]] = {}
    for left in offer.left_out:
        by_reason.setdefault(left.reason, []).append(left.accelerator)
    for reason, names in by_reason.items():
        yield f"Left out: {', '.join(names)}: {reason}."


def _gain(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}x"


def _gpus(group: Group | None) -> str:
    if group is None:
        return "-"
    owned = group.gpus - group.bought
    text = f"{group.gpus} x {escape(group.accelerator)}"
    if owned:
        text += " (owned)" if owned == group.gpus else f" ({owned} owned)"
    return text


def _instances(group: Group | None) -> str:
    return "-" if group is None else f"{group.instances} of {group.place.build.gpus} GPUs"


def _link_use(assessed: Assessed) -> str:
    if assessed.option.link is None:
        return "-"
    return f"{assessed.used_bps / 1e9:.3g} / {assessed.needed_bps / 1e9:.3g}"


def _wins(assessed: Assessed) -> str:
    return "-" if assessed.certainty is None else f"{assessed.certainty.wins:.0%}"


def _left(assessed: Assessed) -> str:
    return "/".join(f"{lost.rps:.3f}" for lost in assessed.lost_sites) or "-"


def _ttft(assessed: Assessed) -> str:
    ttft = assessed.solution.ttft
    return "-" if ttft is None else f"{ttft.p90_s:.2f}"


def _offloaded(assessed: Assessed) -> str:
    return "-" if assessed.option.remote is None else f"{assessed.solution.offload_fraction:.0%}"


def _range(found: Range) -> str:
    high = f"{found.high:.2f}" if math.isfinite(found.high) else "any"
    return f"{found.low:.2f} to {high}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
