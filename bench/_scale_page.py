"""Writes docs/scale.md and its figures from the report of `scale_study`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prfaas.display.figure import BLUE, GREY, ORANGE, RED, pyplot, save


def write_page(docs: Path, report: dict[str, Any]) -> None:
    (docs / "img").mkdir(parents=True, exist_ok=True)
    _bandwidth_figure(docs / "img" / "scale-bandwidth.png", report["planned"])
    _day_figure(docs / "img" / "scale-day.png", report)
    (docs / "scale.md").write_text(page(report), encoding="utf-8")


def page(report: dict[str, Any]) -> str:
    planned, simulated = report["planned"], report["simulated"]
    parts = [_plan(planned), _bandwidth(planned), _day(planned), _simulated(simulated)]
    return "\n".join(parts)


def _plan(planned: dict[str, Any]) -> str:
    gain = planned["rate_rps"] / planned["equal_cost_rps"]
    flows = [
        f"| {flow['from']} | {flow['to']} | {flow['rps']:.1f} | {flow['gbps']:.1f} "
        f"| {flow['link_gbps']:.0f} |"
        for flow in planned["flows"]
    ]
    return f"""# A study at scale

{planned["gpus"]:,} GPUs in 4 PD and 3 PrfaaS datacenters, with the model, the accelerators and the
lengths of the case study. Sizes, links and the shape of the day are an example. Every number on
this page comes out of `prfaas bench scale_study`, which writes it. Prefill and decode times are
those of the case study's profiles; nothing on this page was measured on hardware of this size.

## The plan

With traffic in proportion to the PD clusters, the plan serves {planned["rate_rps"]:.0f} requests/s.
For the same money, every PD cluster alone serves {planned["equal_cost_rps"]:.0f}: the plan has
{gain:.2f} times its rate. KV of {planned["egress_gbps"]:.0f} Gbit/s leaves the PrfaaS sites, over
links of {planned["links_gbps"]:.0f} Gbit/s together.

| from | to | requests/s | KV (Gbit/s) | link (Gbit/s) |
|---|---|---|---|---|
{_lines(flows)}
"""


def _bandwidth(planned: dict[str, Any]) -> str:
    unlimited, links = planned["unlimited_rps"], planned["links_gbps"]
    rates = {float(factor): rate for factor, rate in planned["bandwidth"].items()}
    rows = [
        f"| {factor:g} x | {factor * links:.0f} | {rate:.1f} | {rate / unlimited:.1%} |"
        for factor, rate in rates.items()
    ]
    enough = planned["enough_factor"]
    stops = "beyond the largest factor of the table"
    if enough is not None:
        stops = f"at {enough:g} times the stated links, {enough * links:.0f} Gbit/s together"
    pays = [factor for factor, rate in rates.items() if rate > planned["equal_cost_rps"]]
    begins = "At no factor of the table does the network serve"
    if pays:
        begins = f"From {min(pays):g} times the stated links on, the network serves"
    return f"""## Bandwidth between sites

All links between sites are scaled together.

| bandwidth | Gbit/s together | requests/s | of unlimited |
|---|---|---|---|
{_lines(rows)}
| unlimited | | {unlimited:.1f} | 100.0% |

{begins} more than the PD clusters alone for the same money. More bandwidth stops helping where the
rate reaches 99% of that with unlimited links: {stops}.

![Planned rate over bandwidth](img/scale-bandwidth.png)
"""


def _day(planned: dict[str, Any]) -> str:
    gain = planned["day_rps"] / planned["alone_day_rps"]
    rows = [f"| {name} | {share:.1%} |" for name, share in planned["lost"].items()]
    return f"""## A day

The traffic of each region swings by half of its mean over the day, with peaks at different hours.
PrfaaS sites prefill for the regions that need them at the time, and nodes change their roles. A PD
cluster alone needs instances for its own peak.

The largest day that the network serves has a mean rate of {planned["day_rps"]:.0f} requests/s. For
the same money, PD clusters alone serve a day of {planned["alone_day_rps"]:.0f}: the network serves
{gain:.2f} times as much. The tightest hour begins at {planned["worst_hour"]}:00. In that hour, this
is left of the network's capacity after a loss (planned; the other PD clusters take over the traffic
of a lost one):

| lost | capacity left |
|---|---|
{_lines(rows)}
"""


def _simulated(simulated: dict[str, Any]) -> str:
    runs = {
        "network": simulated["calm"],
        "network with the losses": simulated["losses"],
        "every PD cluster alone": simulated["alone"],
    }
    rows = [
        f"| {name} | {run['unanswered']} | {run['broken_streams']} | {run['started_again']} "
        f"| {run['decoded_elsewhere']} | {run['ttft_mean_s']:.2f} "
        f"| {max(run['ttft_p90_s_by_hour']):.1f} |"
        for name, run in runs.items()
    ]
    losses = [
        f"- {name}, from {begin}:00 to {end}:00"
        for name, (begin, end) in simulated["lost_from_until"].items()
    ]
    return f"""## The day, simulated

All runs have the same {simulated["calm"]["requests"]:,} requests: {simulated["load"]:.0%} of the
largest day of the network. An hour of the day takes {simulated["hour_s"]:.0f} s, at its real rates,
so that traffic shifts between regions faster than in reality. One run has these losses:

{_lines(losses)}

| run | never answered | streams broken by a loss | started again | decoded elsewhere | mean TTFT (s) | worst hour, P90 (s) |
|---|---|---|---|---|---|---|
{_lines(rows)}

A stream that has begun at a lost site breaks. Requests without a first token start again.

![The day](img/scale-day.png)
"""  # noqa: E501 (a row of a table is one line)


def _lines(lines: list[str]) -> str:
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
