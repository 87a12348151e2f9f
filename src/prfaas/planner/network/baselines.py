"""What the plan of several clusters is compared with. Each serves the same shares of traffic.

alone         every PD cluster without any PrfaaS cluster: the same PD clusters, fewer GPUs
one_each      every PrfaaS cluster serves at most one PD cluster, and each PD cluster has at most
              one: the best such pairs
homogeneous   every PD cluster alone, with the GPUs of the whole deployment divided among them as
              they are needed, each of the type of its PD cluster
equal_cost    the same with the money of the whole deployment
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.network.solve import NetworkPlanner
from prfaas.planner.network.work import HomeWork
from prfaas.planner.optimise import optimise, stage_rates


@dataclass(frozen=True, slots=True)
class Pairs:
    """The best plan in which no PrfaaS cluster is shared."""

    rate_rps: float
    prfaas: dict[str, str | None]  # by PD cluster; None: it has no PrfaaS cluster


def alone(planner: NetworkPlanner, problem: NetworkProblem) -> float:
    """0 where a PD cluster cannot prefill."""
    return min(_total(planner, home, None) for home in problem.homes)


def one_each(planner: NetworkPlanner, problem: NetworkProblem) -> Pairs:
    """The total rate of a pairing is that of its weakest PD cluster relative to its share. So the
    best one is found among the rates of single pairs: the largest at which a matching gives every
    PD cluster that needs one a PrfaaS cluster that suffices."""
    names = list(problem.prfaas_pools)
    lone = [_total(planner, home, None) for home in problem.homes]
    paired = np.full((len(problem.homes), len(names)), -math.inf)
    for i, home in enumerate(problem.homes):
        for remote in home.problem.remotes:
            name = remote.pool.cluster
            paired[i, names.index(name)] = _total(planner, home, name)
    rates = sorted({*lone, *paired[np.isfinite(paired)].tolist()})
    best = Pairs(0.0, dict.fromkeys((home.cluster for home in problem.homes), None))
    low, high = 0, len(rates) - 1
    while low <= high:
        middle = (low + high) // 2
        pairs = _matched(problem, names, rates[middle], lone, paired)
        if pairs is None:
            high = middle - 1
        else:
            best, low = pairs, middle + 1
    return best


def homogeneous(planner: NetworkPlanner, problem: NetworkProblem) -> float | None:
    """None where the GPUs do not suffice for two instances of each PD cluster."""
    costs = [float(home.problem.local.pool.gpus_per_instance) for home in problem.homes]
    return _bought(planner, problem, costs, float(sum(pool.gpus for pool in problem.pools)))


def equal_cost(planner: NetworkPlanner, problem: NetworkProblem) -> float | None:
    """None where the money does not suffice for two instances of each PD cluster, or a price is
    unknown."""
    money = 0.0
    for pool in problem.pools:
        if pool.usd_per_gpu_hour is None:
            return None
        money += pool.gpus * pool.usd_per_gpu_hour
    costs = []
    for home in problem.homes:
        pool = home.problem.local.pool
        assert pool.usd_per_gpu_hour is not None, "the PD clusters' pools are among all pools"
        costs.append(pool.gpus_per_instance * pool.usd_per_gpu_hour)
    return _bought(planner, problem, costs, money)


def _without_prfaas(problem: NetworkProblem) -> NetworkProblem:
    return problem.with_remotes(lambda home, remote: None)


def _total(planner: NetworkPlanner, home: Home, prfaas: str | None) -> float:
    """The total rate that the home allows with this PrfaaS cluster alone."""
    remotes = tuple(r for r in home.problem.remotes if r.pool.cluster == prfaas)
    single = replace(home.problem, remotes=remotes)
    curves = planner.curves(home)
    return stage_rates(single, curves, optimise(single, curves)).lambda_max / home.share


def _matched(
    problem: NetworkProblem,
    names: Sequence[str],
    rate_rps: float,
    lone: Sequence[float],
    paired: np.ndarray[tuple[int, int], np.dtype[np.float64]],
) -> Pairs | None:
    needy = [i for i, rate in enumerate(lone) if rate < rate_rps]
    given: dict[str, str | None] = {home.cluster: None for home in problem.homes}
    if needy:
        if not names:
            return None
        suffices = csr_array((paired[needy] >= rate_rps).astype(int))
        match = maximum_bipartite_matching(suffices, perm_type="column")
        if np.any(match < 0):
            return None
        for i, column in zip(needy, match.tolist(), strict=True):
            given[problem.homes[i].cluster] = names[column]
    return Pairs(rate_rps, given)


def _bought(
    planner: NetworkPlanner, problem: NetworkProblem, costs: Sequence[float], budget: float
) -> float | None:
    """The largest total rate for which the instances that every PD cluster needs alone cost no more
    than the budget."""
    homes = [planner.work(home) for home in _without_prfaas(problem).homes]
    shares = [home.share for home in problem.homes]

    def instances(home: HomeWork, rate_rps: float) -> tuple[int, int]:
        """For prefill and for decode."""
        prefill = math.ceil(rate_rps * float(home.work.local_s[-1]) * (1 - 1e-12))
        return max(prefill, 1), max(math.ceil(rate_rps / home.decode_rps * (1 - 1e-12)), 1)

    def cost(total_rps: float) -> float:
        needs = (instances(h, s * total_rps) for h, s in zip(homes, shares, strict=True))
        return sum(c * sum(need) for c, need in zip(costs, needs, strict=True))

    if cost(0.0) > budget * (1 + 1e-9):
        return None
    low, high = 0.0, 1.0
    while cost(high) <= budget * (1 + 1e-9):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= budget * (1 + 1e-9) else (low, middle)
    # The rate of exactly these instances, free of the last step of the bisection.
    limits = []
    for home, share in zip(homes, shares, strict=True):
        prefill, decode = instances(home, share * low)
        limits.append(prefill / float(home.work.local_s[-1]) / share)
        limits.append(decode * home.decode_rps / share)
    return min(limits)
