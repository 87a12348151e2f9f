"""10,000 GPUs in seven datacenters over a day, with losses: makes docs/scale.md.

\b
    python -m prfaas_lab bench scale_study [--docs docs] [--workers 2] [--quick] [--report FILE]

Plans configs/four_by_three.toml for every second hour of a day whose traffic moves from region to
region, for other bandwidths and without single sites and links; simulates the day and three losses;
and compares with every PD cluster alone for the same money. Replaces the blocks of scale.md and its
figures, and prints every figure as JSON. With --report the figures are kept in a file, so that an
interrupted study continues. With --quick the deployment and the runs are much smaller, and the page
is written only if --docs is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from _page_blocks import fill
from _scale_page import page_blocks
from prfaas.cli.workers_options import workers_options
from prfaas.config import load_deployment
from prfaas.config.deployment import ReplanSection, SchedulerSection
from prfaas.display.console import print_json, progress_bar, rounded, run_benchmark
from prfaas.planner.network.plan import Binding
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.scheduler.homes.round_trips import round_trips
from prfaas.sim.arrivals import poisson_at_homes
from prfaas.sim.config import ClusterFault, Fault, LinkFault, SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.parallel.run_all import as_finished
from prfaas.studies.parallel.workers import Workers
from prfaas.types import ClusterId
from prfaas_lab.studies.regional_day import (
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
TRAFFICS = {"day": TROUGH, "steady": 1.0}  # name -> trough

# The long-term loop in the simulated day, in seconds of the day; the defaults where not stated.
# Plans are half an hour apart, because each costs a tenth of a second of computing.
REPLAN_EVERY_S = 1800.0
# Blocks of requests in which the loop looks for steady traffic: as many as the default at a speed
# of 48, and fewer in faster days, which have fewer requests.
BLOCK_REQUESTS, BLOCK_SPEED = ReplanSection().block_requests, 48

LOST_PRFAAS, LOST_PD = "oregon", "frankfurt"
LOST_LINK = ("oregon", "virginia")
BIN_S = 10.0  # of the time series around a loss
STEADY_WITHIN = 0.25  # of the P90 before a loss


class Scale(NamedTuple):
    """How much is planned and simulated."""

    shrink: float  # of the deployment
    hours: tuple[int, ...]  # that are planned
    factors: tuple[float, ...]  # of the bandwidth
    speeds: tuple[float, float]  # of the simulated day, and of the day that checks it
    loss_s: tuple[float, float, float]  # before, during and after a loss


FULL = Scale(
    shrink=1.0,
    hours=tuple(range(0, HOURS, 2)),
    factors=(0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.5, 2.0),
    speeds=(60, 120),
    loss_s=(60, 120, 180),
)
QUICK = Scale(40.0, (6, 18), (0.125, 1.0), (480, 960), (20, 20, 40))


class Case(NamedTuple):
    """One simulation."""

    name: str
    system: System
    peaks_rps: float  # the sum of the peaks
    speed: float | None = None  # of a day; None: a loss, at the busiest hour
    fault: str | None = None


class Step(NamedTuple):
    """A part of the report: its keys, from the outer one to the inner one, and what makes it."""

    keys: tuple[str, ...]
    make: Callable[[Setting], Any]

    @property
    def name(self) -> str:
        return " ".join(self.keys)


class Setting:
    """The deployment, at a size."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.deployment = load_deployment(CONFIG)
        study = NetworkStudy(CONFIG, "exact")
        self.network = shrunk(study.network(self.deployment), scale.shrink)
        self.planner = NetworkPlanner("exact")
        self.day = RegionalDay(UTC_OFFSETS_H, TROUGH, BUSIEST_HOUR)
        self._alone: tuple[float, NetworkProblem] | None = None

    @property
    def alone(self) -> tuple[float, NetworkProblem]:
        # A cached_property has a lock in Python 3.11, and a class with a lock cannot travel.
        if self._alone is None:
            self._alone = alone_for_the_same_money(self.planner, self.network)
        return self._alone

    def largest(self, network: NetworkProblem, trough: float = TROUGH) -> float:
        hours = self.scale.hours if trough < 1 else self.scale.hours[:1]
        day = RegionalDay(UTC_OFFSETS_H, trough, BUSIEST_HOUR)
        return largest_day(self.planner, network, day, hours)[0]


# --------------------------------------------------------------------------------------------------
# Plans


