"""The blocks of docs/scale.md, from the report of `scale_study`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prfaas.planner.network.problem import NetworkProblem

Report = dict[str, Any]
QUANTILES = ("p50", "p90", "p99")
LOSSES = {
    "lost prfaas": ("prfaas", ""),
    "lost pd": ("pd", ""),
    "lost link": ("link", ""),
    "lost pd alone": ("pd", ", PD clusters alone"),
    "lost pd light": ("pd", ", with the traffic of PD clusters alone"),
}


def page_blocks(network: NetworkProblem, report: Report) -> dict[str, Sequence[str]]:
    return {
        "answer": answer_block(report),
        "deployment": deployment_block(network, report),
        "traffic": traffic_block(report),
        "capacity": capacity_block(report),
        "troughs": troughs_block(report),
        "bandwidth": bandwidth_block(report),
        "links": links_block(network, report),
        "day": day_block(report),
        "speed": speed_block(report),
        "losses": losses_block(report),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"


def quantiles(spread: Report) -> list[str]:
    return ["none" if spread[q] is None else f"{spread[q]:.2f}" for q in QUANTILES]


def share(part: float) -> str:
    """A share in per cent, with a digit after the point where it is small."""
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"


def answer_block(report: Report) -> list[str]:
    at, needs, cases = report["capacity"], report["needs"]["day"], report["simulated"]
    given = report["assumptions"]
    lost = [cases[name] for name in ("lost prfaas", "lost pd", "lost link")]
    broken = [case["broken_streams"] for case in lost]
    unserved = sum(case["unserved"] for case in lost)
    steady = [case["steady_after_s"] for case in lost]
    slowest = None if None in steady else max(steady)
    recovery = "the end of the run" if slowest is None else f"{slowest:.0f} s after its end"
    return [
        f"- **Traffic.** The deployment serves {at['gain']:.2f} times the traffic of PD clusters "
        f"alone for the same money. If the traffic did not change over the day, the factor would "
        f"be {at['steady_gain']:.2f}: the rest comes from prefill capacity that all regions share "
        "and need at different hours.",
        f"- **Bandwidth.** {needs['suffices_gbps']:,.0f} Gbit/s between the sites "
        f"({needs['suffices_gbps'] / at['total_gbps']:.0%} of what the file has) give "
        f"{given['suffices']:.0%} of the traffic that unlimited bandwidth would allow; more stops "
        f"helping there. Half of the gain needs {needs['half_of_the_gain_gbps']:,.0f} Gbit/s, and "
        f"below {needs['even_gbps']:,.0f} Gbit/s PD clusters alone serve more.",
        f"- **Losses.** The loss of a PrfaaS site, of a PD site and of a link, each at the busiest "
        f"hour and at {given['load']:.0%} load, leave {unserved:,} requests without a first token. "
        f"They break {broken[0]:,}, {broken[1]:,} and {broken[2]:,} streams that had begun. The "
        f"TTFT is steady again by {recovery} in the slowest case.",
    ]


def deployment_block(network: NetworkProblem, report: Report) -> list[str]:
    given = report["assumptions"]
    rows = []
    for home in network.homes:
        pool = home.problem.local.pool
        offset = given["utc_offsets_h"][home.cluster]
        cells = [home.cluster, "PD", f"{pool.gpus:,}", pool.accelerator]
        rows.append([*cells, f"{home.share:.0%}", f"UTC{offset:+d}"])
    rows += [
        [pool.cluster, "PrfaaS", f"{pool.gpus:,}", pool.accelerator, "", ""]
        for pool in network.prfaas_pools.values()
    ]
    gpus = sum(pool.gpus for pool in network.pools)
    links = sum(len(home.problem.remotes) for home in network.homes)
    usd, gbps = report["capacity"]["usd_per_hour"], report["capacity"]["total_gbps"]
    return [
        *table(["site", "kind", "GPUs", "type", "share of the peaks", "local time"], rows),
        "",
        f"Together {gpus:,} GPUs for {usd:,.0f} USD an hour at the catalog's prices, and {links} "
        f"links with {gbps:,.0f} Gbit/s in total from PrfaaS to PD clusters.",
    ]


def traffic_block(report: Report) -> list[str]:
    given, at = report["assumptions"], report["capacity"]
    return [
        f"A region is busiest at {given['busiest_hour']:.0f}:00 local time. Twelve hours later it "
        f"has {given['trough']:.0%} of that traffic, with a cosine between the two. The busiest "
        f"hour of all regions together has {at['busiest_over_sum_of_peaks']:.0%} of the sum of the "
        "regions' peaks."
    ]


def capacity_block(report: Report) -> list[str]:
    at, given = report["capacity"], report["assumptions"]
    load = given["load"]
    moved = at["gain"] / at["gain_over_moved"]
    full = "; ".join(f"{stage} ({', '.join(where)})" for stage, where in at["binding"].items())
    rows = [
        ("this deployment", at["prfaas_peaks_rps"], at["prfaas_busiest_rps"], at["gain"]),
        ("every PD cluster alone, same money", at["alone_peaks_rps"], at["alone_busiest_rps"], 1.0),
        ("the same, requests move freely", at["moved_peaks_rps"], at["alone_peaks_rps"], moved),
    ]
    head = ["system", "sum of the peaks (requests/s)", "busiest hour (requests/s)", "traffic"]
    cells = [[name, f"{one:.0f}", f"{two:.0f}", f"{gain:.2f}"] for name, one, two, gain in rows]
    return [
        *table(head, cells),
        "",
        f"Of {given['hours_planned']} hours planned, {at['limiting_hour_utc']}:00 UTC limits the "
        "deployment. Then these are "
        f"at their limits: {full}. At {load:.0%} of its "
        "largest day, a region alone would be above its capacity for "
        f"{at['alone_overloaded_hours']:.1f} hours a day, with "
        f"{at['alone_excess_requests']:.0%} of its requests in excess. The price of links is not "
        f"known and not counted. The gain pays for them up to "
        f"{at['break_even_usd_per_gbps_hour']:.1f} USD an hour for each Gbit/s of the file.",
    ]


def troughs_block(report: Report) -> list[str]:
    rows = []
    for trough, at in report["troughs"].items():
        gains = [f"{at['gain']:.2f}", f"{at['gain_over_moved']:.2f}"]
        rows.append([f"{float(trough):.0%}", f"{at['peaks_rps']:.0f}", *gains])
    head = ["quietest over busiest hour", "sum of the peaks (requests/s)"]
    return table([*head, "gain: alone", "gain: alone, requests move freely"], rows)


def bandwidth_block(report: Report) -> list[str]:
    rows = []
    for factor, at in report["bandwidth"].items():
        gains = [f"{at['gain']:.2f}", f"{at['steady_gain']:.2f}"]
        rows.append([f"{float(factor):g}", f"{at['gbps']:,.0f}", *gains])
    lines = []
    for name, traffic in (("day", "the traffic of the day"), ("steady", "steady traffic")):
        need = report["needs"][name]
        lines.append(
            f"- With {traffic}, unlimited bandwidth gives a gain of {need['unlimited_gain']:.2f}. "
            f"{need['suffices_gbps']:,.0f} Gbit/s give {report['assumptions']['suffices']:.0%} of "
            f"that traffic, {need['half_of_the_gain_gbps']:,.0f} Gbit/s give half of the gain, and "
            f"with {need['even_gbps']:,.0f} Gbit/s there is no gain."
        )
    head = ["bandwidth (the file has 1)", "Gbit/s in total", "gain: day", "gain: steady traffic"]
    return [*table(head, rows), "", *lines]


def links_block(network: NetworkProblem, report: Report) -> list[str]:
    carried = report["simulated"]["day"]["egress_gbps"]
    rows = []
    for home in network.homes:
        for remote in home.problem.remotes:
            source, path = remote.pool.cluster, remote.path
            name = f"{source} {home.cluster}"
            gbps = path.bps / 1e9
            cells = [f"{source} to {home.cluster}", f"{gbps:g}", f"{path.rtt_s * 1e3:.0f}"]
            used = f"{carried[name]:.0f} ({carried[name] / gbps:.0%})"
            rows.append([*cells, used, f"{report['without'][name]:.1%}"])
    head = ["link", "Gbit/s", "round trip (ms)", "busiest hour, simulated (Gbit/s)"]
    sites = [f"{report['without'][name]:.0%} without {name}" for name in network.prfaas_pools]
    return [
        *table([*head, "largest day without it"], rows),
        "",
        f"Without a PrfaaS site, the largest day is {', '.join(sites)}.",
    ]


def day_block(report: Report) -> list[str]:
    mine, alone = report["simulated"]["day"], report["simulated"]["day alone"]
    rows = [
        [name, *quantiles(region), *quantiles(alone["regions"][name])]
        for name, region in mine["regions"].items()
    ]
    rows.append(["all", *quantiles(mine["ttft_s"]), *quantiles(alone["ttft_s"])])
    names = [q.upper() for q in QUANTILES]
    head = ["region", *(f"{q} (s)" for q in names), *(f"alone: {q} (s)" for q in names)]
    return [
        *table(head, rows),
        "",
        f"{mine['requests']:,} requests with PrfaaS and {alone['requests']:,} alone. With PrfaaS, "
        f"{share(mine['offloaded'])} of the prefills are remote, {share(mine['elsewhere'])} of the "
        "requests decode in another region because their own had no free slot, and the nodes of "
        f"PD clusters change their roles {mine['role_changes']:,} times, in plans that are "
        f"{report['assumptions']['replan_every_min']:.0f} minutes of the day apart. "
        f"{mine['unserved'] + alone['unserved']:,} requests have no first token.",
    ]


def speed_block(report: Report) -> list[str]:
    rows = []
    for case in ("day", "day check"):
        at = report["simulated"][case]
        counts = [f"{at['speed']:g}", f"{at['requests']:,}"]
        rows.append([*counts, *quantiles(at["ttft_s"]), share(at["offloaded"])])
    head = ["speed", "requests", *(f"{q.upper()} (s)" for q in QUANTILES), "remote prefills"]
    hour_s = 3600 / report["simulated"]["day"]["speed"]
    return [*table(head, rows), "", f"At the first speed, an hour passes in {hour_s:.1f} seconds."]


def losses_block(report: Report) -> list[str]:
    given = report["assumptions"]
    rows = []
    for case, (kind, how) in LOSSES.items():
        at = report["simulated"][case]
        name = given["lost"][kind] + how
        phases = [seconds(at["phases"][phase]["p90"]) for phase in ("before", "during", "after")]
        steady = at["steady_after_s"]
        again = "not in the run" if steady is None else f"{steady:.0f} s"
        counts = [f"{at[key]:,}" for key in ("started_again", "broken_streams", "unserved")]
        elsewhere = share(at["elsewhere_during"])
        rows.append([name, *phases, seconds(at["worst_p90_s"]), again, *counts, elsewhere])
    head = ["lost", "P90 before (s)", "P90 during (s)", "P90 after (s)", "worst P90 (s)"]
    head += ["steady again after", "started again", "broken streams", "without first token"]
    before_s, during_s, after_s = given["loss_s"]
    return [
        *table([*head, "decoded elsewhere during it"], rows),
        "",
        f"Each run has {before_s:.0f} s before the loss, {during_s:.0f} s of loss and "
        f"{after_s:.0f} s after it, at the traffic of {given['loss_hour_utc']}:00 UTC, "
        f"{given['load']:.0%} of the largest day of the system, or in the last row of that of PD "
        f"clusters alone. *Steady again* is the time from "
        f"the end of the loss until the P90 of every {given['bin_s']:.0f} s of arrivals in every "
        f"region stays within {given['steady_within']:.0%} of the largest before the loss. The "
        "worst P90 is that of such a period and region.",
    ]
