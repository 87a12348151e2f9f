"""10,000 GPUs in seven datacenters over a day, with losses: makes docs/scale.md.

\b
    prfaas bench scale_study [--docs docs] [--jobs 2] [--quick] [--report FILE]

Plans configs/four_by_three.toml for every second hour of a day whose traffic moves from region to
region, for other bandwidths and without single sites and links; simulates the day and three losses;
and compares with every PD cluster alone for the same money. Replaces the blocks of scale.md and its
figures, and prints every figure as JSON. With --report it writes the page again from what an
earlier run printed. With --quick the deployment and the runs are much smaller, and the page is
written only if --docs is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from _page_blocks import fill
from prfaas.config import load_deployment
from prfaas.config.deployment import ReplanSection, SchedulerSection
from prfaas.display.console import print_json, progress_bar, rounded
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.sim.arrivals import poisson_at_homes
from prfaas.sim.config import ClusterFault, Fault, LinkFault, SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.regional_day import (
    HOURS,
    RegionalDay,
    alone_for_the_same_money,
    draw_day,
    hourly_usd,
    largest_day,
    shrunk,
    with_bandwidth,
    without_link,
    without_prfaas,
)
from prfaas.types import ClusterId

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = ROOT / "configs" / "four_by_three.toml"
Report = dict[str, Any]
Array = npt.NDArray[np.float64]
System = Literal["prfaas", "alone"]

# Assumptions of the day. Standard time, whole hours.
UTC_OFFSETS_H = {"virginia": -5, "frankfurt": 1, "tokyo": 9, "sao-paulo": -3}
TROUGH = 0.4
OTHER_TROUGHS = (1.0, 0.8, 0.6, 0.4, 0.2)
BUSIEST_HOUR = 15.0
LOAD = 0.85  # of the largest day that fits, in the simulations
# A bandwidth suffices if the largest day is at least this share of that with unlimited bandwidth.
SUFFICES = 0.99
UNLIMITED = 1e3  # factor of the bandwidth

# The long-term loop in the simulated day, in seconds of the day; the defaults where not stated.
# Plans are half an hour apart, because each costs a tenth of a second of computing.
REPLAN_EVERY_S = 1800.0
# Blocks of requests in which the loop looks for steady traffic: as many as the default at a speed
# of 48, and fewer in faster days, which have fewer requests.
BLOCK_REQUESTS, BLOCK_SPEED = ReplanSection().block_requests, 48

LOST_PRFAAS, LOST_PD = "oregon", "frankfurt"
LOST_LINK = ("oregon", "virginia")
BIN_S = 10.0  # of the time series around a loss


class Scale(NamedTuple):
    """How much is planned and simulated."""

    shrink: float  # of the deployment
    hours: tuple[int, ...]  # that are planned
    factors: tuple[float, ...]  # of the bandwidth
    speeds: tuple[float, float]  # of the simulated day, and of the day that checks it
    loss_s: tuple[float, float, float]  # before, during and after a loss


FULL = Scale(
    1.0, tuple(range(0, HOURS, 2)), tuple(2.0**n for n in range(-6, 3)), (96, 192), (60, 150, 210)
)
QUICK = Scale(40.0, (6, 18), (0.125, 1.0), (480, 960), (20, 20, 40))


class Case(NamedTuple):
    """One simulation."""

    name: str
    system: System
    scale: Scale
    peaks_rps: float  # the sum of the peaks
    speed: float | None = None  # of a day; None: a loss, at the busiest hour
    fault: str | None = None


class Setting:
    """The deployment, at a size."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.deployment = load_deployment(CONFIG)
        study = NetworkStudy(CONFIG, "exact")
        self.network = shrunk(study.network(self.deployment), scale.shrink)
        self.planner = NetworkPlanner("exact")
        self.day = RegionalDay(UTC_OFFSETS_H, TROUGH, BUSIEST_HOUR)

    @cached_property
    def alone(self) -> tuple[float, NetworkProblem]:
        return alone_for_the_same_money(self.planner, self.network)

    @property
    def round_trips(self) -> dict[tuple[ClusterId, ClusterId], float]:
        """Between PD clusters: in a loss, requests decode elsewhere."""
        pds = {home.cluster for home in self.network.homes}
        return {
            (ClusterId(link.source), ClusterId(link.target)): link.rtt_ms / 1e3
            for link in self.deployment.links
            if link.source != link.target and {link.source, link.target} <= pds
        }

    def largest(self, network: NetworkProblem, trough: float = TROUGH) -> float:
        hours = self.scale.hours if trough < 1 else self.scale.hours[:1]
        day = RegionalDay(UTC_OFFSETS_H, trough, BUSIEST_HOUR)
        return largest_day(self.planner, network, day, hours)[0]