def independent_plans(network: NetworkProblem, scale: Scale, rates: Report) -> Iterator[Step]:
    """Plans that need nothing but the capacity, in steps that each take some seconds."""
    for trough in OTHER_TROUGHS:
        yield Step(("troughs", str(trough)), partial(trough_gain, trough=trough))
    total_gbps, peaks_rps = rates["total_gbps"], rates["prfaas_peaks_rps"]
    for factor in scale.factors:
        found = partial(bandwidth_gain, factor=factor, total_gbps=total_gbps)
        yield Step(("bandwidth", str(factor)), found)
    for name, trough in TRAFFICS.items():
        yield Step(("needs", name, "unlimited_gain"), partial(unlimited_gain, trough=trough))
    for name in network.prfaas_pools:
        left = partial(share_without_prfaas, name=name, peaks_rps=peaks_rps)
        yield Step(("without", name), left)
    for link in links_of(network):
        lost = partial(share_without_link, link=link, peaks_rps=peaks_rps)
        yield Step(("without", " ".join(link)), lost)


def needed_bandwidths(report: Report) -> Iterator[Step]:
    """Plans that need the gain with unlimited bandwidth."""
    total_gbps = report["capacity"]["total_gbps"]
    for name, trough in TRAFFICS.items():
        most = report["needs"][name]["unlimited_gain"]
        for key, gain in (
            ("suffices_gbps", SUFFICES * most),
            ("half_of_the_gain_gbps", (1 + most) / 2),
            ("even_gbps", 1.0),
        ):
            found = partial(need_gbps, trough=trough, gain=gain, total_gbps=total_gbps)
            yield Step(("needs", name, key), found)


def capacity(setting: Setting) -> Report:
    network, day = setting.network, setting.day
    rate, hour = largest_day(setting.planner, network, day, setting.scale.hours)
    alone, _ = setting.alone
    shape = np.array([day.demand(network, minute / 60).sum() for minute in range(HOURS * 60)])
    busiest = float(shape.max())
    steady = setting.largest(network, trough=1.0)
    usd = hourly_usd(network)
    total = sum(r.path.bps for home in network.homes for r in home.problem.remotes) / 1e9
    # All regions have the same curve, so each is above its own capacity equally long.
    angles = np.linspace(0, 2 * math.pi, HOURS * 60, endpoint=False)
    offered = (TROUGH + (1 - TROUGH) * (1 + np.cos(angles)) / 2) * LOAD * rate / alone
    return {
        "prfaas_peaks_rps": rate,
        "prfaas_busiest_rps": rate * busiest,
        "limiting_hour_utc": hour,
        "binding": limits(setting.planner.solve(day.at(network, hour)).binding),
        "alone_peaks_rps": alone,
        "alone_busiest_rps": alone * busiest,
        "moved_peaks_rps": alone / busiest,
        "steady_peaks_rps": steady,
        "gain": rate / alone,
        "gain_over_moved": rate / alone * busiest,
        "steady_gain": steady / alone,
        "usd_per_hour": usd,
        "total_gbps": total,
        "break_even_usd_per_gbps_hour": (rate / alone - 1) * usd / total,
        "alone_overloaded_hours": float((offered > 1).mean()) * HOURS,
        "alone_excess_requests": float(np.maximum(offered - 1, 0).sum() / offered.sum()),
        "busiest_over_sum_of_peaks": busiest,
    }


def limits(binding: Sequence[Binding]) -> Report:
    """The names of what a plan uses completely, by kind."""
    found: dict[str, list[str]] = {}
    for one in binding:
        name = one.cluster if one.target is None else f"{one.cluster} to {one.target}"
        found.setdefault(one.stage, []).append(name)
    return found


def trough_gain(setting: Setting, trough: float) -> Report:
    rate = setting.largest(setting.network, trough)
    day = RegionalDay(UTC_OFFSETS_H, trough, BUSIEST_HOUR)
    busiest = max(float(day.demand(setting.network, hour).sum()) for hour in range(HOURS))
    gain = rate / setting.alone[0]
    return {"peaks_rps": rate, "gain": gain, "gain_over_moved": gain * busiest}


def bandwidth_gain(setting: Setting, factor: float, total_gbps: float) -> Report:
    other = with_bandwidth(setting.network, factor)
    alone = setting.alone[0]
    return {
        "gbps": factor * total_gbps,
        "gain": setting.largest(other) / alone,
        "steady_gain": setting.largest(other, 1.0) / alone,
    }


