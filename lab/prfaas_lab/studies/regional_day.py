"""A day of traffic in several regions: demand over the hours, what fits, and requests to simulate.

The demand of a region follows its local time. Between its busiest hour and twelve hours later it
falls to `trough` of the peak, on a cosine:

    demand(hour) = peak * (trough + (1 - trough) * (1 + cos(2 pi (local hour - busiest) / 24)) / 2)

The traffic shares of the deployment are the regions' shares of the sum of all peaks. A rate of a
day is this sum ("the sum of the peaks"), which the deployment as a whole never sees at one time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prfaas.planner.network import baselines
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.problem import Local, Pool, Problem, Remote
from prfaas.sim.arrivals import Arrivals, draw_at_homes

Array = npt.NDArray[np.float64]

HOURS = 24
_STEPS_PER_HOUR = 60  # of the rate from which requests are drawn


@dataclass(frozen=True, slots=True)
class RegionalDay:
    """The demand of every PD cluster over the day, in UTC."""

    utc_offsets_h: Mapping[str, float]  # by PD cluster
    trough: float  # the quietest hour of a region over its busiest one; 1: no change over the day
    busiest_hour: float  # local time

    def demand(self, network: NetworkProblem, hour: float) -> Array:
        """The demand of each PD cluster at an hour (UTC), over the sum of all peaks."""
        shares = np.array([home.share for home in network.homes])
        offsets = np.array([self.utc_offsets_h[home.cluster] for home in network.homes])
        local = hour + offsets - self.busiest_hour
        swing = (1 + np.cos(2 * math.pi * local / HOURS)) / 2
        return np.asarray(shares * (self.trough + (1 - self.trough) * swing))

    def at(self, network: NetworkProblem, hour: float) -> NetworkProblem:
        """The network with the traffic shares of this hour."""
        demand = self.demand(network, hour)
        shares = (demand / demand.sum()).tolist()
        homes = zip(network.homes, shares, strict=True)
        return NetworkProblem(tuple(replace(home, share=share) for home, share in homes))

    def busiest(self, network: NetworkProblem) -> int:
        """The whole hour (UTC) with the largest demand of all regions together."""
        return max(range(HOURS), key=lambda hour: float(self.demand(network, hour).sum()))


def largest_day(
    planner: NetworkPlanner, network: NetworkProblem, day: RegionalDay, hours: Sequence[int]
) -> tuple[float, int]:
    """The largest sum of the peaks at which every hour fits, and the hour that limits it. Each hour
    has its own plan: thresholds, splits and flows follow the traffic."""
    fits = {
        hour: planner.rate_rps(day.at(network, hour)) / float(day.demand(network, hour).sum())
        for hour in hours
    }
    hour = min(fits, key=lambda hour: fits[hour])
    return fits[hour], hour


def alone_for_the_same_money(
    planner: NetworkPlanner, network: NetworkProblem
) -> tuple[float, NetworkProblem]:
    """Every PD cluster alone, with the money of the whole deployment divided as the peaks of the
    regions need it. Returns the sum of the peaks, and the network without PrfaaS clusters."""
    rate_rps = baselines.equal_cost(planner, network)
    assert rate_rps is not None, "the catalog has the prices of all accelerators of the study"
    alone = network.with_remotes(lambda home, remote: None)
    sizes = {}
    for home in alone.homes:
        work = planner.work(home)
        rps = home.share * rate_rps
        prefill = math.ceil(rps * float(work.work.local_s[-1]) * (1 - 1e-9))
        sizes[home.cluster] = prefill + math.ceil(rps / work.decode_rps * (1 - 1e-9))
    return rate_rps, alone.with_homes(lambda problem: _resized(problem, sizes))


def hourly_usd(network: NetworkProblem) -> float:
    return sum(pool.gpus * (pool.usd_per_gpu_hour or 0.0) for pool in network.pools)


def with_bandwidth(network: NetworkProblem, factor: float) -> NetworkProblem:
    """Every link of a PrfaaS cluster is `factor` times as fast."""
    return network.with_remotes(
        lambda _, remote: replace(remote, path=replace(remote.path, bps=remote.path.bps * factor))
    )


def without_link(network: NetworkProblem, source: str, target: str) -> NetworkProblem:
    return network.with_remotes(
        lambda home, remote: (
            None if (remote.pool.cluster, home.cluster) == (source, target) else remote
        )
    )


def without_prfaas(network: NetworkProblem, name: str) -> NetworkProblem:
    return network.with_remotes(lambda _, remote: None if remote.pool.cluster == name else remote)


def shrunk(network: NetworkProblem, factor: float) -> NetworkProblem:
    """The same deployment with fewer instances, and links that are slower by the same factor."""
    if factor == 1:
        return network

    def fewer(pool: Pool) -> int:
        return max(round(pool.instances / factor), 2)

    def change(_: object, remote: Remote) -> Remote:
        pool = replace(remote.pool, instances=fewer(remote.pool))
        return replace(remote, pool=pool, path=replace(remote.path, bps=remote.path.bps / factor))

    sizes = {home.cluster: fewer(home.problem.local.pool) for home in network.homes}
    return network.with_remotes(change).with_homes(lambda problem: _resized(problem, sizes))


def draw_day(
    network: NetworkProblem,
    day: RegionalDay,
    peaks_rps: float,
    speed: float,
    seed: int,
) -> Arrivals:
    """Requests of a whole day, `speed` times as fast: the rates are those of the day, and the day
    is shorter. Poisson arrivals whose rate changes from minute to minute of the day."""
    rng = np.random.default_rng(seed)
    edges_h = np.linspace(0.0, HOURS, HOURS * _STEPS_PER_HOUR + 1)
    demand = np.array([day.demand(network, hour) for hour in edges_h])
    width_s = 3600 / _STEPS_PER_HOUR / speed
    means = (demand[1:] + demand[:-1]) / 2 * width_s * peaks_rps
    counts = rng.poisson(means)  # per minute and region
    minutes, homes = np.indices(counts.shape)
    flat = counts.ravel()
    at_s = (np.repeat(minutes.ravel(), flat) + rng.random(int(flat.sum()))) * width_s
    order = np.argsort(at_s, kind="stable")
    return draw_at_homes(network, at_s[order], np.repeat(homes.ravel(), flat)[order], rng)


def _resized(problem: Problem, sizes: Mapping[str, int]) -> Problem:
    local: Local = problem.local
    pool = replace(local.pool, instances=sizes[local.pool.cluster])
    return replace(problem, local=replace(local, pool=pool))