# --------------------------------------------------------------------------------------------------
# Plans


def plan_steps(setting: Setting, report: Report) -> Iterator[Callable[[], None]]:
    """The planned part of the study, in steps that each take some seconds."""
    network, day, planner = setting.network, setting.day, setting.planner

    def capacity() -> None:
        rate, hour = largest_day(planner, network, day, setting.scale.hours)
        alone, _ = setting.alone
        shape = np.array([day.demand(network, m / 60).sum() for m in range(HOURS * 60)])
        steady = setting.largest(network, trough=1.0)
        usd = hourly_usd(network)
        total = sum(r.path.bps for home in network.homes for r in home.problem.remotes) / 1e9
        # All regions have the same curve, so each is above its own capacity equally long.
        curve = TROUGH + (1 - TROUGH) * (1 + np.cos(np.linspace(0, 2 * math.pi, 1441)[:-1])) / 2
        offered = curve * LOAD * rate / alone
        report["capacity"] = {
            "prfaas_peaks_rps": rate,
            "prfaas_busiest_rps": rate * float(shape.max()),
            "limiting_hour_utc": hour,
            "alone_peaks_rps": alone,
            "alone_busiest_rps": alone * float(shape.max()),
            "moved_peaks_rps": alone / float(shape.max()),
            "steady_peaks_rps": steady,
            "gain": rate / alone,
            "gain_over_moved": rate / alone * float(shape.max()),
            "steady_gain": steady / alone,
            "usd_per_hour": usd,
            "total_gbps": total,
            "break_even_usd_per_gbps_hour": (rate / alone - 1) * usd / total,
            "alone_overloaded_hours": float((offered > 1).mean()) * HOURS,
            "alone_excess_requests": float(np.maximum(offered - 1, 0).sum() / offered.sum()),
            "busiest_over_sum_of_peaks": float(shape.max()),
        }

    def trough_of(trough: float) -> Callable[[], None]:
        def step() -> None:
            rate = setting.largest(network, trough)
            busiest = RegionalDay(UTC_OFFSETS_H, trough, BUSIEST_HOUR).demand
            largest = max(float(busiest(network, hour).sum()) for hour in range(HOURS))
            gain = rate / setting.alone[0]
            found = {"peaks_rps": rate, "gain": gain, "gain_over_moved": gain * largest}
            report["troughs"][str(trough)] = found

        return step

    def bandwidth_of(factor: float) -> Callable[[], None]:
        def step() -> None:
            faster = with_bandwidth(network, factor)
            alone = setting.alone[0]
            report["bandwidth"][str(factor)] = {
                "gbps": factor * report["capacity"]["total_gbps"],
                "gain": setting.largest(faster) / alone,
                "steady_gain": setting.largest(faster, 1.0) / alone,
            }

        return step

    def needs(trough: float) -> Callable[[], None]:
        def step() -> None:
            most = setting.largest(with_bandwidth(network, UNLIMITED), trough)
            alone = setting.alone[0]
            total = report["capacity"]["total_gbps"]

            def smallest(rate: float) -> float:
                """The bandwidth in Gbit/s from which this rate is reached, to 2%."""
                low, high = 2.0**-8, 4.0
                while high / low > 1.02:
                    middle = math.sqrt(low * high)
                    reached = setting.largest(with_bandwidth(network, middle), trough) >= rate
                    low, high = (low, middle) if reached else (middle, high)
                return high * total

            report["needs"]["steady" if trough == 1 else "day"] = {
                "unlimited_gain": most / alone,
                "suffices_gbps": smallest(SUFFICES * most),
                "half_of_the_gain_gbps": smallest(alone + (most - alone) / 2),
                "even_gbps": smallest(alone),
            }

        return step

    def without(name: str, changed: NetworkProblem) -> Callable[[], None]:
        def step() -> None:
            rate = setting.largest(changed)
            report["without"][name] = rate / report["capacity"]["prfaas_peaks_rps"]

        return step

    report |= {"troughs": {}, "bandwidth": {}, "needs": {}, "without": {}}
    yield capacity
    for trough in OTHER_TROUGHS:
        yield trough_of(trough)
    for factor in setting.scale.factors:
        yield bandwidth_of(factor)
    for trough in (1.0, TROUGH):
        yield needs(trough)
    for name in network.prfaas_pools:
        yield without(name, without_prfaas(network, name))
    for source, target in links_of(network):
        yield without(f"{source} {target}", without_link(network, source, target))