def unlimited_gain(setting: Setting, trough: float) -> float:
    most = setting.largest(with_bandwidth(setting.network, UNLIMITED), trough)
    return most / setting.alone[0]


def need_gbps(setting: Setting, trough: float, gain: float, total_gbps: float) -> float:
    """The total bandwidth from which the gain is reached, to 2%, with the bandwidths of the links
    in the proportions of the file."""
    low, high = 2.0**-8, 4.0
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        found = setting.largest(with_bandwidth(setting.network, middle), trough)
        low, high = (low, middle) if found >= gain * setting.alone[0] else (middle, high)
    return high * total_gbps


def share_without_prfaas(setting: Setting, name: str, peaks_rps: float) -> float:
    return setting.largest(without_prfaas(setting.network, name)) / peaks_rps


def share_without_link(setting: Setting, link: tuple[str, str], peaks_rps: float) -> float:
    return setting.largest(without_link(setting.network, *link)) / peaks_rps


def links_of(network: NetworkProblem) -> list[tuple[str, str]]:
    return [(r.pool.cluster, h.cluster) for h in network.homes for r in h.problem.remotes]


# --------------------------------------------------------------------------------------------------
# Simulations


def make_cases(scale: Scale, prfaas_rps: float, alone_rps: float) -> list[Case]:
    """Each system at the same load relative to the largest day that it can serve, and PrfaaS also
    at the traffic of PD clusters alone. The longest runs come first."""
    mine, alone = LOAD * prfaas_rps, LOAD * alone_rps
    speed, check = scale.speeds
    return [
        Case("day", "prfaas", mine, speed),
        Case("lost prfaas", "prfaas", mine, fault="prfaas"),
        Case("lost pd", "prfaas", mine, fault="pd"),
        Case("lost link", "prfaas", mine, fault="link"),
        Case("day check", "prfaas", mine, check),
        Case("day alone", "alone", alone, speed),
        Case("lost pd alone", "alone", alone, fault="pd"),
        Case("lost pd light", "prfaas", alone, fault="pd"),
    ]


def run_case(setting: Setting, case: Case) -> Report:
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
        round_trips=round_trips(setting.deployment) if case.system == "prfaas" else {},
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
    before_s, during_s, after_s = setting.scale.loss_s
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
        round_trips=round_trips(setting.deployment),
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
    p90_by_bin = {
        name: [
            _quantiles(rows.ttft_s[(in_bin == step) & (rows.home == number)])["p90"]
            for step in steps
        ]
        for number, name in enumerate(names)
    }
    return {
        **_totals(result),
        "phases": {name: _quantiles(rows.ttft_s[rows_in]) for name, rows_in in phases.items()},
        "elsewhere_during": float(_elsewhere(result)[phases["during"]].mean()),
        "p90_by_bin": p90_by_bin,
        **recovery(p90_by_bin, before_s, end_s),
    }


def recovery(
    p90_by_bin: Mapping[str, Sequence[float | None]], before_s: float, end_s: float
) -> Report:
    """`worst_p90_s`: the largest P90 of a bin and a region. `steady_after_s`: seconds from the end
    of the loss until every P90 stays near the largest before the loss; None: not in the run. The
    first quarter before the loss is left out, because the deployment is empty at first."""
    bins = zip(*p90_by_bin.values(), strict=True)
    # A region without a first token in a bin is not steady. The last bin may be incomplete.
    p90 = [max(math.inf if value is None else value for value in values) for values in bins][:-1]
    first, lost = round(before_s / 4 / BIN_S), round(before_s / BIN_S)
    limit = (1 + STEADY_WITHIN) * max(p90[first:lost])
    last = max((k for k, value in enumerate(p90) if value > limit and k >= lost), default=lost - 1)
    steady_s = max((last + 1) * BIN_S - end_s, 0.0)
    return {
        "worst_p90_s": max(value for value in p90 if math.isfinite(value)),
        "steady_after_s": None if last >= len(p90) - 1 else steady_s,
    }


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


