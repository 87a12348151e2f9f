"""Writes docs/scale.md and its figures from the report of `scale_study`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prfaas.display.figure import BLUE, GREY, ORANGE, RED, pyplot, save


def write_page(docs: Path, report: dict[str, Any]) -> None:
    _bandwidth_figure(docs / "img" / "scale-bandwidth.png", report["planned"])
    _day_figure(docs / "img" / "scale-day.png", report)
    (docs / "scale.md").write_text(page(report), encoding="utf-8")


def page(report: dict[str, Any]) -> str:
    planned, simulated = report["planned"], report["simulated"]
    calm, lost, alone = (simulated[name] for name in ("calm", "losses", "alone"))
    enough = planned["enough_factor"]
    lines = [
        "# A study at scale",
        "",
        f"{planned['gpus']:,} GPUs in 4 PD and 3 PrfaaS datacenters, with the model, the accelerators "
        "and the lengths of the case",
        "study. Sizes, links and the shape of the day are an example. Every number on this page comes "
        "out of",
        "`prfaas bench scale_study`, which writes the page. Prefill and decode times are those of the "
        "case study's profiles, and nothing on",
        "this page was measured on hardware of this size.",
        "",
        "## The plan",
        "",
        f"With traffic in proportion to the PD clusters, the plan serves {planned['rate_rps']:.0f} "
        f"requests/s. For the same money, every PD",
        f"cluster alone serves {planned['equal_cost_rps']:.0f}: the plan has "
        f"{planned['rate_rps'] / planned['equal_cost_rps']:.2f} times its rate. "
        f"KV of {planned['egress_gbps']:.0f} Gbit/s leaves the PrfaaS sites, over",
        f"links of {planned['links_gbps']:.0f} Gbit/s together.",
        "",
        "| from | to | requests/s | KV (Gbit/s) | link (Gbit/s) |",
        "|---|---|---|---|---|",
        *(
            f"| {flow['from']} | {flow['to']} | {flow['rps']:.1f} | {flow['gbps']:.1f} "
            f"| {flow['link_gbps']:.0f} |"
            for flow in planned["flows"]
        ),
        "",
        "## Bandwidth between sites",
        "",
        "All links between sites are scaled together.",
        "",
        "| bandwidth | requests/s | of unlimited |",
        "|---|---|---|",
        *(
            f"| {float(factor):g} x | {rate:.1f} | {rate / planned['unlimited_rps']:.1%} |"
            for factor, rate in planned["bandwidth"].items()
        ),
        f"| unlimited | {planned['unlimited_rps']:.1f} | 100.0% |",
        "",
        "More stops helping where the rate reaches 99% of that with unlimited links: "
        + (
            "beyond the largest factor of the table."
            if enough is None
            else f"at {enough:g} times the stated links, {enough * planned['links_gbps']:.0f} Gbit/s "
            "together."
        ),
        "",
        "![Planned rate over bandwidth](img/scale-bandwidth.png)",
        "",
        "## A day",
        "",
        "The traffic of each region swings by half of its mean over the day, with peaks at different "
        "hours. PrfaaS sites prefill for the",
        "regions that need them at the time. A PD cluster alone needs instances for its own peak.",
        "",
        f"The largest day that the network serves has a mean rate of {planned['day_rps']:.0f} "
        f"requests/s; for the same money, PD clusters alone serve a day of "
        f"{planned['alone_day_rps']:.0f}",
        f"({planned['day_rps'] / planned['alone_day_rps']:.2f} times). The tightest hour is "
        f"{planned['worst_hour']}:00. What is left of the network's capacity in that hour after a loss "
        "(planned; other",
        "PD clusters take over the traffic of a lost one):",
        "",
        "| lost | capacity left |",
        "|---|---|",
        *(f"| {name} | {share:.1%} |" for name, share in planned["lost"].items()),
        "",
        "## The day, simulated",
        "",
        f"The same {calm['requests']:,} requests for all: {simulated['load']:.0%} of the largest day, with "
        f"an hour of the day in {simulated['hour_s']:.0f} s at its real rates.",
        "The losses: a PrfaaS site from 5:00 to 7:00, a link from 11:00 to 13:00, a PD site from 17:00 "
        "to 19:00.",
        "",
        "| run | never answered | streams broken by the loss | started again | decoded elsewhere "
        "| TTFT mean (s) | worst hour, P90 (s) |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {run['unanswered']} | {run['broken_streams']} | {run['started_again']} "
            f"| {run['decoded_elsewhere']} | {run['ttft_mean_s']:.2f} "
            f"| {max(run['ttft_p90_s_by_hour']):.1f} |"
            for name, run in (
                ("network", calm),
                ("network with the losses", lost),
                ("every PD cluster alone", alone),
            )
        ),
        "",
        "A stream that has begun at a lost site breaks. Every other request is served elsewhere.",
        "",
        "![The day](img/scale-day.png)",
        "",
    ]
    return "\n".join(lines)


def _bandwidth_figure(path: Path, planned: dict[str, Any]) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    factors = [float(factor) for factor in planned["bandwidth"]]
    gbps = [factor * planned["links_gbps"] for factor in factors]
    axes.plot(gbps, list(planned["bandwidth"].values()), "o-", color=BLUE, label="network")
    axes.axhline(planned["unlimited_rps"], color=GREY, linestyle=":", label="unlimited links")
    axes.axhline(planned["equal_cost_rps"], color=ORANGE, label="PD clusters alone, same money")
    axes.set(xscale="log", xlabel="all links between sites (Gbit/s)", ylabel="requests/s")
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def _day_figure(path: Path, report: dict[str, Any]) -> None:
    simulated = report["simulated"]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7.0, 5.6), sharex=True)
    for name, colour in (("calm", BLUE), ("losses", RED), ("alone", ORANGE)):
        top.plot(simulated[name]["ttft_p90_s_by_hour"], color=colour, label=name)
    for name, colour in (("calm", BLUE), ("losses", RED)):
        bottom.plot(simulated[name]["egress_gbps_by_hour"], color=colour, label=name)
    top.set(yscale="log", ylabel="P90 TTFT (s)", title="A day in four regions")
    bottom.set(ylabel="KV between sites (Gbit/s)", xlabel="hour")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, path)