def links_of(network: NetworkProblem) -> list[tuple[str, str]]:
    return [(r.pool.cluster, h.cluster) for h in network.homes for r in h.problem.remotes]


# --------------------------------------------------------------------------------------------------
# Simulations


def make_cases(scale: Scale, prfaas_rps: float, alone_rps: float) -> list[Case]:
    """Each system at the same load relative to the largest day that it can serve. The longest runs
    come first."""
    mine, alone = LOAD * prfaas_rps, LOAD * alone_rps
    speed, check = scale.speeds
    return [
        Case("day", "prfaas", scale, mine, speed),
        Case("lost prfaas", "prfaas", scale, mine, fault="prfaas"),
        Case("lost pd", "prfaas", scale, mine, fault="pd"),
        Case("lost link", "prfaas", scale, mine, fault="link"),
        Case("day check", "prfaas", scale, mine, check),
        Case("day alone", "alone", scale, alone, speed),
        Case("lost pd alone", "alone", scale, alone, fault="pd"),
    ]


def run_case(case: Case) -> Report:
    setting = Setting(case.scale)
    network = setting.network if case.system == "prfaas" else setting.alone[1]
    rules = SchedulerSection(policy="adaptive" if case.system == "prfaas" else "local")
    return (_run_day if case.speed else _run_loss)(case, setting, network, rules)


def _run_day(
    case: Case, setting: Setting, network: NetworkProblem, rules: SchedulerSection
) -> Report:
    speed = case.speed
    assert speed is not None
    arrivals = draw_day(network, setting.day, case.peaks_rps, speed, seed=0)
    replan = ReplanSection(
        every_s=REPLAN_EVERY_S / speed,
        window_s=ReplanSection().window_s / speed,
        warmup_s=0.0,  # there are no caches to warm up
        dwell_s=ReplanSection().dwell_s / speed,
        block_requests=max(round(BLOCK_REQUESTS * BLOCK_SPEED / speed), 20),
    )
    config = SimConfig(
        scheduler=SchedulerSection(policy=rules.policy, replan=replan),
        replans=True,
        role_switch_s=SimConfig().role_switch_s / speed,
        round_trips=setting.round_trips if case.system == "prfaas" else {},
    )
    result = simulate(setting.day.at(network, 0.0), arrivals, config)
    rows = result.requests
    hour = (rows.arrival_s * speed / 3600).astype(int).clip(0, HOURS - 1)
    names = [home.cluster for home in network.homes]
    return {
        "speed": speed,
        **_totals(result),
        "regions": {
            name: {
                **_quantiles(rows.ttft_s[rows.home == number]),
                "p90_by_hour": [
                    _quantiles(rows.ttft_s[(rows.home == number) & (hour == h)])["p90"]
                    for h in range(HOURS)
                ],
            }
            for number, name in enumerate(names)
        },
        "egress_gbps": _busiest_hours(result, speed),
        "role_changes": _role_changes(result, names),
    }