class Record:
    """The report, which is written to its file after every step."""

    def __init__(self, setting: Setting, workers: Workers, file: Path | None) -> None:
        self._setting, self._workers, self._file = setting, workers, file
        self.report: Report = {}
        if file is not None and file.exists():
            self.report = json.loads(file.read_bytes())

    def run(self, steps: Iterable[Step], what: str) -> None:
        """Adds the parts that the report does not have yet, in the order of the steps."""
        every = list(steps)
        missing = {step.name: step for step in every if not has(self.report, step)}
        make = partial(make_part, self._setting)
        with progress_bar(what, len(missing)) as show:
            parts = as_finished(make, missing, self._workers)
            for count, (name, part) in enumerate(parts, start=1):
                add(self.report, missing[name], part)
                if self._file is not None:
                    text = json.dumps(self.report, indent=2) + "\n"
                    self._file.write_text(text, encoding="utf-8")
                show(count)
        for step in every:
            put_last(self.report, step)


def make_part(setting: Setting, step: Step) -> Any:
    return step.make(setting)


def has(report: Report, step: Step) -> bool:
    found: Any = report
    for key in step.keys:
        if key not in found:
            return False
        found = found[key]
    return True


def add(report: Report, step: Step, part: Any) -> None:
    place = report
    for key in step.keys[:-1]:
        place = place.setdefault(key, {})
    place[step.keys[-1]] = rounded({"part": part}, 4)["part"]


def put_last(report: Report, step: Step) -> None:
    """The report has the order of the steps, and not that in which they were finished."""
    place = report
    for key in step.keys:
        found = place.pop(key)
        place[key] = found
        place = found


# --------------------------------------------------------------------------------------------------
# The page


def assumptions(setting: Setting) -> Report:
    """What the page says about the runs beside their results."""
    return {
        "utc_offsets_h": UTC_OFFSETS_H,
        "trough": TROUGH,
        "busiest_hour": BUSIEST_HOUR,
        "load": LOAD,
        "suffices": SUFFICES,
        "hours_planned": len(setting.scale.hours),
        "replan_every_min": REPLAN_EVERY_S / 60,
        "loss_s": list(setting.scale.loss_s),
        "bin_s": BIN_S,
        "steady_within": STEADY_WITHIN,
        "loss_hour_utc": setting.day.busiest(setting.network),
        "demand": {
            home.cluster: [
                round(float(setting.day.demand(setting.network, hour)[number]), 4)
                for hour in range(HOURS + 1)
            ]
            for number, home in enumerate(setting.network.homes)
        },
        "lost": {
            "prfaas": f"PrfaaS site {LOST_PRFAAS}",
            "pd": f"PD site {LOST_PD}",
            "link": f"link {LOST_LINK[0]} to {LOST_LINK[1]}",
        },
    }


def write_page(docs: Path, setting: Setting, report: Report) -> None:
    from prfaas_lab.studies.scale_plots import plot_bandwidth, plot_day, plot_losses

    images = docs / "img"
    plot_bandwidth(images / "scale-bandwidth.png", report)
    plot_day(images / "scale-day.png", report)
    plot_losses(images / "scale-losses.png", report, BIN_S, setting.scale.loss_s[:2])
    page = docs / "scale.md"
    text = fill(page.read_text(encoding="utf-8"), page_blocks(setting.network, report))
    page.write_text(text, encoding="utf-8")


@click.command(help=__doc__)
@click.option("--docs", type=click.Path(path_type=Path), help="Folder of the documentation.")
@workers_options
@click.option("--quick", is_flag=True, help="A small deployment and short runs, for tests.")
@click.option(
    "--report",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the JSON. What it already has is not computed again.",
)
def main(docs: Path | None, workers: Workers, quick: bool, file: Path | None) -> None:
    setting = Setting(QUICK if quick else FULL)
    record = Record(setting, workers, file)
    report = record.report
    report["assumptions"] = assumptions(setting)
    record.run([Step(("capacity",), capacity)], "capacity")
    rates = report["capacity"]
    record.run(independent_plans(setting.network, setting.scale, rates), "plans")
    record.run(needed_bandwidths(report), "bandwidths")
    cases = make_cases(setting.scale, rates["prfaas_peaks_rps"], rates["alone_peaks_rps"])
    steps = [Step(("simulated", case.name), partial(run_case, case=case)) for case in cases]
    record.run(steps, "simulations")
    if docs is None and not quick:
        docs = DOCS
    if docs is not None:
        write_page(docs, setting, report)
    print_json(report)


if __name__ == "__main__":
    run_benchmark(main)
