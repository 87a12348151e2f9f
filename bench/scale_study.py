"""The study at scale: 10,000 GPUs in 4 PD and 3 PrfaaS datacenters. Writes docs/scale.md.

    prfaas bench scale_study [--docs FOLDER] [--hour-s 60] [--size 1.0]

The model, the accelerators and the lengths are those of the case study; sizes, links and the shape
of the day are an example. The planner answers what a day of traffic needs, what the loss of a site
or of a link costs, and what bandwidth between sites is worth. The simulator then runs that day with
all three losses: an hour of the day takes `--hour-s` seconds, at the rates of the real day, so that
traffic shifts between regions faster than in reality. `--size` scales the deployment, its links and
its traffic, for a quick look: then a page is written only where `--docs` names a folder for it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.config import Deployment, parse_deployment
from prfaas.config.strict import parse_toml, read_text
from prfaas.planner.network.baselines import equal_cost
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Path as LinkPath
from prfaas.planner.problem import Problem
from prfaas.scheduler.plan import find_optimum
from prfaas.sim.arrivals import Arrivals, draw_at_homes
from prfaas.sim.config import ClusterFault, LinkFault, SimConfig
from prfaas.sim.results.result import Result
from prfaas.sim.run import simulate
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.simulation_cases import round_trips, routed_by
from prfaas.types import ClusterId

Array = npt.NDArray[np.float64]

CASE_STUDY = Path(__file__).parents[1] / "configs" / "case_study.toml"
DOCS = Path(__file__).parents[1] / "docs"
GPUS_PER_INSTANCE = 8
PD_GPUS = {"europe": 2400, "america": 2000, "asia": 1600, "pacific": 1200}
PRFAAS_GPUS = {"north": 1200, "south": 1000, "east": 600}
# Links out of each PrfaaS site: one site is near, one is far, the others are between.
NEAR = {"north": "europe", "south": "america", "east": "asia"}
FAR = {"north": "pacific", "south": "asia", "east": "america"}
GBPS = {"near": 400.0, "between": 150.0, "far": 60.0}
RTT_MS = {"near": 15.0, "between": 60.0, "far": 140.0}
PD_RTT_MS = 90.0
# Requests per second of a region swing by this part of their mean over a day; the peaks are spread
# over the time zones.
SWING = 0.5
PEAK_HOUR = {"europe": 13.0, "america": 19.0, "asia": 5.0, "pacific": 1.0}
HOURS = 24
LOAD = 0.8  # of the largest day that the planner finds
FACTORS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # of the bandwidth between sites
ENOUGH = 0.99  # of the rate with unlimited links
# Losses of the simulated day: what is lost, and the hours from and until.
LOST_PRFAAS, LOST_PD, LOST_LINK = "north", "america", ("south", "america")
LOSSES = {"prfaas": (5, 7), "link": (11, 13), "pd": (17, 19)}


def deployment(size: float) -> Deployment:
    raw = parse_toml(read_text(CASE_STUDY), CASE_STUDY)
    clusters = [
        {**_cluster(name, "pd", "h20", gpus, size), "traffic_share": gpus / sum(PD_GPUS.values())}
        for name, gpus in PD_GPUS.items()
    ]
    clusters += [_cluster(n, "prfaas", "h200", gpus, size) for n, gpus in PRFAAS_GPUS.items()]
    links: list[dict[str, Any]] = []
    for source in PRFAAS_GPUS:
        for target in PD_GPUS:
            how = "between"
            if target == NEAR[source]:
                how = "near"
            elif target == FAR[source]:
                how = "far"
            gbps = GBPS[how] * size
            links.append({"from": source, "to": target, "gbps": gbps, "rtt_ms": RTT_MS[how]})
    names = list(PD_GPUS)
    links += [
        {"from": one, "to": other, "gbps": 10.0, "rtt_ms": PD_RTT_MS}
        for number, one in enumerate(names)
        for other in names[number + 1 :]
    ]
    return parse_deployment({**raw, "clusters": clusters, "links": links}, CASE_STUDY)


def _cluster(name: str, kind: str, accelerator: str, gpus: int, size: float) -> dict[str, Any]:
    instances = max(2, round(gpus * size / GPUS_PER_INSTANCE))
    return {
        "name": name,
        "kind": kind,
        "accelerator": accelerator,
        "gpus": instances * GPUS_PER_INSTANCE,
        "gpus_per_instance": GPUS_PER_INSTANCE,
    }


# The day -----------------------------------------------------------------------------------------


def rates_by_hour(network: NetworkProblem) -> Array:
    """Requests per second of every PD cluster (row) in every hour (column), for a day with a mean
    total rate of 1."""
    hours = np.arange(HOURS) + 0.5
    rows = []
    for home in network.homes:
        angle = 2 * math.pi * (hours - PEAK_HOUR[home.cluster]) / HOURS
        rows.append(home.share * (1 + SWING * np.cos(angle)))
    return np.array(rows)


def with_rates(network: NetworkProblem, rates: Sequence[float]) -> NetworkProblem:
    """The network with traffic in these proportions."""
    total = sum(rates)
    return NetworkProblem(
        tuple(replace(h, share=r / total) for h, r in zip(network.homes, rates, strict=True))
    )


def largest_days(planner: NetworkPlanner, network: NetworkProblem, rates: Array) -> list[float]:
    """For every hour, the mean total rate of the largest day whose traffic of that hour the network
    serves."""
    found = []
    for hour in range(HOURS):
        here = rates[:, hour]
        rate = planner.rate_rps(with_rates(network, here.tolist()))
        found.append(rate / float(here.sum()))
    return found


# Every PD cluster alone, for the same money ------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """Every PD cluster alone, with instances for its own peak, bought with all the money."""

    day_rps: float  # mean total rate of the largest day
    network: NetworkProblem
    gpus: dict[str, int]


def buy_alone(planner: NetworkPlanner, network: NetworkProblem, rates: Array) -> Alone:
    peaks = rates.max(axis=1)
    rate = equal_cost(planner, with_rates(network, peaks.tolist()))
    assert rate is not None, "the catalog has the prices"
    day_rps = rate / float(peaks.sum())
    homes = []
    for home, peak in zip(network.homes, peaks.tolist(), strict=True):
        problem = replace(home.problem, remotes=())
        homes.append(Home(home.share, _smallest(problem, day_rps * peak * (1 - 1e-9))))
    made = NetworkProblem(tuple(homes))
    gpus = {home.cluster: home.problem.local.pool.gpus for home in homes}
    return Alone(day_rps, made, gpus)


def _smallest(problem: Problem, rate_rps: float) -> Problem:
    """The problem with the fewest instances that serve the rate."""

    def sized(instances: int) -> Problem:
        local = problem.local
        return replace(problem, local=replace(local, pool=replace(local.pool, instances=instances)))

    low, high = 2, 4
    while find_optimum(sized(high)).capacity_rps < rate_rps:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if find_optimum(sized(middle)).capacity_rps < rate_rps:
            low = middle + 1
        else:
            high = middle
    return sized(low)


# Losses and bandwidth, by the planner ------------------------------------------------------------


def without_prfaas(network: NetworkProblem, name: str) -> NetworkProblem:
    return network.with_remotes(lambda _, r: None if r.pool.cluster == name else r)


def without_link(network: NetworkProblem, source: str, target: str) -> NetworkProblem:
    return network.with_remotes(
        lambda h, r: None if (r.pool.cluster, h.cluster) == (source, target) else r
    )


def without_pd(network: NetworkProblem, name: str) -> NetworkProblem:
    """The other PD clusters take its traffic, in proportion to their own."""
    left = [home for home in network.homes if home.cluster != name]
    total = sum(home.share for home in left)
    return NetworkProblem(tuple(replace(home, share=home.share / total) for home in left))


def with_bandwidth(network: NetworkProblem, factor: float) -> NetworkProblem:
    return network.with_remotes(
        lambda _, r: replace(r, path=LinkPath(r.path.bps * factor, r.path.rtt_s))
    )


def plan_everything(network: NetworkProblem) -> dict[str, Any]:
    planner = NetworkPlanner("exact")
    rates = rates_by_hour(network)
    plan = planner.solve(network)
    by_hour = largest_days(planner, network, rates)
    alone = buy_alone(planner, network, rates)
    worst = int(np.argmin(by_hour))
    at_worst = with_rates(network, rates[:, worst].tolist())
    whole_rps = planner.rate_rps(at_worst)
    lost = {
        f"PrfaaS site {name}": planner.rate_rps(without_prfaas(at_worst, name))
        for name in PRFAAS_GPUS
    }
    lost |= {
        f"PD site {home.cluster}": planner.rate_rps(without_pd(at_worst, home.cluster))
        for home in network.homes
    }
    source, target = LOST_LINK
    lost[f"link {source} to {target}"] = planner.rate_rps(without_link(at_worst, *LOST_LINK))
    sweep = {f: planner.rate_rps(with_bandwidth(network, f)) for f in FACTORS}
    unlimited = planner.rate_rps(with_bandwidth(network, 1e4))
    enough = next((f for f, rate in sweep.items() if rate >= ENOUGH * unlimited), None)
    return {
        "gpus": sum(pool.gpus for pool in network.pools),
        "rate_rps": plan.rate_rps,
        "equal_cost_rps": equal_cost(planner, network),
        "flows": [
            {
                "from": f.source,
                "to": f.target,
                "rps": f.rps,
                "gbps": f.bps / 1e9,
                "link_gbps": f.link_bps / 1e9,
            }
            for f in plan.flows
        ],  # fmt: skip
        "egress_gbps": sum(flow.bps for flow in plan.flows) / 1e9,
        "links_gbps": sum(flow.link_bps for flow in plan.flows) / 1e9,
        "day_rps": min(by_hour),
        "day_rps_by_hour": by_hour,
        "worst_hour": worst,
        "alone_day_rps": alone.day_rps,
        "alone_gpus": alone.gpus,
        "lost": {name: rate / whole_rps for name, rate in lost.items()},
        "bandwidth": {str(f): rate for f, rate in sweep.items()},
        "unlimited_rps": unlimited,
        "enough_factor": enough,
    }


# The simulated day -------------------------------------------------------------------------------


def day_arrivals(network: NetworkProblem, day_rps: float, hour_s: float, seed: int) -> Arrivals:
    """Poisson arrivals whose rates change every hour."""
    rng = np.random.default_rng(seed)
    rates = day_rps * rates_by_hour(network)
    at_s, homes = [], []
    for number in range(len(network.homes)):
        for hour in range(HOURS):
            count = rng.poisson(rates[number, hour] * hour_s)
            at_s.append((hour + rng.random(count)) * hour_s)
            homes.append(np.full(count, number))
    times, numbers = np.concatenate(at_s), np.concatenate(homes)
    order = np.argsort(times, kind="stable")
    return draw_at_homes(network, times[order], numbers[order], rng)


def simulated_day(
    network: NetworkProblem, arrivals: Arrivals, config: SimConfig, hour_s: float
) -> dict[str, Any]:
    began = time.process_time()
    result = simulate(network, arrivals, config)
    rows = result.requests
    unanswered = np.isnan(rows.first_token_s)
    broken = ~unanswered & np.isnan(rows.last_token_s)
    hours = (rows.arrival_s / hour_s).astype(int)
    return {
        "requests": len(arrivals),
        "unanswered": int(unanswered.sum()),
        "broken_streams": int(broken.sum()),
        "decoded_elsewhere": int((~unanswered & (rows.decode_cluster != rows.home)).sum()),
        "started_again": int((rows.retries > 0).sum()),
        "ttft_mean_s": float(np.nanmean(rows.ttft_s)),
        "ttft_p90_s_by_hour": [
            float(np.nanquantile(rows.ttft_s[hours == hour], 0.9)) for hour in range(HOURS)
        ],
        "egress_gbps_by_hour": _egress_by_hour(result, hour_s),
        "plan_changes": len(result.plans) - len(network.homes),
        "cpu_s": time.process_time() - began,
    }


def _egress_by_hour(result: Result, hour_s: float) -> list[float]:
    bits = np.zeros(len(result.series.decode_queue))
    bits = sum(result.series.egress_bits.values(), bits)
    width = int(hour_s / result.series.bin_s)
    return [float(bits[h * width : (h + 1) * width].sum()) / hour_s / 1e9 for h in range(HOURS)]


def simulate_everything(
    parsed: Deployment, network: NetworkProblem, planned: dict[str, Any], hour_s: float
) -> dict[str, Any]:
    """The same requests for the network, calm and with losses, and for every PD cluster alone."""
    arrivals = day_arrivals(network, LOAD * planned["day_rps"], hour_s, seed=0)
    base = SimConfig(replans=True, round_trips=round_trips(parsed))
    # The long-term loop keeps pace with the shorter hours.
    shorter = hour_s / 3600
    rules = parsed.scheduler
    replan = msgspec.structs.replace(
        rules.replan,
        every_s=hour_s / 4,
        window_s=hour_s,
        warmup_s=0.0,
        dwell_s=rules.replan.dwell_s * shorter,
    )
    rules = msgspec.structs.replace(rules, replan=replan)
    calm = routed_by("adaptive", rules, base)
    during = {name: (begin * hour_s, end * hour_s) for name, (begin, end) in LOSSES.items()}
    source, target = LOST_LINK
    faults = (
        ClusterFault(ClusterId(LOST_PRFAAS), *during["prfaas"]),
        LinkFault((ClusterId(source), ClusterId(target)), *during["link"]),
        ClusterFault(ClusterId(LOST_PD), *during["pd"]),
    )
    bought = buy_alone(NetworkPlanner("exact"), network, rates_by_hour(network))
    alone = replace(routed_by("local", rules, base), round_trips={})
    return {
        "load": LOAD,
        "hour_s": hour_s,
        "lost_from_until": {
            f"PrfaaS site {LOST_PRFAAS}": LOSSES["prfaas"],
            f"link {source} to {target}": LOSSES["link"],
            f"PD site {LOST_PD}": LOSSES["pd"],
        },
        "calm": simulated_day(network, arrivals, calm, hour_s),
        "losses": simulated_day(network, arrivals, replace(calm, faults=faults), hour_s),
        "alone": simulated_day(bought.network, arrivals, alone, hour_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, help="Folder to write the page to (see above).")
    parser.add_argument("--hour-s", type=float, default=60.0, help="Seconds of an hour.")
    parser.add_argument("--size", type=float, default=1.0, help="Of the deployment.")
    options = parser.parse_args()
    parsed = deployment(options.size)
    network = NetworkStudy(CASE_STUDY, "exact").network(parsed)
    planned = plan_everything(network)
    report = {
        "planned": planned,
        "simulated": simulate_everything(parsed, network, planned, options.hour_s),
    }
    docs = options.docs or (DOCS if options.size == 1.0 else None)
    if docs is not None:
        # The import is here because matplotlib is an optional dependency and slow to import.
        from _scale_page import write_page

        write_page(docs, report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