def _run_loss(
    case: Case, setting: Setting, network: NetworkProblem, rules: SchedulerSection
) -> Report:
    before_s, during_s, after_s = case.scale.loss_s
    hour = setting.day.busiest(network)
    rps = case.peaks_rps * float(setting.day.demand(network, hour).sum())
    whole_s = before_s + during_s + after_s
    busy = setting.day.at(network, hour)
    arrivals = poisson_at_homes(busy, rps, round(rps * whole_s), seed=1)
    end_s = before_s + during_s
    faults: dict[str, Fault] = {
        "prfaas": ClusterFault(ClusterId(LOST_PRFAAS), before_s, end_s),
        "pd": ClusterFault(ClusterId(LOST_PD), before_s, end_s),
        "link": LinkFault((ClusterId(LOST_LINK[0]), ClusterId(LOST_LINK[1])), before_s, end_s),
    }
    assert case.fault is not None
    config = SimConfig(
        scheduler=rules,
        replans=True,
        faults=(faults[case.fault],),
        round_trips=setting.round_trips,
    )
    result = simulate(busy, arrivals, config)
    rows = result.requests
    at = rows.arrival_s
    phases = {
        "before": at < before_s,
        "during": (at >= before_s) & (at < end_s),
        "after": at >= end_s,
    }
    steps = range(math.ceil(whole_s / BIN_S))
    in_bin = (at / BIN_S).astype(int)
    names = [home.cluster for home in network.homes]
    p90 = [_quantiles(rows.ttft_s[in_bin == step])["p90"] for step in steps]
    return {
        **_totals(result),
        "phases": {name: _quantiles(rows.ttft_s[rows_in]) for name, rows_in in phases.items()},
        "elsewhere_during": float(_elsewhere(result)[phases["during"]].mean()),
        "p90_by_bin": {
            name: [
                _quantiles(rows.ttft_s[(in_bin == step) & (rows.home == number)])["p90"]
                for step in steps
            ]
            for number, name in enumerate(names)
        },
        "worst_p90_s": max(value for value in p90 if value is not None),
        "steady_after_s": _steady_after(p90, before_s, end_s),
    }


def _steady_after(p90: Sequence[float | None], before_s: float, end_s: float) -> float | None:
    """Seconds from the end of the loss until the P90 of ten seconds of arrivals stays within 10% of
    the largest before the loss. None: not in the run. The first quarter before the loss is left
    out, because the deployment is empty at first."""
    first, lost = round(before_s / 4 / BIN_S), round(before_s / BIN_S)
    limit = 1.1 * max(value for value in p90[first:lost] if value is not None)
    above = [step for step, value in enumerate(p90) if value is None or value > limit]
    last = max((step for step in above if step >= lost), default=lost - 1)
    if last >= len(p90) - 2:  # the last bin may be half empty
        return None
    return max((last + 1) * BIN_S - end_s, 0.0)


def _totals(result: Result) -> Report:
    rows = result.requests
    first, last = np.isnan(rows.first_token_s), np.isnan(rows.last_token_s)
    return {
        "requests": len(rows.arrival_s),
        "ttft_s": _quantiles(rows.ttft_s),
        "offloaded": float(rows.offloaded.mean()),
        "elsewhere": float(_elsewhere(result).mean()),
        "unserved": int(first.sum()),
        "broken_streams": int((last & ~first).sum()),
        "started_again": int((rows.retries > 0).sum()),
    }


def _elsewhere(result: Result) -> npt.NDArray[np.bool_]:
    rows = result.requests
    return np.asarray((rows.decode_cluster >= 0) & (rows.decode_cluster != rows.home))


def _quantiles(ttft_s: Array) -> dict[str, float | None]:
    known = ttft_s[~np.isnan(ttft_s)]
    if not known.size:
        return {"p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.quantile(known, (0.5, 0.9, 0.99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99}


def _busiest_hours(result: Result, speed: float) -> dict[str, float]:
    """The mean of the busiest hour on each link."""
    bin_s = result.series.bin_s
    found = {}
    for (source, target), bits in result.series.egress_bits.items():
        hours = (np.arange(len(bits)) * bin_s * speed / 3600).astype(int)
        inside = hours < HOURS
        means = np.bincount(hours[inside], bits[inside]) / np.bincount(hours[inside])
        found[f"{source} {target}"] = float(means.max()) / bin_s / 1e9
    return found


def _role_changes(result: Result, names: Sequence[str]) -> int:
    """Nodes that changed their role over the day, each time counted."""
    total = 0
    for name in names:
        plans = [c.plan for c in result.plans if c.plan.problem.local.pool.cluster == name]
        for old, new in zip(plans, plans[1:], strict=False):
            total += sum(new.roles.get(node) != role for node, role in old.roles.items())
    return total


def run_cases(cases: Sequence[Case], jobs: int, done: Callable[[], None]) -> dict[str, Report]:
    if jobs == 1:
        found = {}
        for case in cases:
            found[case.name] = run_case(case)
            done()
        return found
    with ProcessPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run_case, case): case.name for case in cases}
        found = {}
        for future in as_completed(waiting):
            found[waiting[future]] = future.result()
            done()
    return {case.name: found[case.name] for case in cases}


# --------------------------------------------------------------------------------------------------
# The page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def page_blocks(setting: Setting, report: Report) -> dict[str, list[str]]:
    return {
        "deployment": deployment_block(setting, report),
        "answer": answer_block(report),
        "capacity": capacity_block(report),
        "troughs": troughs_block(report),
        "bandwidth": bandwidth_block(report),
        "links": links_block(setting, report),
        "day": day_block(report),
        "speed": speed_block(report),
        "losses": losses_block(setting, report),
    }


def deployment_block(setting: Setting, report: Report) -> list[str]:
    network = setting.network
    rows = []
    for home in network.homes:
        pool = home.problem.local.pool
        offset = UTC_OFFSETS_H[home.cluster]
        rows.append(
            [home.cluster, "PD", f"{pool.gpus:,}", pool.accelerator, f"{home.share:.0%}"]
            + [f"UTC{offset:+d}"]
        )
    for pool in network.prfaas_pools.values():
        rows.append([pool.cluster, "PrfaaS", f"{pool.gpus:,}", pool.accelerator, "", ""])
    gpus = sum(pool.gpus for pool in network.pools)
    usd, gbps = report["capacity"]["usd_per_hour"], report["capacity"]["total_gbps"]
    return [
        *table(["site", "kind", "GPUs", "type", "share of the peaks", "local time"], rows),
        "",
        f"Together {gpus:,} GPUs for {usd:,.0f} USD an hour at the catalog's prices, and "
        f"{len(links_of(network))} links of together {gbps:,.0f} Gbit/s from PrfaaS to PD clusters.",
    ]


def answer_block(report: Report) -> list[str]:
    at, needs = report["capacity"], report["needs"]["day"]
    cases = report["simulated"]
    lost = [cases[f"lost {name}"] for name in ("prfaas", "pd", "link")]
    broken = ", ".join(f"{case['broken_streams']:,}" for case in lost)
    unserved = sum(case["unserved"] for case in lost)
    return [
        f"- The deployment serves **{at['gain']:.2f} times** the traffic of PD clusters alone for the "
        f"same money. With traffic that does not change over the day it would be "
        f"{at['steady_gain']:.2f}: the rest is prefill capacity that follows the sun.",
        f"- About **{needs['suffices_gbps']:,.0f} Gbit/s** between the sites give {SUFFICES:.0%} of what "
        f"unlimited bandwidth gives, {needs['suffices_gbps'] / at['total_gbps']:.0%} of the links of the "
        f"file; more does not help. Half of the gain needs {needs['half_of_the_gain_gbps']:,.0f} Gbit/s, and below "
        f"{needs['even_gbps']:,.0f} Gbit/s PD clusters alone are better.",
        f"- The loss of a PrfaaS site, of a PD site and of a link at the busiest hour, at {LOAD:.0%} load, "
        f"leave {unserved:,} requests without an answer; they break {broken} streams that had begun.",
    ]


def capacity_block(report: Report) -> list[str]:
    at = report["capacity"]
    rows = [
        ["PrfaaS, this deployment", f"{at['prfaas_peaks_rps']:.1f}"]
        + [f"{at['prfaas_busiest_rps']:.1f}", f"{at['gain']:.2f}"],
        ["every PD cluster alone, the same money", f"{at['alone_peaks_rps']:.1f}"]
        + [f"{at['alone_busiest_rps']:.1f}", "1.00"],
        ["the same, if whole requests could move freely", f"{at['moved_peaks_rps']:.1f}"]
        + [f"{at['alone_peaks_rps']:.1f}", f"{at['gain'] / at['gain_over_moved']:.2f}"],
    ]
    head = ["system", "sum of the peaks (requests/s)", "busiest hour (requests/s)", "traffic"]
    return [
        *table(head, rows),
        "",
        f"The hour that limits the deployment is {at['limiting_hour_utc']}:00 UTC. The busiest hour of all "
        f"regions together has {at['busiest_over_sum_of_peaks']:.0%} of the sum of the peaks. At {LOAD:.0%} of the "
        f"deployment's largest day, a region alone is above its capacity for {at['alone_overloaded_hours']:.1f} "
        f"hours a day, with {at['alone_excess_requests']:.0%} of its requests in excess. Links are not in the money: the gain is worth "
        f"{at['break_even_usd_per_gbps_hour']:.1f} USD an hour for each Gbit/s of the file.",
    ]


def troughs_block(report: Report) -> list[str]:
    rows = [
        [f"{float(trough):.0%}", f"{at['peaks_rps']:.1f}"]
        + [f"{at['gain']:.2f}", f"{at['gain_over_moved']:.2f}"]
        for trough, at in report["troughs"].items()
    ]
    head = ["quietest over busiest hour", "sum of the peaks (requests/s)"]
    return table([*head, "gain: alone", "gain: alone, requests move freely"], rows)


def bandwidth_block(report: Report) -> list[str]:
    rows = [
        [
            f"{float(factor):g}",
            f"{at['gbps']:,.0f}",
            f"{at['gain']:.2f}",
            f"{at['steady_gain']:.2f}",
        ]
        for factor, at in report["bandwidth"].items()
    ]
    lines = []
    for name, traffic in (("day", "the traffic of the day"), ("steady", "steady traffic")):
        need = report["needs"][name]
        lines.append(
            f"- With {traffic}: {need['suffices_gbps']:,.0f} Gbit/s give {SUFFICES:.0%} of the largest rate "
            f"(gain {need['unlimited_gain']:.2f} with unlimited bandwidth), {need['half_of_the_gain_gbps']:,.0f} Gbit/s half of the "
            f"gain, {need['even_gbps']:,.0f} Gbit/s none."
        )
    head = ["bandwidth: times the file's", "Gbit/s in total", "gain: day", "gain: steady traffic"]
    return [*table(head, rows), "", *lines]


def links_block(setting: Setting, report: Report) -> list[str]:
    network = setting.network
    carried = report["simulated"]["day"]["egress_gbps"]
    rows = []
    for home in network.homes:
        for remote in home.problem.remotes:
            name = f"{remote.pool.cluster} {home.cluster}"
            gbps = remote.path.bps / 1e9
            rows.append(
                [f"{remote.pool.cluster} to {home.cluster}", f"{gbps:g}"]
                + [
                    f"{remote.path.rtt_s * 1e3:.0f}",
                    f"{carried[name]:.0f} ({carried[name] / gbps:.0%})",
                ]
                + [f"{report['without'][name]:.1%}"]
            )
    head = ["link", "Gbit/s", "round trip (ms)", "busiest hour, simulated (Gbit/s)"]
    sites = [f"{name}: {report['without'][name]:.1%}" for name in network.prfaas_pools]
    return [
        *table([*head, "largest day without it"], rows),
        "",
        f"The largest day without a PrfaaS site: {', '.join(sites)} of that of the whole deployment.",
    ]


def day_block(report: Report) -> list[str]:
    mine, alone = report["simulated"]["day"], report["simulated"]["day alone"]
    rows = []
    for name, region in [*mine["regions"].items(), ("all", None)]:
        one = mine["ttft_s"] if region is None else region
        other = alone["ttft_s"] if region is None else alone["regions"][name]
        rows.append(
            [name, *(f"{one[q]:.2f}" for q in QUANTILES), *(f"{other[q]:.2f}" for q in QUANTILES)]
        )
    head = [
        "region",
        *(f"{q.upper()} (s)" for q in QUANTILES),
        *(f"alone: {q.upper()} (s)" for q in QUANTILES),
    ]
    return [
        *table(head, rows),
        "",
        f"{mine['requests']:,} requests with PrfaaS and {alone['requests']:,} alone, each at {LOAD:.0%} of the largest "
        f"day that its system can serve. With PrfaaS, {mine['offloaded']:.0%} of the prefills are remote, "
        f"{mine['elsewhere']:.1%} of the requests decode in another region because their own was full for a moment, and nodes change "
        f"their roles {mine['role_changes']:,} times. {mine['unserved'] + alone['unserved']:,} requests stay without an answer.",
    ]


QUANTILES = ("p50", "p90", "p99")


def speed_block(report: Report) -> list[str]:
    rows = []
    for case in ("day", "day check"):
        at = report["simulated"][case]
        rows.append(
            [
                f"{at['speed']:g}",
                f"{at['requests']:,}",
                *(f"{at['ttft_s'][q]:.2f}" for q in QUANTILES),
            ]
            + [f"{at['offloaded']:.1%}", f"{at['elsewhere']:.1%}"]
        )
    head = ["speed", "requests", *(f"{q.upper()} (s)" for q in QUANTILES), "remote prefills"]
    return table([*head, "decoded elsewhere"], rows)


def losses_block(setting: Setting, report: Report) -> list[str]:
    named = {
        "lost prfaas": f"PrfaaS site {LOST_PRFAAS}",
        "lost pd": f"PD site {LOST_PD}",
        "lost link": f"link {LOST_LINK[0]} to {LOST_LINK[1]}",
        "lost pd alone": f"PD site {LOST_PD}, PD clusters alone",
    }
    rows = []
    for case, name in named.items():
        at = report["simulated"][case]
        phases = [seconds(at["phases"][p]["p90"]) for p in ("before", "during", "after")]
        steady = at["steady_after_s"]
        rows.append(
            [name, *phases, seconds(at["worst_p90_s"])]
            + ["not in the run" if steady is None else f"{steady:.0f} s"]
            + [f"{at['started_again']:,}", f"{at['broken_streams']:,}", f"{at['unserved']:,}"]
            + [f"{at['elsewhere_during']:.0%}"]
        )
    head = ["lost", "P90 before (s)", "during", "after", "worst 10 s", "steady again after"]
    before_s, during_s, after_s = setting.scale.loss_s
    hour = setting.day.busiest(setting.network)
    return [
        *table(
            [*head, "started again", "broken streams", "unserved", "decoded elsewhere during it"],
            rows,
        ),
        "",
        f"{before_s:.0f} s before the loss, {during_s:.0f} s of loss, {after_s:.0f} s after it, at "
        f"{hour}:00 UTC, in real time.",
    ]


def write_page(docs: Path, setting: Setting, report: Report) -> None:
    from prfaas.display.scale_plots import plot_bandwidth, plot_day, plot_losses

    images = docs / "img"
    plot_bandwidth(images / "scale-bandwidth.png", report)
    plot_day(images / "scale-day.png", report)
    plot_losses(images / "scale-losses.png", report, BIN_S, setting.scale.loss_s[:2])
    page = docs / "scale.md"
    text = fill(page.read_text(encoding="utf-8"), page_blocks(setting, report))
    page.write_text(text, encoding="utf-8")


@click.command(help=__doc__)
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation.")
@click.option(
    "--jobs", type=click.IntRange(1), default=2, show_default=True, help="Simulations at a time."
)
@click.option("--quick", is_flag=True, help="A small deployment and short runs, for tests.")
@click.option(
    "--report", "file", type=click.Path(path_type=Path), help="JSON that an earlier run printed."
)
def main(docs: Path | None, jobs: int, quick: bool, file: Path | None) -> None:
    setting = Setting(QUICK if quick else FULL)
    report = make_report(setting, jobs) if file is None else json.loads(file.read_bytes())
    if docs is None and not quick:
        docs = DOCS
    if docs is not None:
        write_page(docs, setting, report)
    print_json(report)


def make_report(setting: Setting, jobs: int) -> Report:
    report: Report = {}
    steps = list(plan_steps(setting, report))
    with progress_bar("plans", len(steps)) as show:
        for count, step in enumerate(steps, start=1):
            step()
            show(count)
    rates = report["capacity"]
    cases = make_cases(setting.scale, rates["prfaas_peaks_rps"], rates["alone_peaks_rps"])
    with progress_bar("simulations", len(cases)) as show:
        finished = 0

        def done() -> None:
            nonlocal finished
            finished += 1
            show(finished)

        report["simulated"] = run_cases(cases, jobs, done)
    report["demand"] = {
        home.cluster: [
            float(setting.day.demand(setting.network, hour)[number]) for hour in range(HOURS + 1)
        ]
        for number, home in enumerate(setting.network.homes)
    }
    whole: Report = rounded(report, 4)
    return whole


if __name__ == "__main__":
    main()
